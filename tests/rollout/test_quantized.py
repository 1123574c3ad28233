"""Rollouts in eight bits, against transformers whose layers are rounded by formulas of our own."""

import sys

import pytest
import torch
from torch.nn import functional

from tests import tiny
from tests.distributed import TP1, TP2, TP2_SP, Layout, lazy
from tests.rollout.test_engine import TOLERANCE, _scored, largest
from tests.rollout.test_sync import Engines

policies = lazy("tests.policies")
quantized = lazy("megarl.rollout.quantized")
errors = lazy("megarl.errors")

LARGEST = 448.0
"""Of E4M3."""


def _round(values, amax, format):
    """Where gradients are asked for they go straight through."""
    if values.requires_grad:
        return values + (_round(values.detach(), amax, format) - values).detach()
    if format == "int8":
        step = amax / 127
        return (values / step).round().clamp(-128, 127) * step
    scale = amax / LARGEST
    return (values / scale).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn).float() * scale


_PARTS = {
    "self_attention.linear_qkv": ("self_attn", ("q_proj", "k_proj", "v_proj")),
    "self_attention.linear_proj": ("self_attn", ("o_proj",)),
    "mlp.linear_fc1": ("mlp", ("gate_proj", "up_proj")),
    "mlp.linear_fc2": ("mlp", ("down_proj",)),
}


class Rounded(tiny.Reference):
    """transformers with the inputs and weights of the language model's layers rounded to FP8; Megatron's matrices are
    several of transformers', which share an input and a scale."""

    def __init__(self, folder, calibration):
        super().__init__(folder)
        layers = self.model.get_decoder().layers
        assert len(calibration) == len(_PARTS) * len(layers)
        for name, amax in calibration.items():
            _, number, part = name.removeprefix("decoder.").split(".", 2)
            owner, names = _PARTS[part]
            linears = [getattr(getattr(layers[int(number)], owner), one) for one in names]
            together = max(linear.weight.abs().max() for linear in linears)
            for linear in linears:
                linear.forward = _product(linear, together.detach(), amax)


def _product(linear, largest_weight, largest_input):
    def forward(x):
        return functional.linear(
            _round(x, largest_input, "fp8"), _round(linear.weight, largest_weight, "fp8"), linear.bias
        )

    return forward


def _aware(checkpoint, prompts, layout):
    """Calibration, and of each rollout ids, the engine's log-probabilities and the trainer's; gradients of what
    `tiny.make_sequences` makes; log-probabilities before and after an update."""
    parts = policies.parts(checkpoint, layout, quantized="fp8")
    parts.quantization.calibrate(lambda: parts.engine.generate(prompts, policies.sampling(1)))
    parts.engine.weights_changed()
    answers = _scored(parts.trainer, parts.engine.generate(prompts, policies.sampling()))
    sequences = tiny.make_sequences(dict(enumerate(prompts)))
    found = policies.gradients(
        parts.policy, parts.trainer, policies.rows(sequences), lambda row, log_probs, entropy: -log_probs.sum()
    )
    policies.one_update(parts.trainer, sequences)
    parts.sync()
    again = _scored(parts.trainer, parts.engine.generate(prompts, policies.sampling()))
    return parts.quantization.calibration, answers, found, again


