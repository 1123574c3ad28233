"""A profile says how long the device worked and on what."""

import json
import time

import pytest
import torch

from megarl.bench.profile import covered, profile


def test_union():
    assert covered([]) == 0
    assert covered([(5, 6), (0, 2), (1, 3), (1, 2)]) == 4


@pytest.mark.parametrize("idle", [0.0, 0.5])
def test_busy(tmp_path, capsys, idle):
    matrix = torch.randn(512, 512)

    def work():
        for _ in range(20):
            matrix @ matrix
        time.sleep(idle)

    found = profile("some work", work, tmp_path / "made")
    assert 0 < found.busy * found.seconds < found.seconds - idle
    assert found.kernels[0][:2] == ("aten::mm", 20)
    assert found.kernels[0][2] <= found.busy * found.seconds * 1.01
    events = json.loads(found.trace.read_text())["traceEvents"]
    assert sum(event["name"] == "aten::mm" for event in events) == 20
    found.print()
    said = capsys.readouterr()
    assert not said.out and "aten::mm" in said.err and "some work" in said.err
