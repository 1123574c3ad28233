"""The checks for people, and for programs."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict

from rich.console import Console
from rich.table import Table

from megarl.verify.compare import Check

_COLOURS = {"passed": "green", "failed": "bold red", "skipped": "yellow"}


def failed(checks: Sequence[Check]) -> bool:
    return any(check.verdict == "failed" for check in checks)


def print_table(checks: Sequence[Check], title: str) -> None:
    """A line per check, then how many failed."""
    table = Table("check", "of", "measured", "bound", "", title=title, title_justify="left")
    for check in checks:
        bounds = [_values(check.at_most, "≤ "), _values(check.at_least, "≥ ")]
        measured = "\n".join(part for part in (_values(check.measured), check.note) if part)
        verdict = f"[{_COLOURS[check.verdict]}]{check.verdict}"
        table.add_row(check.name, check.subject, measured, "\n".join(filter(None, bounds)), verdict)
    console = Console()
    console = console if console.is_terminal else Console(width=160)
    console.print(table)
    counts = {verdict: sum(check.verdict == verdict for check in checks) for verdict in _COLOURS}
    console.print(", ".join(f"{count} {verdict}" for verdict, count in counts.items() if count))


def as_json(checks: Sequence[Check], **about) -> str:
    """One object: what was verified, each check with its verdict, and whether none failed."""
    lines = [asdict(check) | {"verdict": check.verdict} for check in checks]
    return json.dumps({**about, "checks": lines, "passed": not failed(checks)})


def _values(values: Mapping[str, float], before: str = "") -> str:
    return ", ".join(f"{name} {before}{_number(name, value)}" for name, value in values.items())


def _number(name: str, value: float) -> str:
    return f"{value:.6f}" if name == "tmpe" else f"{value:.1e}"