@pytest.mark.parametrize("layout", [TP1, TP2_SP], ids=str)
def test_aware(ranks, checkpoint, prompts, layout):
    """Engine and trainer are the same rounded policy, before and after an update, and gradients go straight through
    the rounding: log-probabilities and gradients are those of the rounded transformers."""
    batch = list(prompts.values())
    calibration, answers, found, again = ranks.run(_aware, checkpoint, batch, layout, **layout.job)[0]
    rounded, plain = Rounded(checkpoint, calibration), tiny.Reference(checkpoint)
    for groups in (answers, again):
        # A value next to the middle of two steps may fall to either, in a few of the rollouts.
        apart = sorted(largest(engine - trainer) for group in groups for _, engine, trainer in group)
        assert apart[len(apart) // 2] < TOLERANCE
    pairs = [(prompt, ids, trainer) for prompt, group in zip(batch, answers, strict=True) for ids, _, trainer in group]
    apart = sorted(largest(trainer - rounded.log_probs(prompt, ids)[0]) for prompt, ids, trainer in pairs)
    change = sorted(largest(trainer - plain.log_probs(prompt, ids)[0]) for prompt, ids, trainer in pairs)
    assert apart[len(apart) // 2] < 1e-4 < 1e-2 < change[len(change) // 2]
    for sequence in tiny.make_sequences(prompts):
        (-rounded.log_probs(sequence.prompt, sequence.completion)[0].sum()).backward()
    expected = {name: p.grad for name, p in rounded.model.named_parameters() if p.grad is not None}
    off = sorted((float((found[name] - grad).norm() / grad.norm()) for name, grad in expected.items()))
    # Where two ways of adding move a value to the next step, what lies before it has another gradient, a little.
    assert off[len(off) // 2] < 1e-2 and off[-1] < 0.1


@pytest.mark.ranks(1)
def test_aware_scales_follow_the_weights(checkpoint, prompts):
    """After each update, and while the model is the reference: a scale of other weights would cut these off."""
    reference = lazy("megarl.training.reference")
    parts = policies.parts(checkpoint, TP1, quantized="fp8")
    layers = parts.quantization._layers.values()

    def fits():
        return all(layer.weight_quantizer.amax == layer._parameters["weight"].abs().max() for layer in layers)

    assert fits()
    kept = reference.ReferencePolicy(parts.policy.model, changed=parts.trainer.changed)
    before = [float(layer.weight_quantizer.amax) for layer in layers]
    policies.one_update(parts.trainer, tiny.make_sequences(prompts))
    assert fits() and before != [float(layer.weight_quantizer.amax) for layer in layers]
    with kept.swapped_in():
        assert fits() and before == [float(layer.weight_quantizer.amax) for layer in layers]
    assert fits()


def _sample(checkpoint, prompts, layout, engines):
    """Calibration, and of each rollout, before and after an update: ids, the engine's log-probabilities and the
    trainer's.  Last the weights after the update."""
    parts = policies.parts(checkpoint, layout, engines, quantized="fp8")
    parts.quantization.calibrate(lambda: parts.engine.generate(prompts, policies.sampling(1)))
    parts.engine.weights_changed()
    calibration, before = parts.quantization.calibration, policies.weights(parts.policy)
    answers = [_scored(parts.trainer, parts.engine.generate(prompts, policies.sampling()))]
    assert all(torch.equal(tensor, before[name]) for name, tensor in policies.weights(parts.policy).items())
    policies.one_update(parts.trainer, tiny.make_sequences(dict(enumerate(prompts))))
    parts.sync()
    answers.append(_scored(parts.trainer, parts.engine.generate(prompts, policies.sampling())))
    return calibration, answers, policies.weights(parts.policy)


@pytest.mark.parametrize(
    "layout, engines",
    [(TP1, Engines()), (TP2_SP, Engines(2, True)), (TP2, Engines()), (Layout(2, 1), Engines(2))],
    ids=["tp1", "tp2-sp", "tp2 to tp1", "dp2 to tp2"],
)
def test_rounded(ranks, checkpoint, prompts, tmp_path, layout, engines):
    """The engine samples from the rounded model in every layout, from that of the new weights after a sync; the
    trainer's weights are as before, and its probabilities are others."""
    batch = list(prompts.values())
    calibration, answers, weights = ranks.run(_sample, checkpoint, batch, layout, engines, **layout.job)[0]
    plain = tiny.Reference(checkpoint)
    updated = tmp_path / "updated"
    plain.model.load_state_dict(weights, strict=False)
    plain.model.save_pretrained(updated)
    for file in checkpoint.glob("*.json"):
        if not (updated / file.name).exists():
            (updated / file.name).write_bytes(file.read_bytes())
    for folder, groups in zip((checkpoint, updated), answers, strict=True):
        rounded = Rounded(folder, calibration)
        apart = [
            largest(engine - rounded.log_probs(prompt, ids)[0])
            for prompt, group in zip(batch, groups, strict=True)
            for ids, engine, _ in group
        ]
        mismatch = [largest(engine - trainer) for group in groups for _, engine, trainer in group]
        # A value next to the middle of two steps may fall to either.
        assert sorted(apart)[len(apart) // 2] < 1e-4 and max(apart) < 0.3 * max(mismatch)
        assert max(mismatch) > 0.02


@pytest.mark.parametrize("format", ["fp8", "int8"])
@pytest.mark.ranks(1)
def test_layers(checkpoint, prompts, format):
    """Each multiplies the rounded input with the rounded weight.  (INT8 is not compared as a whole: its steps are so
    even that the little by which two ways of adding differ moves inputs to other steps, and more from there.)"""
    parts = policies.parts(checkpoint, TP1, Engines(), quantized=format)
    batch = [prompts["image"], prompts["video"]]
    parts.quantization.calibrate(lambda: parts.engine.generate(batch[:1], policies.sampling(1)))
    parts.engine.weights_changed()
    trained, seen = dict(parts.policy.model.language_model.named_modules()), []

    def compare(name, layer, inputs, output):
        weight, amax = trained[name].weight.detach(), parts.quantization.calibration[name]
        largest_of = weight.abs().amax(1, keepdim=True) if format == "int8" else weight.abs().max()
        rounded = _round(inputs, amax, format), _round(weight, largest_of, format)
        seen.append(
            (largest(output - functional.linear(*rounded)), largest(output - functional.linear(inputs, weight)))
        )

    for name, layer in parts.engine.model.language_model.named_modules():
        if name in parts.quantization.calibration:
            layer.register_forward_hook(lambda layer, a, out, name=name: compare(name, layer, a[0], out[0]))
    parts.engine.generate(batch, policies.sampling(3))
    assert len(seen) >= 3 * 12
    assert max(error for error, _ in seen) < 1e-5 and min(change for _, change in seen) > 1e-3


@pytest.mark.ranks(2)
def test_calibration(checkpoint, prompts):
    """The largest input of all ranks, of what was computed; what is restored is what was found."""
    dist = lazy("torch.distributed")
    parts = policies.parts(checkpoint, Layout(2, 1), Engines(), quantized="fp8")
    found = []
    batch = list(prompts.values())
    for part in (batch[:2], batch[2:], batch[dist.get_rank() :: 2], batch):
        parts.quantization.calibrate(lambda part=part: parts.engine.generate(part, policies.sampling(1)))
        parts.engine.weights_changed()
        found.append(parts.quantization.calibration)
    first, second, shared, together = found
    for name, value in together.items():
        assert value == max(first[name], second[name]) == shared[name]
    assert first != second
    parts.quantization.restore(first)
    assert parts.quantization.calibration == first


@pytest.mark.ranks(1)
def test_weights_are_on_the_grid(checkpoint):
    """Of FP8 no more than 253 values; all else as it is trained."""
    parts = policies.parts(checkpoint, TP1, Engines(), quantized="fp8")
    trained = dict(parts.policy.model.named_parameters())
    rounded = set()
    for name, weight in parts.engine.model.named_parameters():
        if torch.equal(weight, trained[name]):
            continue
        rounded.add(name.partition("layers.")[2].partition(".")[2])
        assert weight.unique().numel() <= 253 < trained[name].unique().numel()
    assert rounded == {f"{part}.weight" for part in _PARTS}


@pytest.mark.ranks(1)
def test_not_installed(checkpoint, monkeypatch):
    for name in [name for name in sys.modules if name.partition(".")[0] == "modelopt"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "modelopt", None)
    with pytest.raises(errors.UserError) as refused:
        policies.parts(checkpoint, TP1, Engines(), quantized="fp8")
    assert "rollout.quantization" in str(refused.value) and "megarl[quant]" in str(refused.value)
