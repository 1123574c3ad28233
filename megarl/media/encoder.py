"""Prompts to tokens on demand, for the whole run."""

import hashlib
import struct
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Self

from torch import Tensor

from megarl.data.prompt import MediaSource, Prompt
from megarl.errors import MediaError, PromptError
from megarl.media.cache import ItemCache
from megarl.media.expand import PositionRule, encode_prompt, extend_prompt, media_tokens
from megarl.media.item import EncodedPrompt, MediaItem
from megarl.media.load import load_item
from megarl.media.options import MediaOptions

DEFAULTS = MediaOptions()


class Encoder:
    """Encodes the prompts of one run, remembers their media, and prepares in threads what comes next.

    For one thread: tokenizers hold state.  Only media is prepared in others.
    """

    def __init__(
        self,
        processor: Any,
        positions: PositionRule,
        max_prompt_tokens: int,
        options: MediaOptions = DEFAULTS,
        load: Callable[[Any, MediaSource, MediaOptions], MediaItem] = load_item,
    ):
        """`load` is called from several threads at once.

        Raises:
            UserError: the processor has no media tokens that can be used.
        """
        media_tokens(processor)
        self._processor = processor
        self._positions = positions
        self._max_prompt_tokens = max_prompt_tokens
        self._items = ItemCache(partial(_load, load, processor, options), options.cache_bytes, options.threads)

    def encode(self, prompt: Prompt) -> EncodedPrompt:
        """See `megarl.media.expand.encode_prompt`, whose errors it raises."""
        return encode_prompt(prompt, self._processor, self._positions, self._max_prompt_tokens, self._items.get)

    def extend(self, before: EncodedPrompt, completion: Tensor, reply: Prompt) -> EncodedPrompt:
        """See `megarl.media.expand.extend_prompt`, whose errors it raises."""
        return extend_prompt(before, completion, reply, self._processor, self._positions, self._items.get)

    def prefetch(self, prompts: Sequence[Prompt]) -> None:
        """Begin to prepare the media of the prompts that will be encoded next, in their order.

        Replaces what an earlier call asked for; see `megarl.media.cache`.
        """
        self._items.prefetch([source for prompt in prompts for source in prompt.media])

    def check(self, prompts: Sequence[Prompt]) -> list[bytes | MediaError | PromptError]:
        """What each prompt becomes (`fingerprint`), or why it cannot be used."""
        self.prefetch(prompts)
        return [self._fingerprint(prompt) for prompt in prompts]

    def metrics(self) -> dict[str, float]:
        """See `megarl.media.cache.ItemCache.metrics`."""
        return self._items.metrics()

    def close(self) -> None:
        """Stop the threads after the items in their hands."""
        self._items.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def _fingerprint(self, prompt: Prompt) -> bytes | MediaError | PromptError:
        try:
            encoded = self.encode(prompt)
        except MediaError as error:
            return MediaError(error.name, error.reason)  # without a traceback, which holds what was decoded
        except PromptError as error:
            return type(error)(error.row, error.reason)
        return fingerprint(encoded)


def fingerprint(encoded: EncodedPrompt) -> bytes:
    """What a prompt became: SHA-256 of its ids, its mask, its positions and its items' digests."""
    digest = hashlib.sha256(struct.pack("<q", encoded.ids.numel()))
    digest.update(encoded.ids.numpy())
    digest.update(encoded.media_mask.numpy())
    digest.update(encoded.positions.contiguous().numpy())
    for item in encoded.items:
        digest.update(item.digest)
    return digest.digest()


def _load(load: Callable, processor: Any, options: MediaOptions, source: MediaSource) -> MediaItem:
    return load(processor, source, options)
