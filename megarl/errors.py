"""Mistakes of the user, told apart from bugs of ours."""


class UserError(Exception):
    """Bad input.  The message is one line that names the culprit and what would be accepted.

    Commands print it on rank 0 and exit with code 2 (`megarl.platform.launch`); no traceback.
    """
