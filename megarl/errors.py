"""Mistakes of the user, told apart from bugs of ours."""


class UserError(Exception):
    """Bad input.  The message is one line that names the culprit and what would be accepted.

    Commands print it on rank 0 and exit with code 2 (`megarl.platform.launch`); no traceback.
    """


class MediaError(ValueError):
    """A media item that cannot become features.  One line: its name (`MediaSource.name`) and the reason."""

    def __init__(self, name: str, reason: str):
        self.name = name
        self.reason = " ".join(reason.split())
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
