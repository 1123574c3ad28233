"""Matrix products in FP8 on a GPU, in the place of those of a layer that modelopt has quantised."""

import megarl.platform.prepare  # noqa: F401

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel import (
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from torch import Tensor

LARGEST = torch.finfo(torch.float8_e4m3fn).max


class Fp8Layer:
    """Takes the place of the layer's `forward`: a norm where transformer-engine has fused one into it, then the product
    with one scale for the input and one for the weight, accumulated in float32.  For inference.

    The layer keeps its weight, which a sync writes into; `take` makes the FP8 copy that is multiplied.  Addresses stay,
    so captured CUDA graphs do too.
    """

    @staticmethod
    def fits(layer) -> bool:
        """Whether this GPU multiplies FP8 (from Ada on), and matrices of these sizes."""
        sizes = layer._parameters["weight"].shape
        return torch.cuda.get_device_capability() >= (8, 9) and all(size % 16 == 0 for size in sizes)

    def __init__(self, layer):
        self._layer = layer
        weight = layer._parameters["weight"]
        self._weight = torch.empty(weight.shape, dtype=torch.float8_e4m3fn, device=weight.device)
        self._scale = torch.ones((), device=weight.device)
        config = layer.config
        self._row = weight.partition_dim == 1
        self._group = layer._tp_group if getattr(layer, "_tp_group", None) is not None else layer.tp_group
        self._sequence_parallel = config.sequence_parallel and self._group.size() > 1
        self._norm = getattr(layer, "layer_norm_weight", None)
        self._bias = getattr(layer, "bias", None)
        has_bias = self._bias is not None and self._bias.numel() > 0
        returns_bias = getattr(layer, "te_return_bias", getattr(layer, "skip_bias_add", False))
        self._adds_bias, self._returned = (
            has_bias and not returns_bias,
            self._bias if has_bias and returns_bias else None,
        )
        assert self._norm is None or (config.normalization, config.layernorm_zero_centered_gamma) == ("RMSNorm", False)
        layer.forward = self

    def take(self, amax: Tensor) -> None:
        """The layer's weight has changed, and this is its largest value."""
        self._scale.copy_(amax / LARGEST)
        self._weight.copy_((self._layer._parameters["weight"].float() / self._scale).clamp(-LARGEST, LARGEST))

    def __call__(self, x: Tensor, *_, **__) -> tuple[Tensor, Tensor | None]:
        if self._norm is not None:
            config = self._layer.config
            x = F.rms_norm(x, x.shape[-1:], self._norm, config.layernorm_epsilon)
        quantizer = self._layer.input_quantizer
        if self._sequence_parallel and not self._row:
            x = gather_from_sequence_parallel_region(x, group=self._group)
        out = self._multiply(x, quantizer)
        if self._row and self._group.size() > 1:
            reduced = (
                reduce_scatter_to_sequence_parallel_region
                if self._sequence_parallel
                else reduce_from_tensor_model_parallel_region
            )
            out = reduced(out, group=self._group)
        if self._adds_bias:
            out = out + self._bias
        return out, self._returned

    def _multiply(self, x: Tensor, quantizer) -> Tensor:
        if not quantizer._if_quant:  # being calibrated
            return F.linear(quantizer(x), self._layer._parameters["weight"])
        scale = quantizer.amax.float() / LARGEST
        flat = (x.reshape(-1, x.shape[-1]).float() / scale).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn)
        out = torch._scaled_mm(flat, self._weight.t(), scale_a=scale, scale_b=self._scale, out_dtype=x.dtype)
        return out.view(*x.shape[:-1], out.shape[-1])
