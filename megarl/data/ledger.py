"""What the check of a data set found, in the run folder: a resumed run has the data that it began with."""

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np

from megarl.data.checked import Checked
from megarl.data.rejection import read_rejections, write_rejections
from megarl.errors import UserError


class Ledger:
    """`data_<split>.json`, `data_<split>.npz` and `rejected_<split>.jsonl` in the run folder.

    It is believed only by a run that has begun.  Until then every start checks anew, since rows may have been
    rejected for what has passed: a folder that was not mounted, a server that did not answer.
    """

    def __init__(self, folder: Path, split: str, settings: dict[str, Any], resumed: bool = False, record: bool = True):
        """
        Args:
            settings: all that decides what a row becomes, beside the files: as JSON has it.
            resumed: the run has begun, and trains on what is recorded here.
            record: keep what is found.
        """
        self._report = folder / f"data_{split}.json"
        self._accepted = folder / f"data_{split}.npz"
        self._rejected = folder / f"rejected_{split}.jsonl"
        self._split = split
        self._settings = json.loads(json.dumps(settings))
        self._resumed = resumed
        self._record = record

    def read(self, sha256: str) -> Checked | None:
        """What the run began with; None where the rows must be checked: by a run that begins, after an update of a
        library, or where the record is damaged.

        Args:
            sha256: `dataset_hash` of the files as they are now.

        Raises:
            UserError: the run began with other files.
        """
        report = self._read_report()
        if report is None:
            return None
        if report["sha256"] != sha256:
            raise self._changed(f"SHA-256 of its files {report['sha256'][:12]} -> {sha256[:12]}")
        if report["settings"] != self._settings:
            return None
        try:
            with np.load(self._accepted, allow_pickle=False) as kept:
                fingerprints = kept["fingerprints"] if "fingerprints" in kept else None
                answers, sources = _unpack(kept["answers"]), _unpack(kept["sources"])
                rejections = read_rejections(self._rejected)
                found = Checked(kept["places"], answers, sources, rejections, fingerprints)
        except Exception:  # a damaged archive fails in zipfile's, zlib's and numpy's many ways
            return None
        whole = len(found.places) == len(answers) == len(sources) and len(rejections) == report["rejected"]
        return found if whole and not _differences(report, found) else None

    def refuse_other(self, found: Checked) -> None:
        """Compare what is found now with what the run began with.

        Raises:
            UserError: it differs.
        """
        report = self._read_report()
        if report and (differences := _differences(report, found)):
            before = read_rejections(self._rejected)
            new = [rejection for rejection in found.rejections if rejection not in before][:1]
            first = "".join(f"; now rejected: row {r.row}, {r.item}: {r.reason}" for r in new)
            raise self._changed(differences + first)

    def write_rejections(self, found: Checked) -> None:
        """Say what was rejected.  Before it is known whether the run can begin with it, so that users can mend it."""
        if not self._record:
            return
        self._report.parent.mkdir(parents=True, exist_ok=True)
        if not self._resumed:
            self._report.unlink(missing_ok=True)
        if found.rejections:
            _replace(self._rejected, lambda file: write_rejections(found.rejections, Path(file.name)))
        else:
            self._rejected.unlink(missing_ok=True)

    def write(self, files: Sequence[Path], sha256: str, found: Checked) -> None:
        """Keep what the run has; `sha256` is `dataset_hash(files)`."""
        if not self._record:
            return
        self.write_rejections(found)
        arrays = {"places": found.places, "answers": _pack(found.answers), "sources": _pack(found.sources)}
        if found.fingerprints is not None:
            arrays["fingerprints"] = found.fingerprints
        _replace(self._accepted, lambda file: np.savez_compressed(file, **arrays))
        report = {
            "files": [{"path": str(path), "bytes": path.stat().st_size} for path in files],
            "sha256": sha256,
            "rows": found.rows,
            "accepted": len(found.places),
            "rejected": len(found.rejections),
            "content_sha256": found.content_sha256,
            "settings": self._settings,
        }
        _replace(self._report, lambda file: file.write(json.dumps(report, indent=1).encode() + b"\n"))

    def _read_report(self) -> dict[str, Any] | None:
        """The report that counts, with all keys that are read of it."""
        if not self._resumed:
            return None
        try:
            report = json.loads(self._report.read_text())
            return {key: report[key] for key in ("sha256", "settings", "accepted", "rejected", "content_sha256")}
        except (OSError, ValueError, KeyError, TypeError):  # none, or another version's
            return None

    def _changed(self, what: str) -> UserError:
        return UserError(
            f"the data of the split {self._split!r} is not what the run in {self._report.parent} began with: {what}; "
            "restore the data, set allow_dataset_change = true, or give another run_dir"
        )


def _differences(report: dict[str, Any], found: Checked) -> str:
    """Of the accepted rows, in words; empty where there are none."""
    if report["accepted"] != len(found.places):
        return f"accepted rows {report['accepted']} -> {len(found.places)}"
    before, now = report["content_sha256"], found.content_sha256
    if before != now:
        return f"content_sha256 {str(before)[:12]} -> {str(now)[:12]}"
    return ""


def _replace(path: Path, write: Callable[[IO[bytes]], Any]) -> None:
    """A file is whole or what it was before."""
    partial = path.with_name(f".{path.name}.tmp")
    with partial.open("wb") as file:
        write(file)
    os.replace(partial, path)


def _pack(texts: Sequence[str]) -> np.ndarray:
    """uint8: a JSON list.  Unlike numpy's own strings it keeps NULs at the end, and short texts short."""
    return np.frombuffer(json.dumps(list(texts)).encode(), np.uint8)


def _unpack(packed: np.ndarray) -> list[str]:
    names: dict[str, str] = {}
    return [names.setdefault(text, text) for text in json.loads(packed.tobytes())]
