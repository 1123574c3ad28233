"""Importing this module makes Megatron importable and right on this machine.

The `__init__` of every package that uses Megatron imports it first, so the patches of
`megarl.platform.patches` are in place before any name of Megatron is bound.
"""

import logging
import warnings

from megarl.platform.kernels import kernels, refuse_foreign_apex
from megarl.platform.patches import apply_patches

# Optional packages that Megatron looks for and megarl does not need announce their absence a dozen times.
for _text in ("Apex", "APEX", "transformer_engine", "pynvml", "Triton", "flash"):
    warnings.filterwarnings("ignore", message=f".*{_text}.*", module=r"megatron\..*")
logging.getLogger("megatron").setLevel(logging.WARNING)

refuse_foreign_apex()
applied = apply_patches(kernels())
