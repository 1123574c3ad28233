"""The lines about parallelism: the batch is one, the exchange evens out its cost, and jobs of their own measure it."""

from dataclasses import asdict
from types import SimpleNamespace

import pytest

from megarl.bench import scaling
from tests.commands import ROOT
from tests.distributed import TP1, Layout, lazy

policies = lazy("tests.policies")
scaling_job = lazy("megarl.bench.scaling_job")


def test_layouts_share_one_skewed_batch(ranks, checkpoint):
    alone, *data = (
        answer
        for layout in (TP1, Layout(2, 1), Layout(2, 1, context_parallel=2))
        for answer in ranks.run(_measure, checkpoint, **layout.job)
    )
    data, context = data[:2], data[2:]
    assert data[0].imbalance == data[1].imbalance
    assert {one.tokens for one in (alone, *data, *context)} == {alone.tokens}
    assert alone.imbalance == context[0].imbalance == (1, 1) and alone.vision_seconds is None
    before, after = data[0].imbalance
    assert before > 1.2 and 1 <= after < 1.1
    for one in (alone, *data, *context):
        packed, padded = one.padding
        assert 0 <= packed < 0.01 and 0.5 < padded < 1 and one.step_seconds > 0
    assert context[0].padding[0] > 0  # rows are multiples of 2
    assert min(context[0].vision_seconds) > 0


def _measure(checkpoint):
    policy = policies.policy(checkpoint)
    measured = scaling_job.measure(policy, policies.trainer(policy.model), 1200, rounds=1)
    return SimpleNamespace(**asdict(measured))  # its own class would bring Megatron into the test's process


@pytest.mark.slow
def test_lines(tmp_path):
    options = SimpleNamespace(recipe=ROOT / "recipes" / "bench.yaml", overrides=[f"run_dir={tmp_path}"], rounds=1)
    chosen = [layout for layout in scaling.LAYOUTS if layout[0] < 4 and layout[1] != "tensor parallel"]
    lines = {line.name.split(",")[0]: line for line in scaling.measure(options, chosen)}
    assert len(lines) == 4 and all(line.megarl > 0 and line.peer > 0 for line in lines.values())
    assert lines["largest over mean cost"].ratio < 1
