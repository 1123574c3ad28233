"""Recorded experts in training, where the router would choose others: against transformers sent along the same way."""

import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from megarl.packing.rows import NOT_RECORDED, TokenSequence
from tests import tiny
from tests.distributed import TP1, Layout, lazy
from tests.training.test_gradients import TOLERANCE, loss, row_loss, worst

policies = lazy("tests.policies")
parallel_state = lazy("megatron.core.parallel_state")
grpo = lazy("megarl.training.grpo")
objective = lazy("megarl.algorithms.objective")
reference_policy = lazy("megarl.training.reference")
router_replay = lazy("megarl.models.router_replay")

CASES = [
    (TP1, "full"),
    (Layout(2, 1), "selective"),
    (Layout(2, 1, expert_parallel=2), "full"),
    (Layout(2, 2, sequence_parallel=True, expert_parallel=2), "full"),
    (Layout(2, 1, context_parallel=2, expert_parallel=2), "none"),
    (Layout(2, 2, sequence_parallel=True), "none"),
    (Layout(4, 1, context_parallel=2, expert_parallel=4), "full"),
    (Layout(4, 2, sequence_parallel=True, context_parallel=2, expert_parallel=2), "none"),
]
"""A layout, and what it recomputes: that is the same in every layout."""
QUICK = CASES[:5]


@pytest.fixture(scope="module")
def moved_checkpoint(mixture_checkpoint, tmp_path_factory):
    """The mixture after its routers have moved: what a rollout recorded is not what they choose now."""
    folder = tmp_path_factory.mktemp("moved") / "checkpoint"
    shutil.copytree(mixture_checkpoint, folder)
    weights = load_file(folder / "model.safetensors")
    for name in weights:
        if name.endswith("mlp.gate.weight"):
            weights[name] += 0.06 * torch.randn(weights[name].shape, generator=torch.Generator().manual_seed(3))
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def moved_reference(moved_checkpoint):
    return tiny.Reference(moved_checkpoint)


@pytest.fixture(scope="module")
def recorded(ranks_of_session, mixture_checkpoint, prompts):
    """Rollouts under the routers as they were, groups of 2, with their experts."""
    (found,) = ranks_of_session.run(_record, mixture_checkpoint, list(prompts.values()))
    places = [place for place in range(len(prompts)) for _ in range(2)]
    batch = list(prompts.values())
    return [TokenSequence(batch[place], *one) for place, one in zip(places, found, strict=True)]


@pytest.fixture(scope="module")
def ranks_of_session(pytestconfig):
    from tests.conftest import _RANKS

    return pytestconfig.stash[_RANKS]


def _record(checkpoint, prompts):
    policy = policies.policy(checkpoint, router_replay=True)
    engine = policies.engine(policy.model, enable_prefix_caching=True)
    groups = engine.generate(prompts, policies.sampling(), 2)
    return [(r.ids, r.routing_indices) for group in groups for r in group]


class Forced:
    """transformers, whose routers are told the experts of all tokens but the last."""

    def __init__(self, reference):
        self._reference, self.gates = reference, [layer.mlp.gate for layer in reference.model.get_decoder().layers]
        self.replayed = self.rerouted = 0

    def log_probs(self, sequence: TokenSequence):
        hooks = [
            gate.register_forward_hook(lambda _, inputs, output, layer=layer: self._force(sequence, layer, output[0]))
            for layer, gate in enumerate(self.gates)
        ]
        try:
            return self._reference.log_probs(sequence.prompt, sequence.completion)
        finally:
            for hook in hooks:
                hook.remove()

    def _force(self, sequence, layer, logits):
        own = logits.topk(2, -1).indices
        indices = torch.cat([sequence.routing_indices[:, layer].long(), own[-1:]])
        different = (indices.sort(-1).values != own.sort(-1).values).any(-1)
        self.replayed, self.rerouted = self.replayed + len(different) - 1, self.rerouted + int(different.sum())
        probabilities = logits.float().softmax(-1).gather(1, indices)
        return logits, probabilities / probabilities.sum(-1, keepdim=True), indices


