"""Every change that megarl makes to Megatron, to Megatron Bridge, and (without a GPU) to torch.

Each is a `Patch` with its reason, the place it mends and the release it was made for.  `apply_patches`
runs once, before anything else imports Megatron (`megarl.platform.prepare`).  The tests compare the
installed release and the text at that place, so a patch that is no longer needed makes a test fail.
"""

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from megarl.platform.kernels import Kernels

CORE = "megatron-core==0.19.2"
BRIDGE = "megatron-bridge==0.6.2"


@dataclass(frozen=True)
class Patch:
    name: str
    reason: str
    package: str
    """`distribution==version` that it was written for."""
    place: str
    """`file` under site-packages that holds what it mends."""
    text: str
    """What stands there while the patch is needed."""
    when: Callable[[Kernels], bool]
    apply: Callable[[], None]

    def still_needed(self) -> bool:
        """Whether the installed file still contains `text`."""
        root = Path(importlib.util.find_spec("megatron.core").origin).parents[2]
        return self.text in (root / self.place).read_text()


def all_patches() -> list[Patch]:
    """In the order in which they are applied."""
    from megarl.platform.patches import bridge, core, cuda_on_cpu, experts, safe_loading

    return [*cuda_on_cpu.PATCHES, *core.PATCHES, *experts.PATCHES, *bridge.PATCHES, *safe_loading.PATCHES]


def apply_patches(kernels: Kernels) -> list[Patch]:
    """Applies what these kernels need, and returns it."""
    needed = [p for p in all_patches() if p.when(kernels)]
    for patch in needed:
        patch.apply()
    return needed
