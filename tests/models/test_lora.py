"""Adapters: the same in every layout, merged and taken out again exactly, read by peft."""

import warnings

import pytest
import torch

from tests import tiny
from tests.distributed import TP1, TP2, TP2_SP, Layout, lazy

policies = lazy("tests.policies")
lora = lazy("megarl.models.lora")
adapter_files = lazy("megarl.models.adapter_files")
checkpoints = lazy("megarl.training.checkpoint")
gradients = lazy("megarl.verify.gradients")
dist = lazy("torch.distributed")

ALL = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")


def adapted(checkpoint, modules=ALL, **options):
    """A policy with adapters of rank 4; `merge` is for them, other options are for the model."""
    settings = lora.LoraOptions(4, 8.0, modules, seed=3, merge=options.pop("merge", True))
    return policies.policy(checkpoint, lora=settings, **options)


def _tensors(model):
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def _differing(a, b):
    return {name for name in a if not torch.equal(a[name], b[name])}


# What is trained


@pytest.mark.ranks(1)
def test_trained(checkpoint, prompts):
    """The language model stays bit for bit, has no gradients and no optimizer state; adapters and tower are trained.
    At first the policy is the checkpoint's."""
    plain, policy = policies.policy(checkpoint), adapted(checkpoint)
    sequences = tiny.make_sequences(prompts)
    before = _tensors(policy.model)
    trainer = policies.trainer(policy.model)
    for ours, theirs in zip(
        policies.score(trainer, sequences), policies.score(policies.trainer(plain.model), sequences), strict=True
    ):
        assert (ours - theirs).abs().max() < 1e-5
    for _ in range(2):  # A has no gradient as long as B is zero
        policies.one_update(trainer, sequences)
    changed = _differing(before, _tensors(policy.model))
    trained = {name for name, parameter in policy.model.named_parameters() if parameter.requires_grad}
    assert changed == trained
    assert {name for name in trained if name.startswith("language_model.")} == {
        name for name in before if ".adapter." in name
    }
    held = sum(t.numel() for group in trainer.optimizer.param_groups for t in group["params"])
    assert held == sum(before[name].numel() for name in trained)


@pytest.mark.ranks(1)
def test_frozen_beside(checkpoint, prompts):
    """With the other parts frozen adapters alone are trained."""
    policy = adapted(checkpoint, ("linear_qkv",), freeze=("vision", "projector"))
    trained = [name for name, parameter in policy.model.named_parameters() if parameter.requires_grad]
    assert len(trained) == 2 * 3 and all(".linear_qkv.adapter." in name for name in trained)
    policies.one_update(policies.trainer(policy.model), tiny.make_sequences(prompts))


# Layouts


def _gradients(checkpoint, sequences, layout, recompute="none"):
    """By Hugging Face name, after a step: at first A has none, since B is zero.  A small one: where a gradient is all
    but zero, rounding decides in which direction Adam goes."""
    policy = adapted(checkpoint, sequence_parallel=layout.sequence_parallel, recompute=recompute)
    trainer = policies.trainer(policy.model, learning_rate=1e-3)
    policies.one_update(trainer, sequences)
    found = gradients.named_gradients(
        policy,
        trainer,
        policies.rows(sequences),
        lambda row, log_probs, entropy: (-log_probs.sum(), log_probs.sum().detach()),
    )
    return {name: tensor.clone() for name, tensor in found}


def _close(found, expected):
    return (found - expected).norm() <= 1e-4 * expected.norm() + 1e-6


@pytest.mark.parametrize(
    "layout", [TP2, TP2_SP, Layout(2, 1, context_parallel=2), Layout(2, 1)], ids=lambda layout: layout.name
)
def test_gradients(ranks, checkpoint, prompts, layout):
    """Those of the adapters too are the same however the ranks share the model and the row."""
    sequences = tiny.make_sequences(prompts)
    ((alone),) = ranks.run(_gradients, checkpoint, sequences, TP1, **TP1.job)
    adapters = [name for name in alone if ".lora_" in name]
    assert len(adapters) == 3 * 2 * 7
    assert all(alone[name].norm() > 0 for name in adapters)
    for found in ranks.run(_gradients, checkpoint, sequences, layout, **layout.job):
        assert found.keys() == alone.keys()
        assert all(_close(found[name], expected) for name, expected in alone.items())


@pytest.fixture(scope="module")
def text_checkpoint(tmp_path_factory):
    return tiny.write_family_checkpoint(tmp_path_factory.mktemp("text") / "qwen3", "qwen3")


@pytest.fixture(scope="module")
def text_prompts(tmp_path_factory, text_checkpoint):
    return tiny.make_prompts(tmp_path_factory.mktemp("texts"), text_checkpoint)


def test_recomputed(ranks, text_checkpoint, text_prompts):
    """Where nothing before the layers is trained, recomputing them loses no gradient."""
    sequences = tiny.make_sequences(text_prompts)
    plain, recomputed = (
        ranks.run(_gradients, text_checkpoint, sequences, TP1, recompute, **TP1.job)[0]
        for recompute in ("none", "full")
    )
    assert any(plain[name].norm() > 0 for name in plain if ".lora_A" in name)
    assert all(_close(recomputed[name], expected) for name, expected in plain.items())