@pytest.fixture(scope="module")
def expected(moved_reference, recorded):
    """Of transformers, forced: log-probabilities, gradients and the share of tokens that are rerouted; and the
    log-probabilities without force."""
    forced, model = Forced(moved_reference), moved_reference.model
    model.zero_grad()
    scores = []
    for sequence in recorded:
        output = forced.log_probs(sequence)
        loss(sequence.completion, *output).backward()
        scores.append(output[0].detach())
    gradients = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    with torch.no_grad():
        free = [moved_reference.log_probs(s.prompt, s.completion)[0] for s in recorded]
    assert min(float(gradient.abs().max()) for gradient in gradients.values()) > 1e-3  # the routers' among them
    assert max(float((a - b).abs().max()) for a, b in zip(scores, free, strict=True)) > 0.1
    return scores, gradients, forced.rerouted / forced.replayed, free


@pytest.mark.parametrize(
    "layout, recompute",
    [
        pytest.param(
            layout,
            recompute,
            id=f"{layout.world_size}-{layout}-{recompute}",
            marks=[] if (layout, recompute) in QUICK else pytest.mark.slow,
        )
        for layout, recompute in CASES
    ],
)
def test_replayed(ranks, moved_checkpoint, recorded, expected, layout, recompute):
    """The recorded experts are used and weighed by the present router, forwards and backwards, in rows with padding and
    on ranks that run idle rows.  Without the record the same rows go elsewhere."""
    scores, gradients, rerouted, free = expected
    answers = ranks.run(_score_and_gradients, moved_checkpoint, recorded, layout, recompute, **layout.job)
    seen = set()
    for mine, found, share, unforced in answers:
        for index, values in mine.items():
            assert float((values - scores[index]).abs().max()) < 1e-5
            assert float((unforced[index] - free[index]).abs().max()) < 1e-5
        seen |= mine.keys()
        assert worst(found, gradients)[0] < TOLERANCE, worst(found, gradients)
        assert share == pytest.approx(rerouted, abs=1e-3) and share > 0.05
    assert seen == set(range(len(recorded)))


def _score_and_gradients(checkpoint, sequences, layout, recompute):
    policy = policies.policy(
        checkpoint, sequence_parallel=layout.sequence_parallel, router_replay=True, recompute=recompute
    )
    trainer = policies.trainer(policy.model)
    rank, size = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()
    mine = {i: s for i, s in enumerate(sequences) if (i if 0 < i < size else 0) == rank}
    scores = policies.score(trainer, list(mine.values()), tokens_per_row=300)
    share = trainer.rerouted()
    free = [TokenSequence(s.prompt, s.completion) for s in mine.values()]
    unforced = policies.score(trainer, free, tokens_per_row=300)
    assert trainer.rerouted() is None
    found = policies.gradients(policy, trainer, policies.rows(list(mine.values()), 300), row_loss)
    return dict(zip(mine, scores, strict=True)), found, share, dict(zip(mine, unforced, strict=True))


def test_the_routers_own_choice(ranks, mixture_checkpoint, recorded, mixture_reference):
    """Under the weights that sampled, the record is what the trainer's routers choose: nothing moves."""
    ((share, scores),) = ranks.run(_score, mixture_checkpoint, recorded)
    assert share == 0
    for sequence, values in zip(recorded, scores, strict=True):
        expected = mixture_reference.log_probs(sequence.prompt, sequence.completion)[0]
        assert float((values - expected).abs().max()) < 1e-5


def _score(checkpoint, sequences):
    policy = policies.policy(checkpoint, router_replay=True)
    trainer = policies.trainer(policy.model)
    scores = policies.score(trainer, sequences)
    return trainer.rerouted(), scores


