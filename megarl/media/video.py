"""Videos: from encoded bytes to sampled frames with their presentation times, and to patches."""

from bisect import bisect_left
from collections.abc import Sequence
from fractions import Fraction
from typing import Any, BinaryIO

import av
import numpy as np
import torch
from av.sidedata.sidedata import Type as SideData
from av.stream import Disposition

from megarl.data.prompt import MediaSource
from megarl.errors import MediaError, UserError, of_this_machine
from megarl.media.container import sniff_container
from megarl.media.image import MAX_PIXELS, open_source, preparation_of, prepared_item, size_arguments
from megarl.media.item import MediaItem
from megarl.media.options import VideoOptions
from megarl.media.timeline import Timeline

CODECS = {
    "av1": "AV1",
    "gif": "GIF",
    "h264": "H.264",
    "hevc": "HEVC",
    "mjpeg": "Motion JPEG",
    "mpeg4": "MPEG-4",
    "prores": "ProRes",
    "vp8": "VP8",
    "vp9": "VP9",
}
"""What is decoded, by ffmpeg's names.  ffmpeg reads hundreds more; these are the ones that people use and attackers
have tried for years."""

MAX_SAMPLED_BYTES = 2 << 30
"""Of the sampled frames of one video, as 8-bit RGB before they are resized."""

MAX_DECODED_PIXELS = 1 << 40
"""Frames x height x width of a whole video: about five hours at 1920 x 1080 and 30 frames a second."""


def load_video(
    source: MediaSource, video_processor: Any, options: VideoOptions
) -> tuple[torch.Tensor, tuple[float, ...]]:
    """Decode the frames that `Timeline.sample` chooses, on one thread.

    Frames are turned upright as the container says, transparency is ignored (in a GIF it lies over white), and
    pixels that are not square are left so.  Of several video streams the first counts.

    Returns:
        uint8 `[n, 3, h, w]` RGB, and the presentation time of each frame in seconds since the video's first.

    Raises:
        MediaError: no file, no video in a format that is decoded here, damaged or cut off, or too large.
        UserError: there is no video processor.
    """
    if video_processor is None:
        raise UserError(f"{source.name}: the model's processor prepares no videos")
    try:
        with open_source(source) as stream:
            reader = _Reader(stream, source.name)
            timeline = reader.read_timeline()
            chosen = timeline.sample(video_processor, options)
            return reader.decode(chosen), tuple(timeline.times[index] for index in chosen)
    except MediaError:
        raise
    except Exception as error:  # hostile bytes: ffmpeg has many errors, and av and Python add theirs
        if of_this_machine(error):
            raise
        reason = getattr(error, "strerror", None) or str(error)
        raise MediaError(source.name, f"cannot be decoded: {type(error).__name__}: {reason}") from error


