"""Patches to Megatron Bridge."""

import functools
import sys
import types

import torch
import torch.nn.functional as F

from megarl.platform.kernels import Kernels
from megarl.platform.patches import BRIDGE, Patch

_QWEN3_VL = "megatron/bridge/models/qwen_vl/modelling_qwen3_vl"


def _always(kernels: Kernels) -> bool:
    return True


def _without_te(kernels: Kernels) -> bool:
    return not kernels.te


class _NoTransformerEngine(types.ModuleType):
    """Any attribute is a module class that cannot be constructed."""

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)

        def refuse(self, *args, **kwargs):
            raise RuntimeError(f"transformer_engine.{name} is used, but transformer-engine is not installed")

        return type(name, (torch.nn.Module,), {"__init__": refuse})


def _import_without_te() -> None:
    import megatron.core.extensions.transformer_engine as extension  # decides HAVE_TE before the stand-in exists

    assert not extension.HAVE_TE
    names = ("transformer_engine", "transformer_engine.pytorch", "transformer_engine.pytorch.ops")
    package, pytorch, ops = modules = [_NoTransformerEngine(name) for name in names]
    package.__path__, package.__version__, package.pytorch, pytorch.ops = [], "0.0.0", pytorch, ops
    sys.modules.update(zip(names, modules, strict=True))
    try:
        _late_modelopt()
    finally:
        sys.modules.update(dict.fromkeys(names))  # not to be found, see `cuda_on_cpu`


def _late_modelopt() -> None:
    sys.modules["modelopt"] = None  # not to be found
    try:
        import megatron.bridge  # noqa: F401
    finally:
        del sys.modules["modelopt"]


def _peft_without_te() -> None:
    from megatron.bridge.peft import utils

    utils.HAVE_TE = False


def _exact_gelu() -> None:
    from megatron.bridge.models.qwen_vl.modelling_qwen3_vl.utils import Qwen3VLVisionPatchMerger

    stock = Qwen3VLVisionPatchMerger.__init__

    @functools.wraps(stock)
    def init(self, *args, **kwargs):
        stock(self, *args, **kwargs)
        self.activation_func = F.gelu

    Qwen3VLVisionPatchMerger.__init__ = init


def _vision_recompute() -> None:
    from megatron.bridge.models.qwen_vl.modelling_qwen3_vl import model

    stock = model.get_vision_model_config

    @functools.wraps(stock)
    def config(*args, **kwargs):
        vision = stock(*args, **kwargs)
        vision.recompute_granularity = vision.recompute_method = vision.recompute_num_layers = None
        return vision

    model.get_vision_model_config = config


def _torch_vision_layers() -> None:
    from megatron.bridge.models.qwen_vl.modelling_qwen3_vl import model
    from megatron.core.models.vision.vit_layer_specs import get_vit_layer_with_local_spec
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer import transformer_block

    from megarl.platform.layers import CoreAttention, Norm

    def spec():
        layer = get_vit_layer_with_local_spec()
        layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = Norm
        layer.submodules.self_attention.submodules.core_attention = CoreAttention
        return layer

    transformer_block.LayerNormImpl = Norm
    model.get_vit_layer_with_transformer_engine_spec = spec
    model.TENorm = Norm
    model.TEColumnParallelLinear, model.TERowParallelLinear = ColumnParallelLinear, RowParallelLinear


def _torch_norm_names() -> None:
    from megatron.bridge.models.conversion.param_mapping import AutoMapping
    from megatron.bridge.models.qwen.qwen3_bridge import Qwen3Bridge
    from megatron.bridge.models.qwen_vl.qwen3_vl_bridge import Qwen3VLBridge, Qwen3VLMoEBridge
    from megatron.bridge.models.qwen_vl.qwen25_vl_bridge import Qwen25VLBridge

    fused = {
        "self_attention.linear_qkv.layer_norm_": "input_layernorm.",
        "mlp.linear_fc1.layer_norm_": "pre_mlp_layernorm.",
    }

    def mend(cls):
        stock = cls.mapping_registry

        @functools.wraps(stock)
        def mapping_registry(self):
            registry = stock(self)
            known, more = {m.megatron_param for m in registry.mappings}, []
            for mapping in registry.mappings:
                for inside, own in fused.items():
                    name = mapping.megatron_param.replace(inside, own)
                    if name not in known:
                        more.append(AutoMapping(megatron_param=name, hf_param=mapping.hf_param))
            return type(registry)(*registry.mappings, *more)

        cls.mapping_registry = mapping_registry

    for cls in (Qwen25VLBridge, Qwen3Bridge, Qwen3VLBridge, Qwen3VLMoEBridge):
        mend(cls)


PATCHES = [
    Patch(
        "bridge-import",
        "Bridge's PEFT imports transformer_engine unconditionally; a stand-in exists during that import only",
        BRIDGE,
        "megatron/bridge/peft/lora_layers.py",
        "import transformer_engine.pytorch as te",
        _without_te,
        _import_without_te,
    ),
    Patch(
        "late-modelopt",
        "Bridge imports all of modelopt where it is installed, which takes 3 s: it is not found during that import",
        BRIDGE,
        "megatron/bridge/training/checkpointing.py",
        "from modelopt.torch.opt.plugins import (",
        _always,
        _late_modelopt,
    ),
    Patch(
        "peft-without-te",
        "Bridge's PEFT takes Megatron's names of transformer-engine's layers, which are None without it, for classes",
        BRIDGE,
        "megatron/bridge/peft/utils.py",
        "elif HAVE_TE and any(isinstance(m, te_column_parallel) for te_column_parallel in TECL):",
        _without_te,
        _peft_without_te,
    ),
    Patch(
        "exact-gelu",
        "the vision patch merger uses tanh-GELU, transformers the exact one: features 5e-4 off",
        BRIDGE,
        f"{_QWEN3_VL}/utils.py",
        "self.activation_func = self.config.activation_func",
        _always,
        _exact_gelu,
    ),
    Patch(
        "vision-recompute",
        "full recompute of the vision tower loses the gradient of the deepstack features, a list that its "
        "checkpoint function returns",
        BRIDGE,
        f"{_QWEN3_VL}/transformer_block.py",
        "return hidden_states, deepstack_feature_lists, context",
        _always,
        _vision_recompute,
    ),
    Patch(
        "torch-vision-layers",
        "the vision tower takes its transformer-engine layers from module globals",
        BRIDGE,
        f"{_QWEN3_VL}/model.py",
        "vision_transformer_layer_spec = get_vit_layer_with_transformer_engine_spec()",
        _without_te,
        _torch_vision_layers,
    ),
    Patch(
        "torch-norm-names",
        "weight names exist for norms fused into transformer-engine's linears, not for norms of their own",
        BRIDGE,
        "megatron/bridge/models/qwen_vl/qwen3_vl_bridge.py",
        "linear_qkv.layer_norm_weight",
        _without_te,
        _torch_norm_names,
    ),
]
