"""A tokenizer where other families have a processor."""

from pathlib import Path
from typing import Any


class TextProcessor:
    """What is asked of a processor, of a checkpoint that has a tokenizer only: no part of it prepares media."""

    image_processor = video_processor = None

    def __init__(self, tokenizer: Any):
        self.tokenizer = tokenizer

    def apply_chat_template(self, messages: list[dict], **options) -> str:
        """Templates of language models take a message's text as one string, not in parts."""
        joined = [{**m, "content": "".join(part["text"] for part in m["content"])} for m in messages]
        return self.tokenizer.apply_chat_template(joined, **options)

    def save_pretrained(self, folder: Path) -> None:
        self.tokenizer.save_pretrained(folder)
