"""From the bytes of one media item to what a vision tower takes."""

from typing import Any

from megarl.data.prompt import MediaSource
from megarl.media.image import load_image, prepare_image
from megarl.media.item import MediaItem
from megarl.media.options import MediaOptions
from megarl.media.video import load_video, prepare_video


def load_item(processor: Any, source: MediaSource, options: MediaOptions) -> MediaItem:
    """Decode and prepare one item.  Keeps nothing, and may run on many threads at once.

    Args:
        processor: a transformers processor, of which `image_processor` or `video_processor` is used.

    Raises:
        MediaError: the item cannot be decoded or prepared.
        UserError: a video, and the processor has no part for videos.
    """
    if source.kind == "image":
        return prepare_image(load_image(source), processor.image_processor, source.name, options.image)
    frames, timestamps = load_video(source, getattr(processor, "video_processor", None), options.video)
    return prepare_video(frames, timestamps, processor.video_processor, options.video, source.name)
