"""Mistakes of the user, told apart from bugs of ours and from trouble of the machine."""

import errno

_TROUBLE = {errno.EMFILE, errno.ENFILE, errno.ENOSPC, errno.EDQUOT, errno.ESTALE, errno.EIO, errno.ENOMEM}


def one_line(message: object) -> str:
    """A library's message, which may have several, as part of one of ours."""
    return " ".join(str(message).split())


def of_this_machine(error: object) -> bool:
    """Whether memory, files or disk ran out: that says nothing about the data that was read."""
    return isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno in _TROUBLE)


class UserError(Exception):
    """Bad input.  The message is one line that names the culprit and what would be accepted.

    Commands print it on rank 0 and exit with code 2 (`megarl.platform.launch`); no traceback.
    """


class CheckFailed(Exception):
    """A check that the recipe asked for found the run's own state wrong.  The message is one line that names what.

    Commands print it on rank 0 and exit with code 1; no traceback.
    """


class MediaError(ValueError):
    """A media item that cannot become features.  One line: its name (`MediaSource.name`) and the reason."""

    def __init__(self, name: str, reason: str):
        self.name = name
        self.reason = one_line(reason)
        super().__init__(name, self.reason)

    def __str__(self) -> str:
        return f"{self.name}: {self.reason}"


class PromptError(ValueError):
    """A prompt that cannot become tokens.  One line, which begins with its row (`Prompt.row`)."""

    def __init__(self, row: int, reason: str):
        self.row = row
        self.reason = reason
        super().__init__(row, reason)

    def __str__(self) -> str:
        return f"row {self.row}: {self.reason}"


class PromptTooLong(PromptError):
    """More tokens after expansion than `max_prompt_tokens`."""


class ExpansionError(PromptError):
    """Media tokens and media features differ in number."""
