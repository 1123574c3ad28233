"""When the frames of a video are shown, and which of them are sampled."""

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np

from megarl.media.options import VideoOptions


@dataclass(frozen=True)
class Timeline:
    """Of all frames of one video, at least one."""

    times: tuple[float, ...]
    """Seconds since the first frame, ascending."""
    rate: float | None
    """Frames a second where it is constant, else None."""

    @classmethod
    def from_stamps(cls, stamps: Sequence[int], base: Fraction, rates: Sequence[Fraction]) -> "Timeline":
        """From ascending time stamps in units of `base` seconds, and the frame rates that the container declares.

        Time bases are coarse (WebM counts milliseconds), so that equal intervals come rounded.  The rate is
        constant if one of `rates`, or a usual one near the mean, explains every stamp to within its rounding
        (where frames are a few units apart, so that rounding is all that a fraction of a unit can be).  Then it
        replaces the stamps: frame i is shown at i / rate, as transformers has it.
        """
        ticks = [stamp - stamps[0] for stamp in stamps]
        if ticks[-1]:
            mean = (len(ticks) - 1) / (ticks[-1] * base)
            rates = [*rates, Fraction(round(mean)), Fraction(1000 * round(mean * 1001 / 1000), 1001)]
        for rate in filter(None, rates):
            interval = 1 / (rate * base)
            whole, parts = interval.numerator, interval.denominator
            slack = parts if interval >= 3 else 1
            if all(abs(tick * parts - index * whole) < slack for index, tick in enumerate(ticks)):
                return cls(tuple(index / float(rate) for index in range(len(ticks))), float(rate))
        return cls(tuple(float(tick * base) for tick in ticks), None)

    def sample(self, video_processor: Any, options: VideoOptions) -> list[int]:
        """Indices of the frames to sample, ascending.

        At a constant rate they are those of transformers' `Qwen3VLVideoProcessor.sample_frames`: `fps` frames a
        second of the duration, within `min_frames` and `max_frames` and at most all, or `num_frames`; spread
        evenly from the first frame to the last.  At a variable rate they are spread evenly in time, and each
        point in time takes the nearest frame, so that one that is shown for long may repeat; the duration is as
        many mean intervals as there are frames; and where all frames are asked for, each is taken once.
        `num_frames` beyond the video's repeat frames.

        `options` come before the attributes of the same names of `video_processor`.
        """
        total = len(self.times)
        count = self._sample_count(video_processor, options)
        if self.rate is not None or count == total:
            places = np.linspace(0, total - 1, count)
        else:
            places = np.interp(np.linspace(0, self.times[-1], count), self.times, np.arange(total))
        return places.round().astype(int).tolist()

    def _sample_count(self, video_processor: Any, options: VideoOptions) -> int:
        num_frames, fps = options.num_frames, options.fps
        if num_frames is None and fps is None:
            num_frames, fps = getattr(video_processor, "num_frames", None), getattr(video_processor, "fps", None)
        if num_frames is not None:
            return num_frames
        total = len(self.times)
        rate = self.rate or (total - 1) / self.times[-1]
        least = options.min_frames or getattr(video_processor, "min_frames", None) or 1
        most = options.max_frames or getattr(video_processor, "max_frames", None) or total
        count = total if fps is None else int(total / rate * fps)  # in this order, as transformers rounds
        return min(max(count, least), most, total)
