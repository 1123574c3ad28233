"""The table, and the JSON by which versions are compared."""

import json
from importlib.metadata import version

from megarl.bench.lines import Line
from megarl.bench.report import as_json, print_table

LINES = [Line("decode", "tokens/s", 50.0, 100.0, 400.0), Line("start", "s", 3.0)]


def test_json():
    said = json.loads(as_json(LINES, ["a recipe.yaml", "--json"]))
    assert said["command"] == "python -m megarl.bench 'a recipe.yaml' --json"
    assert said["versions"]["torch"] == version("torch")
    assert "transformer-engine" in said["versions"] and "flash-attn-4" in said["versions"]
    first, second = said["lines"]
    assert first == dict(name="decode", unit="tokens/s", megarl=50, peer=100, floor=400, gap=8, ratio=0.5)
    assert second["peer"] is None and second["gap"] is None


def test_table(capsys):
    print_table(LINES)
    heads, decode, start = (
        [cell.strip() for cell in line.replace("┃", "│").split("│")[1:-1]]
        for line in capsys.readouterr().out.splitlines()
        if "│" in line or "┃" in line
    )
    assert heads == ["", "megarl", "floor", "gap", "peer", "ratio", "unit"]
    assert decode == ["decode", "50.00", "400", "8.00", "100.00", "0.50", "tokens/s"]
    assert start == ["start", "3.00", "", "", "", "", "s"]
