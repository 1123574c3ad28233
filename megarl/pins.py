"""Which Megatron a recipe was made for, compared with the one that is installed.

A pin is a release or a commit.  Of a package from an index only the release is known; of one from a repository, or
from a submodule that is checked out, only the commit counts, since commits come and the version stays.
"""

import json
import os
import re
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import url2pathname

from megarl.errors import UserError

COMMIT = re.compile(r"[0-9a-f]{40}")
RELEASE = re.compile(r"\d+(\.\d+)+((a|b|rc)\d+)?(\.post\d+)?(\.dev\d+)?")


@dataclass(frozen=True)
class Package:
    distribution: str
    """Its name on an index."""
    submodule: str
    """Where its repository is checked out, from the root of megarl's."""


PACKAGES = {
    "megatron_lm": Package("megatron-core", "3rdparty/Megatron-LM"),
    "megatron_bridge": Package("megatron-bridge", "3rdparty/Megatron-Bridge"),
}
"""By the key of `pins` that pins them."""


@dataclass(frozen=True)
class Installed:
    pin: str | None
    """The one pin that is met; None where none is, as with changes to a commit."""
    origin: str
    """As a refusal says it, after "is installed"."""
    checked_out: bool = False
    """Whether it came from a folder."""


def well_formed(pin: str) -> bool:
    """Whether it is a commit or a release."""
    return bool(COMMIT.fullmatch(pin) or RELEASE.fullmatch(pin))


def check_pins(pins: Mapping[str, str | None]) -> None:
    """Compares what is pinned with what is installed.

    Args:
        pins: commit or release by key of `PACKAGES`; None: whatever is installed.

    Raises:
        UserError: another one is installed, or none; names the commands that install the right one.
    """
    for key, pin in pins.items():
        if pin is not None:
            package = PACKAGES[key]
            found = installed(package.distribution)
            if found is None or found.pin != pin:
                is_now = f"is installed {found.origin}" if found else "is not installed"
                mend = _mend(package, pin, found is not None and found.checked_out)
                raise UserError(f"pins.{key} = {pin!r}: {package.distribution} {is_now}; run {mend}")


def _mend(package: Package, pin: str, checked_out: bool) -> str:
    folder = package.submodule
    if COMMIT.fullmatch(pin):
        return (
            f"git submodule update --init {folder} && git -C {folder} fetch origin {pin} && "
            f"git -C {folder} checkout {pin} && make setup"
        )
    install = f"python -m pip install --no-deps {package.distribution}=={pin}"
    # Else the next `make setup` would install it again.
    return f"git submodule deinit {folder} && {install}" if checked_out else install


def installed(name: str) -> Installed | None:
    """What a distribution was installed from, by the record that installers leave beside it (PEP 610); None: it is not
    installed."""
    try:
        found = distribution(name)
    except PackageNotFoundError:
        return None
    record = json.loads(found.read_text("direct_url.json") or "{}")
    if "vcs_info" in record:
        commit = record["vcs_info"]["commit_id"]
        return Installed(commit, f"from commit {commit}")
    if "dir_info" not in record:
        return Installed(found.version, f"as release {found.version}, of which no commit is known")
    folder = Path(url2pathname(urlsplit(record["url"]).path))
    commit = checked_out(folder)
    # A folder that was copied may have moved on since: Megatron's packages end their version with the commit.
    copied = None if record["dir_info"].get("editable") else re.search(r"\+([0-9a-f]{7,40})$", found.version)
    if copied and not commit.startswith(copied[1]):
        return Installed(None, f"as a copy of {folder} at commit {copied[1]}, which is at {commit} now", True)
    return Installed(commit if COMMIT.fullmatch(commit) else None, f"from {folder} at commit {commit}", True)


def checked_out(folder: Path) -> str:
    """40 hex digits, with `-dirty` where tracked files were changed since; or `unknown`."""
    # The folder's own repository, not one that it lies in; another user's too, as in a container: its code runs anyway.
    environment = {**os.environ, "GIT_CEILING_DIRECTORIES": str(folder.parent)}
    command = ["git", "-c", "safe.directory=*", "-C", str(folder)]
    command += ["describe", "--always", "--abbrev=40", "--exclude=*", "--dirty"]
    try:
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