class _Reader:
    """Reads a video twice: when its frames are shown, from packets and without decoding; then the chosen ones."""

    def __init__(self, stream: BinaryIO, name: str):
        self._stream = stream
        self._name = name
        self._demuxer = sniff_container(stream, name)
        self._stamps: list[int] = []  # of the frames in the order of presentation
        self._by_number = self._demuxer == "avi"  # AVI has no presentation times: its frames are numbered

    def read_timeline(self) -> Timeline:
        with self._open() as container:
            video = self._find_video(container)
            codec = video.codec_context
            self._check_frame_size(codec.width, codec.height)
            base = Fraction(video.time_base)
            rates = [Fraction(rate) for rate in (video.average_rate, video.guessed_rate) if rate]
            if self._by_number:
                if not rates:
                    raise MediaError(self._name, "declares no frame rate")
                base = 1 / rates[0]
                self._stamps = list(range(sum(1 for _ in container.decode(video))))
            else:
                self._stamps = self._read_stamps(container, video)
            total = len(self._stamps)
            if not total:
                raise MediaError(self._name, "has no frames")
            if total * codec.width * codec.height > MAX_DECODED_PIXELS:
                size = f"{total} frames of {codec.width} x {codec.height} pixels"
                raise MediaError(self._name, f"{size} are more than {MAX_DECODED_PIXELS} pixels to decode")
        return Timeline.from_stamps(self._stamps, base, rates)

    def decode(self, chosen: Sequence[int]) -> torch.Tensor:
        """The frames with these indices, uint8 `[n, 3, h, w]`; nothing is decoded beyond the last."""
        places: dict[int, list[int]] = {}
        for place, index in enumerate(chosen):
            places.setdefault(self._stamps[index], []).append(place)
        frames = None
        with self._open() as container:
            for number, frame in enumerate(container.decode(self._find_video(container))):
                if frame.is_corrupt:
                    raise MediaError(self._name, f"damaged: frame {number} cannot be decoded whole")
                mine = places.pop(number if self._by_number else frame.pts, None)
                if mine is None:
                    continue
                rgb = self._to_rgb(frame)
                if frames is None:
                    self._check_sampled_bytes(len(chosen), rgb)
                    frames = torch.empty(len(chosen), *rgb.shape, dtype=torch.uint8)
                elif rgb.shape != frames.shape[1:]:
                    change = f"{_size(frames)} to {_size(rgb)} pixels"
                    raise MediaError(self._name, f"changes its size at frame {number}, from {change}")
                frames[mine] = rgb
                if not places:
                    return frames
        missing = sum(map(len, places.values()))
        raise MediaError(self._name, f"damaged: {missing} of {len(chosen)} sampled frames cannot be decoded")

    def _open(self) -> Any:
        """With one thread, and with nothing to read from but the stream: media can name other files and hosts."""
        self._stream.seek(0)
        options = {
            "max_pixels": str(MAX_PIXELS),
            "threads": "1",
            "protocol_whitelist": "none",
            "codec_whitelist": ",".join([*CODECS, "libdav1d"]),  # by decoder: the one for AV1 has its own name
        }
        return av.open(self._stream, "r", self._demuxer, options=options, buffer_size=1 << 18, io_open=_refuse_to_open)

    def _find_video(self, container: Any) -> Any:
        for video in container.streams.video:
            if Disposition.attached_pic in video.disposition:  # the cover of a song
                continue
            codec = video.codec_context
            if codec is None or codec.codec.canonical_name not in CODECS:
                known = "an unknown codec" if codec is None else codec.codec.canonical_name
                raise MediaError(self._name, f"is encoded with {known}; accepted: {', '.join(CODECS.values())}")
            codec.thread_count = 1
            codec.options = {"max_pixels": str(MAX_PIXELS)}
            return video
        raise MediaError(self._name, "has no video stream")

    def _read_stamps(self, container: Any, video: Any) -> list[int]:
        """Time stamps of the frames that the decoder will show, ascending, in the stream's time base."""
        stamps, first_key, end = set(), None, 0.0
        with_hidden = video.codec_context.codec.canonical_name == "vp8"
        for packet in container.demux():
            if not packet.size:
                continue
            if packet.is_corrupt:
                raise MediaError(self._name, "damaged or cut off: a packet is incomplete")
            if packet.pts is not None:
                end = max(end, float((packet.pts + (packet.duration or 0)) * packet.time_base))
            if packet.stream is not video or packet.is_discard:
                continue
            if with_hidden and not memoryview(packet)[0] & 0x10:  # VP8's frames for reference only
                continue
            if packet.pts is None:
                raise MediaError(self._name, "a frame has no presentation time")
            if first_key is None and packet.is_keyframe:
                first_key = packet.pts
            stamps.add(packet.pts)
        declared = (container.duration or 0) / av.time_base
        if self._demuxer == "matroska" and declared - end > max(0.25, declared / 4):
            raise MediaError(self._name, f"cut off: ends at {end:.1f} of {declared:.1f} seconds")
        if first_key is None:
            return []
        shown = sorted(stamps)
        # In a video that was cut without encoding it again, frames that are shown before the first key frame
        # refer to what was cut off.
        return shown[bisect_left(shown, first_key) :]

    def _to_rgb(self, frame: Any) -> torch.Tensor:
        """uint8 `[3, h, w]`, upright."""
        self._check_frame_size(frame.width, frame.height)
        rgb = frame.to_ndarray(format="rgb24", threads=1)
        if SideData.DISPLAYMATRIX in frame.side_data.keys():
            rgb = self._turn(rgb, np.frombuffer(bytes(frame.side_data[SideData.DISPLAYMATRIX]), np.int32))
        return torch.from_numpy(np.ascontiguousarray(rgb.transpose(2, 0, 1)))

    def _turn(self, rgb: np.ndarray, matrix: np.ndarray) -> np.ndarray:
        """A point (x, y) of the frame, as a row, times the 3 x 3 matrix is its place on the screen."""
        linear = matrix.reshape(3, 3)[:2, :2].astype(np.float64)
        signs = np.where(abs(linear) > abs(linear).max() / 100, np.sign(linear), 0).astype(int)
        if (abs(signs).sum(0) != 1).any() or (abs(signs).sum(1) != 1).any():
            raise MediaError(self._name, "is turned by an angle that is no multiple of 90 degrees")
        if not signs[0, 0]:
            rgb, signs = rgb.transpose(1, 0, 2), signs[::-1]
        return rgb[:: signs[1, 1], :: signs[0, 0]]

    def _check_frame_size(self, width: int, height: int) -> None:
        if width * height > MAX_PIXELS:
            raise MediaError(self._name, f"declares frames of {width} x {height} pixels, more than {MAX_PIXELS}")

    def _check_sampled_bytes(self, count: int, rgb: torch.Tensor) -> None:
        if count * rgb.nbytes > MAX_SAMPLED_BYTES:
            reason = f"{count} sampled frames of {_size(rgb)} pixels are more than {MAX_SAMPLED_BYTES} bytes"
            raise MediaError(self._name, f"{reason}; sample fewer, or shrink the video's file")


def _refuse_to_open(url: str, flags: int, options: dict) -> None:
    raise PermissionError(f"it refers to {url}")


def _size(frames: torch.Tensor) -> str:
    return f"{frames.shape[-1]} x {frames.shape[-2]}"


def prepare_video(
    frames: torch.Tensor, timestamps: Sequence[float], video_processor: Any, options: VideoOptions, name: str
) -> MediaItem:
    """Resize, normalise and cut sampled frames into patches, as transformers' `video_processor` does.

    Args:
        frames: uint8 `[n, 3, h, w]`, RGB.  The processor repeats the last one to fill a temporal patch.
        timestamps: seconds, one a frame.

    Raises:
        MediaError: the processor refuses the video, for example frames smaller than a media token.
    """
    try:
        prepared = video_processor(
            videos=[frames],
            do_sample_frames=False,
            input_data_format="channels_first",  # else frames of 3 pixels' width are guessed at
            return_tensors="pt",
            **size_arguments(options),
        )
    except ValueError as error:
        raise MediaError(name, f"{len(frames)} frames of {_size(frames)} pixels refused: {error}") from error
    pixels, grids = prepared["pixel_values_videos"], prepared["video_grid_thw"]
    preparation = preparation_of("video", video_processor, options)
    return prepared_item("video", pixels, grids, frames.numpy(), preparation, name, tuple(timestamps))
