"""Rollouts in eight bits: the language model's layers, quantised by nvidia-modelopt.

In the engine's own copy of the model the weights that have arrived with a sync are rounded in place to the format's
grid, by their largest values then.  Where training is aware of the rounding, the one module of engine and trainer
rounds them as it computes, and gradients go straight through to the weights themselves.  The inputs of the layers are
rounded by the largest values that a calibration has seen.  Embeddings, output layer and vision tower stay as they are.
Where a GPU multiplies the format (`megarl.rollout.fp8`), it does in a copy; else numbers are rounded to the grid and
multiplied in the model's type.
"""

import warnings
from collections.abc import Callable
from contextlib import redirect_stdout

import megarl.platform.prepare  # noqa: F401

import torch
import torch.distributed as dist
from torch import Tensor

from megarl.errors import UserError
from megarl.platform.kernels import kernels
from megarl.rollout.fp8 import Fp8Layer


class Quantization:
    """The constructor makes the layers of the model's language model quantised ones.

    Args:
        model: the engine's own; its process groups are those that it was built with.
        format: `fp8` (E4M3, one scale for a matrix) or `int8` (one scale for an output); inputs have one scale.
        aware: the model is trained, too: its weights are kept, and rounded whenever it computes.

    Raises:
        UserError: nvidia-modelopt is not installed.
    """

    def __init__(self, model, format: str, aware: bool = False):
        self._group, self.aware = model.pg_collection.tp, aware
        with warnings.catch_warnings(), redirect_stdout(None):
            warnings.simplefilter("ignore")  # of its plugins for what is not installed
            _quantize(model.language_model, format)
        self._layers = {
            name: layer
            for name, layer in model.language_model.named_modules()
            if hasattr(layer, "weight_quantizer") and layer.weight_quantizer.is_enabled
        }
        self._fp8: dict[str, Fp8Layer] = {}
        for name, layer in self._layers.items():
            _set_amax(layer.input_quantizer, torch.ones((), device=layer.weight.device))
            if aware:
                continue
            layer.weight_quantizer.disable()  # `quantize_weights` has done it
            if format == "fp8" and kernels().gpu and Fp8Layer.fits(layer):
                self._fp8[name] = Fp8Layer(layer)
        if aware:
            self.quantize_weights()

    @torch.no_grad()
    def quantize_weights(self) -> None:
        """The weights have changed: rounds them, or takes note of their scales.  Collective over the ranks that share
        matrices."""
        for name, layer in self._layers.items():
            weight, quantizer = layer._parameters["weight"], layer.weight_quantizer
            amax = self._largest(layer, weight)
            if name in self._fp8:
                self._fp8[name].take(amax)
                continue
            _set_amax(quantizer, amax)
            if self.aware:
                continue
            quantizer.enable()
            weight.copy_(quantizer(weight))
            quantizer.disable()

    def _largest(self, layer, weight: Tensor) -> Tensor:
        """float32 `[]`, or `[outputs, 1]`: of the whole matrix, of which this rank may have a part."""
        by_output = layer.weight_quantizer.axis is not None
        amax = weight.abs().float()
        amax = amax.amax(1, keepdim=True) if by_output else amax.amax()
        if not by_output or weight.partition_dim == 1:
            dist.all_reduce(amax, dist.ReduceOp.MAX, group=self._group)
        return amax.clamp_min(1e-12)

    def calibrate(self, compute: Callable[[], None]) -> None:
        """Notes the largest input of each layer, over all ranks.  Collective.

        Args:
            compute: runs the model on what is typical for it; decodes nothing, since a captured step notes nothing.
        """
        quantizers = [layer.input_quantizer for layer in self._layers.values()]
        for quantizer in quantizers:
            quantizer.disable_quant()
            quantizer.enable_calib()
        try:
            compute()
        finally:
            for quantizer in quantizers:
                quantizer.enable_quant()
                quantizer.disable_calib()
        seen = [quantizer._calibrator.compute_amax() for quantizer in quantizers]
        for quantizer in quantizers:
            quantizer._calibrator.reset()
        device = quantizers[0].amax.device
        found = torch.stack([torch.zeros((), device=device) if a is None else a.float().reshape(()) for a in seen])
        dist.all_reduce(found, dist.ReduceOp.MAX)
        self._set(found.clamp_min(1e-12).tolist())

    @property
    def calibration(self) -> dict[str, float]:
        """The largest input of each layer."""
        return {name: float(layer.input_quantizer.amax) for name, layer in self._layers.items()}

    def restore(self, calibration: dict[str, float]) -> None:
        """Takes what `calibration` was."""
        self._set([calibration[name] for name in self._layers])

    def _set(self, largest: list[float]) -> None:
        for layer, value in zip(self._layers.values(), largest, strict=True):
            _set_amax(layer.input_quantizer, torch.tensor(value, device=layer.input_quantizer.amax.device))


def _set_amax(quantizer, value: Tensor) -> None:
    """modelopt's own way makes a buffer that belongs to the model's state, which a sync would look for in the
    trainer's."""
    if quantizer.amax is None:
        quantizer.register_buffer("_amax", value.clone(), persistent=False)
    else:
        quantizer.amax = value


def _quantize(language_model, format: str) -> None:
    try:
        from modelopt.torch import quantization
        from modelopt.torch.quantization.plugins.custom import CUSTOM_MODEL_PLUGINS
        from modelopt.torch.quantization.plugins.megatron import _QuantMegatronMLP
        from modelopt.torch.quantization.plugins.megatron import megatron_replace_quant_module_hook as for_training
    except ImportError as error:
        raise UserError(
            f"rollout.quantization needs nvidia-modelopt, which cannot be imported ({error}): "
            "pip install 'megarl[quant]', or set rollout.quantization = null"
        ) from None
    preset = {"fp8": quantization.FP8_DEFAULT_CFG, "int8": quantization.INT8_DEFAULT_CFG}[format]
    # Adapters are added to what is quantised; what inputs need is `Quantization.calibrate`'s.
    config = {"quant_cfg": [*preset["quant_cfg"], {"quantizer_name": "*adapter*", "enable": False}], "algorithm": None}
    # It would keep the engine's attention from its KV cache, and make checkpoints of another format.
    CUSTOM_MODEL_PLUGINS.discard(for_training)
    try:
        quantization.quantize(language_model, config)
    finally:
        CUSTOM_MODEL_PLUGINS.add(for_training)
    for module in language_model.modules():
        if isinstance(module, _QuantMegatronMLP):
            module.export()  # it rounds nothing, and names weights otherwise in checkpoints