def test_reference_policy_routes_freely(ranks, moved_checkpoint, recorded, expected):
    ((trainer, reference, scoring, metrics),) = ranks.run(_scored_by_step, moved_checkpoint, recorded)
    scores, _, rerouted, free = expected
    for index in range(len(recorded)):
        assert float((trainer[index] - scores[index]).abs().max()) < 1e-5
        assert float((reference[index] - free[index]).abs().max()) < 1e-5
    assert scoring == {"mismatch/routing": pytest.approx(rerouted, abs=1e-3)}
    assert metrics["policy/ratio"] == pytest.approx(1, abs=1e-5)  # updates replay what scoring did


def _scored_by_step(checkpoint, sequences):
    policy = policies.policy(checkpoint, router_replay=True)
    trainer = policies.trainer(policy.model)
    options = grpo.StepOptions(
        objective.ObjectiveOptions(kl_coefficient=0.1), grpo.CreditOptions(group_size=1), 1, 1, "trainer", 300
    )
    samples = [grpo.Sample(s, torch.zeros(s.completion.numel()), (1.0,)) for s in sequences]
    step = grpo.PolicyStep(trainer, reference_policy.ReferencePolicy(policy.model), options, tiny.MERGE)
    scored = step.score(samples)
    metrics = step.update(samples, scored, step.credit(samples, scored))
    return scored.trainer, scored.reference, scored.metrics, metrics


def test_routers_belong_to_their_model(ranks, mixture_checkpoint, checkpoint, recorded):
    """Megatron's list of the process is empty but while an engine records, and then it is that engine's model's."""
    assert ranks.run(_owners, mixture_checkpoint, checkpoint, recorded[0]) == [None]


def _owners(mixture_checkpoint, checkpoint, sequence):
    listed = router_replay.RouterReplay.global_router_replay_instances
    first, second = (policies.policy(mixture_checkpoint, router_replay=True) for _ in range(2))
    assert listed == [] and len(router_replay.layer_replays(first.model)) == 3
    assert not set(router_replay.layer_replays(first.model)) & set(router_replay.layer_replays(second.model))
    with pytest.raises(RuntimeError, match="oops"), router_replay.recording(router_replay.layer_replays(first.model)):
        assert listed == router_replay.layer_replays(first.model)
        raise RuntimeError("oops")
    assert listed == [] and all(r.router_replay_action is None for r in router_replay.layer_replays(first.model))
    # A record for a model that was built without replay is no silent no-op.
    trainer = policies.trainer(policies.policy(mixture_checkpoint).model)
    with pytest.raises(ValueError, match="zip"):
        policies.score(trainer, [sequence])


def test_unknown_tokens_route_freely(ranks, mixture_checkpoint):
    assert ranks.run(_unknown, mixture_checkpoint) == [None]


def _unknown(checkpoint):
    """One layer by hand: a recorded token, one that is not, and the counts of the two."""
    layer = router_replay.LayerReplay(torch.device("cpu"))
    layer.set_target_indices(torch.tensor([[0, 3], [NOT_RECORDED] * 2, [2, 1]]))
    layer.set_router_replay_action(router_replay.RouterReplayAction.REPLAY_FORWARD)
    scores = torch.tensor([[4.0, 3, 2, 1], [1, 5, 0, 6], [0, 1, 2, 0]], requires_grad=True)

    def top(scores, topk, num_groups=None, group_topk=None):
        return scores.topk(topk, 1)

    values, indices = layer.get_replay_topk(scores, 2, default_compute_topk=top)
    assert indices.tolist() == [[0, 3], [3, 1], [2, 1]] and values.tolist() == [[4, 1], [6, 5], [2, 1]]
    assert layer.compared.tolist() == [2, 1]
    values.sum().backward()
    assert scores.grad.tolist() == [[1, 0, 0, 1], [0, 1, 0, 1], [0, 1, 1, 0]]
