"""Importing this module makes Megatron importable and right on this machine.

The `__init__` of every package that uses Megatron imports it first, so the patches of
`megarl.platform.patches` are in place before any name of Megatron is bound.
"""

import logging
import warnings

from megarl.platform.kernels import kernels, refuse_foreign_apex
from megarl.platform.patches import apply_patches

refuse_foreign_apex()

# While they are imported, Megatron and Bridge announce every optional package that they do not find.
logging.disable(logging.WARNING)
try:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        applied = apply_patches(kernels())
        import megatron.bridge  # noqa: F401
finally:
    logging.disable(logging.NOTSET)

# Bridge's import lets the root logger print at INFO, where Megatron's engine logs every suspend and resume.
for _name in (None, "megatron", "megatron.bridge"):
    logging.getLogger(_name).setLevel(logging.WARNING)
# Advice to Megatron's callers, each time anew and nothing that a user of megarl could follow.
for _name in (
    "megatron.bridge.utils.fusions",
    "megatron.core.models.gpt.gpt_model",
    "megatron.core.distributed.distributed_data_parallel",
    "megatron.core.dist_checkpointing.strategies.torch",
):
    logging.getLogger(_name).setLevel(logging.ERROR)
logging.getLogger("transformers.configuration_utils").addFilter(lambda record: "torch_dtype" not in record.getMessage())
warnings.filterwarnings("ignore", category=UserWarning, module=r"megatron\.")
warnings.filterwarnings("ignore", module=r"torch\.distributed\.checkpoint")