# Merging


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.ranks(1)
def test_merged_and_taken_out(checkpoint, prompts, dtype):
    """A hundred times, with updates between and once through an exception: base weights bit equal, where they were."""
    policy = adapted(checkpoint)
    trainer, sequences = policies.trainer(policy.model), tiny.make_sequences(prompts)
    policies.one_update(trainer, sequences)
    if dtype == "bfloat16":
        policy.model.bfloat16()
    before, places = _tensors(policy.model), {n: p.data_ptr() for n, p in policy.model.named_parameters()}
    for _ in range(100):
        with policy.merged():
            inside = _differing(before, _tensors(policy.model))
    assert inside == {name for name in before if ".to_wrap.weight" in name}
    with pytest.raises(RuntimeError, match="inside"), policy.merged():
        raise RuntimeError("inside")
    assert not _differing(before, _tensors(policy.model))
    assert places == {n: p.data_ptr() for n, p in policy.model.named_parameters()}


@pytest.mark.ranks(1)
def test_a_checkpoint_is_loaded_between(checkpoint):
    """Its weights are what is restored from then on."""
    policy = adapted(checkpoint)
    with policy.merged():
        pass
    with torch.no_grad():
        for parameter in policy.model.parameters():
            parameter.mul_(1.5)
    before = _tensors(policy.model)
    for _ in range(2):
        with policy.merged():
            pass
        assert not _differing(before, _tensors(policy.model))


@pytest.mark.ranks(1)
def test_merged_is_the_same_policy(checkpoint, prompts):
    policy = adapted(checkpoint)
    trainer, sequences = policies.trainer(policy.model), tiny.make_sequences(prompts)
    start = torch.cat(policies.score(trainer, sequences))
    for _ in range(3):
        policies.one_update(trainer, sequences)
    pair = torch.cat(policies.score(trainer, sequences))
    with policy.merged():
        merged = torch.cat(policies.score(trainer, sequences))
    assert (pair - start).abs().max() > 0.1
    assert (merged - pair).abs().max() < 1e-5
    assert torch.equal(torch.cat(policies.score(trainer, sequences)), pair)


@pytest.mark.ranks(1)
def test_another_reference(checkpoint, tied_checkpoint, prompts):
    """A checkpoint that is scored with has none of the policy's adapters."""
    reference = lazy("megarl.training.reference")
    build = lazy("megarl.models.build")
    policy = adapted(checkpoint)
    trainer, sequences = policies.trainer(policy.model), tiny.make_sequences(prompts)
    start = torch.cat(policies.score(trainer, sequences))
    for _ in range(2):
        policies.one_update(trainer, sequences)
    trained = torch.cat(policies.score(trainer, sequences))
    teacher = reference.ReferencePolicy.filled(policy.model, lambda: build.fill(policy, checkpoint))
    with teacher.swapped_in():
        assert torch.equal(torch.cat(policies.score(trainer, sequences)), start)
    assert torch.equal(torch.cat(policies.score(trainer, sequences)), trained)


# Files


def _saved(checkpoint, sequences, layout, folder):
    policy = adapted(checkpoint, sequence_parallel=layout.sequence_parallel)
    trainer = policies.trainer(policy.model)
    for _ in range(2):
        policies.one_update(trainer, sequences)
    checkpoints.save_weights(folder, policy.model)
    return policies.weights(policy)


def _loaded(checkpoint, layout, folder):
    policy = adapted(checkpoint, sequence_parallel=layout.sequence_parallel)
    checkpoints.load_weights(folder, policy.model)
    return policies.weights(policy)


def test_checkpoint_of_another_layout(ranks, checkpoint, prompts, tmp_path):
    sequences = tiny.make_sequences(prompts)
    saved = ranks.run(_saved, checkpoint, sequences, TP2, tmp_path / "saved", **TP2.job)[0]
    (loaded,) = ranks.run(_loaded, checkpoint, TP1, tmp_path / "saved", **TP1.job)
    assert saved.keys() == loaded.keys()
    for name, tensor in saved.items():
        # The sum of products is taken in another order where the ranks share it.
        assert (loaded[name] - tensor).abs().max() < 1e-6, name


def _adapter(checkpoint, prompts, modules, folder, parts):
    """Writes trained adapters; greedy answers of the engine."""
    policy = adapted(checkpoint, modules, freeze=parts)
    trainer = policies.trainer(policy.model)
    for _ in range(2):
        policies.one_update(trainer, tiny.make_sequences(prompts))
    adapter_files.save_adapters(policy, folder, str(checkpoint))
    engine = policies.engine(policy.model, as_sampled=policy.as_sampled)
    groups = engine.generate(list(prompts.values()), policies.sampling(6, (), temperature=0.0))
    return [(group[0].prompt, group[0].ids) for group in groups]


@pytest.mark.parametrize("model_type", ["qwen3_vl", "qwen3_vl_moe", "qwen2_5_vl", "llama"])
def test_peft(ranks, tmp_path, model_type):
    """peft reads the folder over the checkpoint, and transformers then gives the engine's greedy answers."""
    from peft import PeftModel

    checkpoint = tiny.write_family_checkpoint(tmp_path / "base", model_type)
    prompts = tiny.make_prompts(tmp_path, checkpoint)
    modules = ALL[:2] if model_type.endswith("moe") else ALL
    frozen = ("vision", "projector") if "vl" in model_type else ()
    layout = TP2 if model_type == "qwen3_vl" else TP1
    answers = ranks.run(_adapter, checkpoint, prompts, modules, tmp_path / "adapter", frozen, **layout.job)[0]
    reference = tiny.Reference(checkpoint)
    base = [reference.logits(prompt, ids).detach() for prompt, ids in answers]
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # of keys that are missing, or in no module
        reference.model = PeftModel.from_pretrained(reference.model, tmp_path / "adapter").merge_and_unload()
    for (prompt, ids), before in zip(answers, base, strict=True):
        logits = reference.logits(prompt, ids).detach()
        assert torch.equal(logits[prompt.ids.numel() - 1 : -1].argmax(-1), ids)
        assert (logits - before).abs().max() > 0.05
