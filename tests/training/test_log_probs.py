"""Log-probabilities and entropies from hidden states, against a dense log-softmax."""

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from tests.distributed import TP1, TP2, TP2_SP, lazy
from tests.hopper import compiled

log_probs = lazy("megarl.training.log_probs")
parallel_state = lazy("megatron.core.parallel_state")

PLACES, HIDDEN, VOCABULARY, TOKENS = 23, 8, 32, 40


def _inputs(dtype):
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(TOKENS, 1, HIDDEN, generator=generator, dtype=torch.double)
    weight = torch.randn(VOCABULARY, HIDDEN, generator=generator, dtype=torch.double) * 2
    targets = torch.randint(0, VOCABULARY, (PLACES,), generator=generator)
    predictors = torch.randperm(TOKENS, generator=generator)[:PLACES]
    return hidden.to(dtype), weight.to(dtype), targets, predictors


def dense(hidden, weight, targets, predictors, temperature):
    """`[2, n]` the plain way."""
    logits = (hidden[predictors, 0] @ weight.t()) / temperature
    distribution = logits.log_softmax(-1)
    return torch.stack([distribution.gather(1, targets[:, None])[:, 0], -(distribution.exp() * distribution).sum(-1)])


def _from_hidden_states(temperature, chunk, sequence_parallel):
    """Value, and gradients of a random combination: of the hidden states and of the weight's rows, whole again."""
    group = parallel_state.get_tensor_model_parallel_group()
    hidden, weight, targets, predictors = _inputs(torch.float32)
    size, rank = group.size(), group.rank()
    share = weight.chunk(size)[rank].clone().requires_grad_()
    part = (hidden.chunk(size)[rank] if sequence_parallel else hidden).clone().requires_grad_()
    out = log_probs.token_log_probs(
        hidden_states=part,
        output_layer=SimpleNamespace(weight=share, tp_group=group),
        output_weight=None,
        config=SimpleNamespace(sequence_parallel=sequence_parallel, deterministic_mode=False),
        context=log_probs.LogProbRequest(predictors, targets, temperature, chunk),
    )
    (out * _combination()).sum().backward()
    return out.detach(), part.grad, share.grad


def _combination():
    return torch.randn(2, PLACES, generator=torch.Generator().manual_seed(4))


