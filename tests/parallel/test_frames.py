"""The vision tower spread over context-parallel ranks: each runs its share, all have all features, and the gradients
are those of one tower."""

import pytest
import torch

from tests.distributed import Layout, lazy

policies = lazy("tests.policies")
context = lazy("megarl.parallel.context")

CP2 = Layout(2, 1, context_parallel=2)
LAYOUTS = [CP2, Layout(4, 1, context_parallel=4), Layout(4, 2, sequence_parallel=True, context_parallel=2)]
ROWS = {
    "one picture": ["image"],  # fewer frames than ranks
    "one video": ["video"],  # cut between its frames
    "pictures and videos": ["images", "both", "other_video", "long_image"],
}


def media(prompts, names):
    items = {item.digest: item for name in names for item in prompts[name].items}.values()
    return torch.cat([item.pixels for item in items]), torch.tensor([item.grid for item in items])


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_features_and_gradients(ranks, checkpoint, prompts, layout):
    """Every rank looks at the features with weights of its own, as if they were its tokens."""
    rows = {name: media(prompts, names) for name, names in ROWS.items()}
    for answer in ranks.run(_compare, checkpoint, rows, layout.sequence_parallel, timeout=120, **layout.job):
        for name, (features, gradient, patches) in answer.items():
            assert features < 1e-5 and gradient < 1e-4, name
            pixels, grids = rows[name]
            assert sum(patches) == len(pixels)  # nothing was encoded twice
            frames = grids[:, 1:].prod(1).repeat_interleave(grids[:, 0])
            assert max(patches) <= max(frames.max(), len(pixels) / len(patches) + frames.max() / 2), name
            assert sum(n > 0 for n in patches) == min(len(frames), len(patches))


def _compare(checkpoint, rows, sequence_parallel):
    group = context.group()
    model = policies.policy(checkpoint, sequence_parallel=sequence_parallel).model
    tower = dict(model.vision_model.named_parameters())
    answer = {}
    for name, (pixels, grids) in rows.items():
        with torch.no_grad():
            whole = model.encode(pixels, grids)
        weights = [torch.randn(whole.shape, generator=torch.Generator().manual_seed(r)) for r in range(group.size())]
        sizes = []
        hook = model.vision_model.register_forward_pre_hook(
            lambda module, arguments, kwargs, sizes=sizes: sizes.append(len(kwargs["hidden_states"])), with_kwargs=True
        )
        spread = model.encode_row(pixels, grids)
        hook.remove()
        assert len(sizes) <= 1
        found = gradients(tower, (spread * weights[group.rank()]).sum())
        for gradient in found.values():
            torch.distributed.all_reduce(gradient, group=group)
        expected = gradients(tower, (model.encode(pixels, grids) * sum(weights)).sum())
        patches = [None] * group.size()
        torch.distributed.all_gather_object(patches, sum(sizes), group=group)
        far = max(float((found[n] - g).abs().max() / g.abs().max()) for n, g in expected.items() if g.any())
        answer[name] = float((spread - whole).abs().max()), far, patches
    return answer


def gradients(parameters, loss):
    for parameter in parameters.values():
        parameter.grad = None
    loss.backward()
    return {n: torch.zeros_like(p) if p.grad is None else p.grad.clone() for n, p in parameters.items()}


@pytest.mark.parametrize("freeze", [(), ("vision",), ("projector",), ("vision", "projector")], ids=str)
def test_ranks_agree_on_the_backward_pass(ranks, checkpoint, prompts, freeze):
    """Also the rank without a frame, whatever is frozen, and without a graph."""
    for graph, scored in ranks.run(_graph, checkpoint, media(prompts, ["image"]), freeze, timeout=60, **CP2.job):
        assert graph == (set(freeze) != {"vision", "projector"}) and not scored


def _graph(checkpoint, row, freeze):
    model = policies.policy(checkpoint, freeze=freeze).model
    features = model.encode_row(*row)
    if features.requires_grad:
        features.sum().backward()
    with torch.no_grad():
        return features.requires_grad, model.encode_row(*row).requires_grad


def test_replicated(ranks, checkpoint, prompts):
    """`vision_dp_when_cp=False`: each rank encodes all."""
    pixels, grids = media(prompts, ["images"])
    for sizes in ranks.run(_sizes, checkpoint, pixels, grids, vision_dp_when_cp=False, **CP2.job):
        assert sizes == [len(pixels)]


def _sizes(checkpoint, pixels, grids, vision_dp_when_cp):
    model = policies.policy(checkpoint, vision_dp_when_cp=vision_dp_when_cp).model
    sizes, stock = [], model.vision_model.forward
    model.vision_model.forward = lambda **kwargs: (sizes.append(len(kwargs["hidden_states"])), stock(**kwargs))[1]
    model.encode_row(pixels, grids)
    return sizes


def test_the_engine_encodes_its_own(ranks, checkpoint, prompts):
    """In a rollout the ranks of a context-parallel group have requests of their own, one of them with media."""
    answers = ranks.run(_rollout, checkpoint, [prompts["text"], prompts["image"]], timeout=60, **CP2.job)
    assert [encoded for encoded, _ in answers] == [0, 1]
    assert [len(ids) for _, ids in answers] == [4, 4]


def _rollout(checkpoint, prompts):
    engine = policies.engine(policies.policy(checkpoint).model)
    ((rollout,),) = engine.generate([prompts[context.group().rank()]], policies.sampling(4, stop_ids=()))
    return engine.features.encoded, rollout.ids.tolist()
