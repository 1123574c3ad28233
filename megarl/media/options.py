"""How media is prepared, where a recipe asks for something else than the model's processor does by itself."""

from dataclasses import dataclass


@dataclass(frozen=True)
class ImageOptions:
    """None leaves the choice to the processor."""

    min_pixels: int | None = None
    """Height x width below which a picture is enlarged; set together with `max_pixels`."""
    max_pixels: int | None = None
    """Height x width above which a picture is shrunk."""


@dataclass(frozen=True)
class VideoOptions:
    """None leaves the choice to the processor."""

    fps: float | None = None
    """Frames to sample per second; excludes `num_frames`."""
    num_frames: int | None = None
    """Frames to sample, spread evenly over the video."""
    min_frames: int | None = None
    """Fewest frames that `fps` may lead to; set together with `max_frames`."""
    max_frames: int | None = None
    """Most frames that `fps` may lead to."""
    min_pixels: int | None = None
    """Frames x height x width below which a video is enlarged; set together with `max_pixels`."""
    max_pixels: int | None = None
    """Frames x height x width above which a video is shrunk."""


@dataclass(frozen=True)
class MediaOptions:
    image: ImageOptions = ImageOptions()
    video: VideoOptions = VideoOptions()
    cache_bytes: int = 1 << 30
    """Bound of the prepared pixels that are kept or prepared ahead."""
    threads: int = 4
    """Worker threads that decode and prepare."""
