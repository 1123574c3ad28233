"""Prepared media in memory, so that a small data set is decoded once and not at every epoch."""

from collections import OrderedDict
from pathlib import Path
from typing import Any

from megarl.media.image import load_image, prepare_image
from megarl.media.item import MediaItem


class ItemCache:
    """Media items by path, the least recently used dropped first.  The files must not change during a run."""

    def __init__(self, processor: Any, max_bytes: int):
        """`processor` is a transformers processor; `max_bytes` bounds the pixels that are kept."""
        self._processor = processor
        self._max_bytes = max_bytes
        self._items: OrderedDict[tuple[str, Path], MediaItem] = OrderedDict()
        self._bytes = 0

    def load(self, kind: str, path: Path) -> MediaItem:
        """The prepared item, from memory or from its file.

        Raises:
            MediaError: the file cannot be decoded or prepared.
        """
        key = (kind, path)
        if key in self._items:
            self._items.move_to_end(key)
            return self._items[key]
        item = load_item(self._processor, kind, path)
        if item.pixels.nbytes <= self._max_bytes:
            self._items[key] = item
            self._bytes += item.pixels.nbytes
            while self._bytes > self._max_bytes:
                _, dropped = self._items.popitem(last=False)
                self._bytes -= dropped.pixels.nbytes
        return item


def load_item(processor: Any, kind: str, path: Path) -> MediaItem:
    """Decode and prepare one media file.

    Raises:
        MediaError: the file cannot be decoded or prepared.
        ValueError: a kind that is not supported.
    """
    if kind != "image":
        raise ValueError(f"{path}: media of kind {kind!r} is not supported; accepted: image")
    return prepare_image(load_image(path), processor.image_processor, path)
