"""Prompts to tokens on demand, for the whole run."""

from typing import Any

from megarl.data.prompt import Prompt
from megarl.media.cache import ItemCache
from megarl.media.expand import PositionRule, encode_prompt, media_token
from megarl.media.item import EncodedPrompt


class Encoder:
    """Encodes the prompts of one run, and remembers the media that it decoded.  For one thread."""

    def __init__(self, processor: Any, positions: PositionRule, max_prompt_tokens: int, cache_bytes: int = 256 * 2**20):
        """`cache_bytes` bounds the prepared pixels that are kept.

        Raises:
            UserError: the tokenizer lacks the media token.
        """
        media_token(processor)
        self._processor = processor
        self._positions = positions
        self._max_prompt_tokens = max_prompt_tokens
        self._items = ItemCache(processor, cache_bytes)

    def encode(self, prompt: Prompt) -> EncodedPrompt:
        """See `megarl.media.expand.encode_prompt`, whose errors it raises."""
        return encode_prompt(prompt, self._processor, self._positions, self._max_prompt_tokens, self._items.load)