@pytest.mark.parametrize("temperature", [1.0, 0.4, 2.5])
@pytest.mark.parametrize("layout", [TP1, TP2, TP2_SP], ids=str)
def test_vocabulary_parallel_equals_dense(ranks, layout, temperature):
    hidden, weight, targets, predictors = _inputs(torch.double)
    hidden.requires_grad_(), weight.requires_grad_()
    expected = dense(hidden, weight, targets, predictors, temperature)
    (expected * _combination()).sum().backward()
    answers = ranks.run(_from_hidden_states, temperature, 1000, layout.sequence_parallel, **layout.job)
    for value, hidden_grad, _ in answers:
        torch.testing.assert_close(value.double(), expected.detach(), atol=1e-5, rtol=1e-5)
        if not layout.sequence_parallel:
            torch.testing.assert_close(hidden_grad.double(), hidden.grad, atol=2e-5, rtol=1e-4)
    if layout.sequence_parallel:
        whole = torch.cat([hidden_grad for _, hidden_grad, _ in answers])
        torch.testing.assert_close(whole.double(), hidden.grad, atol=2e-5, rtol=1e-4)
    weight_grad = torch.cat([grad for _, _, grad in answers])
    torch.testing.assert_close(weight_grad.double(), weight.grad, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("chunk", [1, 5, PLACES - 1, PLACES, None])
def test_chunks_do_not_matter(ranks, chunk):
    ((value, hidden_grad, weight_grad),) = ranks.run(_from_hidden_states, 0.7, chunk, False)
    ((whole, whole_hidden, whole_weight),) = ranks.run(_from_hidden_states, 0.7, 1000, False)
    torch.testing.assert_close(value, whole, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(hidden_grad, whole_hidden, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(weight_grad, whole_weight, atol=1e-5, rtol=1e-5)


@pytest.mark.ranks(1)
def test_large_logits():
    """Logits in the thousands: nothing overflows, and the log-probability of the likeliest token is 0."""
    hidden, weight, targets, predictors = _inputs(torch.float32)
    targets = (hidden[predictors, 0] @ weight.t()).argmax(-1)
    out = log_probs.token_log_probs(
        hidden_states=hidden * 1e4,
        output_layer=SimpleNamespace(weight=weight, tp_group=parallel_state.get_tensor_model_parallel_group()),
        output_weight=None,
        config=SimpleNamespace(sequence_parallel=False, deterministic_mode=False),
        context=log_probs.LogProbRequest(predictors, targets, 1.0, 7),
    )
    torch.testing.assert_close(out, torch.zeros(2, PLACES))


@pytest.mark.parametrize("chunk", [None, 2])
@pytest.mark.ranks(1)
def test_gradient_in_double(chunk):
    """`gradcheck` of the formula itself; logits that were kept are overwritten in the first of its backward passes."""
    monkeypatch = pytest.MonkeyPatch()
    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "float", lambda self: self)  # stay in double
        hidden, weight, targets, predictors = _inputs(torch.double)
        hidden = hidden[predictors, 0][:5].clone().requires_grad_()
        group = parallel_state.get_tensor_model_parallel_group()

        def function(h, w):
            return log_probs._LogProbs.apply(h, w, targets[:5], 0.8, chunk, group)

        assert torch.autograd.gradcheck(function, (hidden, weight.clone().requires_grad_()))


@pytest.mark.ranks(1)
def test_gradient_of_the_weight_is_added_where_megatron_keeps_it():
    """As for a weight under Megatron's DDP: onto what is there, and nothing is left for autograd."""
    hidden, weight, targets, predictors = _inputs(torch.float32)
    group = parallel_state.get_tensor_model_parallel_group()
    plain, kept = (weight.clone().requires_grad_() for _ in range(2))
    kept.main_grad = torch.ones_like(weight)
    for one in (plain, kept):
        log_probs._LogProbs.apply(hidden[predictors, 0], one, targets, 1.0, 7, group)[0].sum().backward()
    assert kept.grad is None
    torch.testing.assert_close(kept.main_grad, 1 + plain.grad)


def test_triton_passes_equal_torch():
    """The kernels' own code, interpreted: float32 and bfloat16, a vocabulary of several blocks, targets elsewhere."""
    done = subprocess.run(
        [sys.executable, "-c", _INTERPRETED],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["torch.float32", "torch.bfloat16"]


@pytest.mark.ranks(1)
def test_triton_passes_compile():
    """For bfloat16 logits of Qwen3's vocabulary, without a register that is kept in memory."""
    from megarl.training import softmax_triton

    numbers = dict.fromkeys(("out", "maximum", "log_total", "mean", "gradient"), "*fp32")
    types = numbers | {"logits": "*bf16", "targets": "*i64", "n": "i32", "v": "i32", "stride": "i32", "scale": "fp32"}
    block = {"BLOCK": softmax_triton._BLOCK}
    for kernel, constants in ((softmax_triton._statistics, {"v": 151936}), (softmax_triton._gradient, {})):
        assert ".local" not in compiled(kernel, types, constants | block, num_warps=8)


_INTERPRETED = """
import torch
from megarl.training import softmax_triton
from megarl.training.softmax_passes import Torch

softmax_triton._BLOCK = 16
for dtype, tolerance in ((torch.float32, 2e-6), (torch.bfloat16, 1e-2)):
    generator = torch.Generator().manual_seed(3)
    logits = (torch.randn(5, 70, generator=generator) * 4).to(dtype)
    targets, temperature = torch.tensor([0, 69, -3, 70, 17]), 0.7
    ours, expected = (kind.statistics(logits, targets, temperature) for kind in (softmax_triton, Torch))
    torch.testing.assert_close(ours, expected, atol=1e-5, rtol=1e-5)
    maximum, total, weighted, _ = expected
    rest = maximum, total.log(), weighted / total, torch.randn(5, 2, generator=generator), temperature
    ours, expected = logits.clone(), logits.clone()
    softmax_triton.gradient_(ours, targets, *rest)
    Torch.gradient_(expected, targets, *rest)
    assert not torch.equal(expected, logits)
    torch.testing.assert_close(ours, expected, atol=tolerance, rtol=tolerance)
    print(dtype)
"""
