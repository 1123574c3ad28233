"""`python -m tests.parity [--real]`: logits, log-probabilities and gradients against transformers, for each family.

Without an option: tiny models in float32 on a CPU.  With `--real`: models of published sizes with random weights in
bfloat16 on one GPU, each distance beside that of transformers in bfloat16, all from transformers in float32.  Prints a
Markdown table, a row as soon as it is known; exit code 1 where a bound is broken or a model failed.
"""

import argparse
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from megarl.models.families import FAMILIES
from tests.distributed import Ranks
from tests.parity import measure
from tests.parity.exchange import FOUND
from tests.parity.models import REAL, REAL_TOKENS, TINY_TOKENS, Shape, Tokens, real_question, tiny_question

_SECONDS = 240
"""After which megarl's process is given up."""


class _Job:
    """megarl's process at work on one model, from a question in a folder of its own."""

    def __init__(self, shape: Shape, tokens: Tokens):
        self.shape = shape
        self._own = tempfile.TemporaryDirectory(prefix="megarl-parity-")
        self.folder = Path(self._own.name)
        self._process = None
        try:
            real_question(self.folder, shape, tokens)
            with (self.folder / "log").open("w") as log:
                command = [sys.executable, "-m", "tests.parity.job", str(self.folder)]
                self._process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        except Exception:
            traceback.print_exc()

    def wait(self) -> bool:
        """Whether it ended well; else the end of what it printed is shown."""
        if self._process is None:
            return False
        try:
            code = self._process.wait(_SECONDS)
        except subprocess.TimeoutExpired:
            code = f"none after {_SECONDS} s"
            self._end()
        if code != 0:
            print(f"{self.shape.name}: exit code {code}\n{(self.folder / 'log').read_text()[-4000:]}", file=sys.stderr)
        return code == 0

    def _end(self) -> None:
        self._process.kill()
        self._process.wait()

    def close(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self._end()
        self._own.cleanup()


def _jobs(shapes: Sequence[Shape], tokens: Tokens) -> Iterator[tuple[_Job, bool]]:
    """Jobs that have ended, and whether well; the next one works while one is looked at."""
    ahead = _Job(shapes[0], tokens)
    try:
        for following in (*shapes[1:], None):
            current, well = ahead, ahead.wait()
            ahead = _Job(following, tokens) if following else current
            try:
                yield current, well
            finally:
                current.close()
    finally:
        ahead.close()


def real(shapes: Sequence[Shape], tokens: Tokens, say: Callable[[str], None]) -> bool:
    """Says the table; whether all is within bounds."""
    good = True
    for text in measure.real_head():
        say(text)
    for job, well in _jobs(shapes, tokens):
        good &= well
        if not (job.folder / FOUND).exists():
            continue
        try:
            for line in measure.lines(job.shape.name, job.folder):
                say(measure.real_row(line))
                if not line.good:
                    print(f"{line.model}, {line.what}: {line.ours}, allowed {line.at_most}", file=sys.stderr)
                good &= line.good
        except Exception:
            traceback.print_exc()
            good = False
        measure.release()
    return good


def small(say: Callable[[str], None]) -> bool:
    """Likewise of tiny models."""
    good, ranks = True, Ranks()
    for text in measure.tiny_head():
        say(text)
    try:
        for model_type in FAMILIES:
            with tempfile.TemporaryDirectory() as name:
                tiny_question(Path(name), model_type)
                ranks.run_named("tests.parity.job", "answer", (Path(name),), {})
                lines = measure.lines(model_type, Path(name))
            say(measure.tiny_row(lines))
            good &= all(line.good for line in lines)
    finally:
        ranks.end()
    return good


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="tests.parity", description=__doc__)
    parser.add_argument("--real", action="store_true", help="published sizes, bfloat16, on one GPU")
    parser.add_argument("--only", default=",".join(FAMILIES), help="some families, separated by commas; with --real")
    parser.add_argument(
        "--rehearse", action="store_true", help="with --real: two layers, few experts and a small vocabulary"
    )
    parser.add_argument("--out", type=Path, help="a file for the table too")
    options = parser.parse_args(arguments)
    start = time.monotonic()
    if options.out:
        options.out.write_text("")

    def say(line: str) -> None:
        print(line, flush=True)
        if options.out:
            with options.out.open("a") as file:
                file.write(line + "\n")

    if options.real:
        shapes = [shape for shape in REAL if shape.model_type in options.only.split(",")]
        shapes = [shape.rehearsed() for shape in shapes] if options.rehearse else shapes
        good = real(shapes, TINY_TOKENS if options.rehearse else REAL_TOKENS, say)
    else:
        good = small(say)
    print(f"{'within' if good else 'NOT within'} bounds, {time.monotonic() - start:.0f} s", file=sys.stderr)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
