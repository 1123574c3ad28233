"""Models that a recipe names as the Hugging Face hub does, `owner/name` or `owner/name@revision`.

They are fetched into the library's cache, where they are folders like any other.  Its settings apply: `HF_HOME`,
`HF_HUB_CACHE`, `HF_ENDPOINT`, `HF_TOKEN`, `HF_HUB_OFFLINE`.
"""

import re
from collections.abc import Sequence
from pathlib import Path

from megarl.errors import UserError, one_line

_NAME = re.compile(r"(?P<repository>[\w-][\w.-]*/[\w-][\w.-]*)(@(?P<revision>[^@\s]+))?", re.ASCII)
_PROCESSOR = ("*.json", "*.txt", "*.jinja", "*.model")
_WEIGHTS = "*.safetensors"


def on_hub(path: str) -> bool:
    """Whether a recipe's path is a name on the hub.  A folder that is there goes first."""
    return not Path(path).exists() and _NAME.fullmatch(path) is not None


def at(path: str, commit: str) -> str:
    """The same name at a commit, whatever its branch becomes."""
    return f"{_NAME.fullmatch(path)['repository']}@{commit}"


def folder_with(file: str, path: str, key: str) -> Path:
    """A folder as it is; for a name on the hub one that has this small file, which alone is fetched.

    Args:
        key: of the recipe, for what is said.

    Raises:
        UserError: the hub does not give it, and the cache does not have it.
    """
    if not on_hub(path):
        return Path(path)
    folder = _snapshot(path, key, [file], quiet=True)
    if not (folder / file).is_file():
        raise UserError(f"{key} = {path!r}: the model of that name on the Hugging Face hub has no {file}")
    return folder


def fetch(path: str, key: str, weights: bool, cached: bool = False) -> Path:
    """The folder in the cache, whose name is the commit, of all that a run reads of a name on the hub.

    Args:
        weights: with them.
        cached: it was fetched before, so that nothing is asked of the hub.

    Raises:
        UserError: as `folder_with`.
    """
    return _snapshot(path, key, [*_PROCESSOR, *[_WEIGHTS] * weights], cached=cached)


def _snapshot(path: str, key: str, files: Sequence[str], quiet: bool = False, cached: bool = False) -> Path:
    # Imported here: it takes a second, and most recipes name folders.
    import httpx
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    name = _NAME.fullmatch(path)
    hide = quiet and not are_progress_bars_disabled()
    if hide:
        disable_progress_bars()
    try:
        # Not hf_hub_download, even for one file: it tries for 23 s to reach a hub that cannot be reached.
        folder = snapshot_download(
            name["repository"], revision=name["revision"], allow_patterns=list(files), local_files_only=cached
        )
    except (OSError, HFValidationError, httpx.HTTPError) as error:
        why = _reason(error, name["repository"], name["revision"])
        raise UserError(f"{key} = {path!r}: no such folder, and as a name on the Hugging Face hub: {why}") from None
    finally:
        if hide:
            enable_progress_bars()
    return Path(folder)


def _reason(error: Exception, repository: str, revision: str | None) -> str:
    """What went wrong, and what the user can do."""
    import httpx
    from huggingface_hub import constants
    from huggingface_hub.errors import (
        GatedRepoError,
        LocalEntryNotFoundError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    log_in = "log in (hf auth login) or set HF_TOKEN"
    elsewhere = f"fetch it where there is a network (hf download {repository}), or give a folder"
    cause = error.__cause__ if isinstance(error, LocalEntryNotFoundError) and error.__cause__ else error
    if isinstance(cause, GatedRepoError):
        return f"it is gated: accept its terms at {constants.ENDPOINT}/{repository}, then {log_in}"
    if isinstance(cause, RepositoryNotFoundError):
        return f"there is none, or it is private: check the name; for a private one {log_in}"
    if isinstance(cause, RevisionNotFoundError):
        return f"it has no revision {revision!r}"
    if isinstance(cause, OfflineModeIsEnabled):
        return f"HF_HUB_OFFLINE is set, and {constants.HF_HUB_CACHE} does not have all of it: {elsewhere}"
    if isinstance(error, LocalEntryNotFoundError) or isinstance(cause, httpx.HTTPError):
        answer = f"{constants.ENDPOINT} does not answer ({one_line(cause)[:120]})"
        return f"{answer}, and {constants.HF_HUB_CACHE} does not have all of it: {elsewhere}"
    return one_line(error)[:300]
