import contextlib
import http.server
import threading
from fractions import Fraction

import av
import numpy as np
import pytest
import torch
from transformers.models.qwen3_vl.video_processing_qwen3_vl import Qwen3VLVideoProcessor
from transformers.video_utils import VideoMetadata

from megarl.data.prompt import MediaSource
from megarl.errors import MediaError
from megarl.media import video
from megarl.media.options import VideoOptions
from megarl.media.timeline import Timeline
from megarl.media.video import load_video, prepare_video
from tests.media.files import moving_frames, numbered_frames, read_numbers, remux, turned, write_clip

NTSC = [Fraction(24000, 1001), Fraction(30000, 1001), Fraction(60000, 1001)]
EVERY_FRAME = VideoOptions(fps=1000, min_frames=1, max_frames=100_000)


def source(path, data=None):
    return MediaSource("video", "clip", path=path if data is None else None, data=data)


def load(path, processor, **options):
    return load_video(source(path), processor.video_processor, VideoOptions(**options))


# from bytes to frames


@pytest.mark.parametrize(
    "suffix, codec, audio",
    [(".mp4", "libx264", False), (".mp4", "libx264", True), (".mp4", "libx265", False), (".mp4", "mpeg4", False)]
    + [(".mov", "prores", False), (".mov", "mjpeg", True), (".mkv", "libx264", True), (".webm", "libvpx-vp9", True)]
    + [(".webm", "libvpx", False), (".webm", "libsvtav1", False), (".mp4", "libsvtav1", False)]
    + [(".avi", "mpeg4", False), (".avi", "libx264", True), (".gif", "gif", False)],
)
def test_containers_and_codecs(tmp_path, tiny, suffix, codec, audio, capfd):
    path = write_clip(tmp_path / f"clip{suffix}", numbered_frames(25, 64, 96), 10, codec, audio=audio)
    frames, times = load(path.rename(tmp_path / "clip.bin"), tiny, fps=3)
    expected = Qwen3VLVideoProcessor().sample_frames(VideoMetadata(25, fps=10.0), fps=3).tolist()
    assert frames.dtype == torch.uint8 and frames.shape == (7, 3, 64, 96)
    assert read_numbers(frames) == expected == [0, 4, 8, 12, 16, 20, 24]
    assert times == (0.0, 0.4, 0.8, 1.2, 1.6, 2.0, 2.4)


@pytest.mark.parametrize("rate", [NTSC[0], NTSC[1], 12, 25], ids=str)
@pytest.mark.parametrize("suffix", [".mp4", ".webm", ".avi"])
def test_frames_and_times_of_whole_files_are_those_of_transformers(tmp_path, tiny, rate, suffix):
    path = write_clip(tmp_path / f"clip{suffix}", numbered_frames(47), rate)
    frames, times = load(path, tiny, fps=4.1)
    expected = Qwen3VLVideoProcessor().sample_frames(VideoMetadata(47, fps=float(rate)), fps=4.1).tolist()
    assert read_numbers(frames) == expected
    assert times == tuple(index / float(rate) for index in expected)


def test_times_come_from_the_file_and_not_from_a_guessed_24_frames_a_second(tmp_path, tiny):
    path = write_clip(tmp_path / "clip.mp4", numbered_frames(40), 4)  # ten seconds
    frames, times = load(path, tiny, num_frames=5)
    assert times == (0.0, 2.5, 4.75 + 0.25, 7.25, 9.75)
    assert read_numbers(frames) == [0, 10, 20, 29, 39]


@pytest.mark.parametrize("suffix", [".mp4", ".webm", ".mkv"])
def test_variable_frame_rate(tmp_path, tiny, suffix):
    shown = [5 + value for value in (0, 0.04, 0.09, 0.4, 0.41, 1, 1.1, 1.5, 2.2, 3)]
    path = write_clip(tmp_path / f"clip{suffix}", numbered_frames(10), timestamps=shown)
    frames, times = load(path, tiny, num_frames=4)
    assert read_numbers(frames) == [0, 5, 8, 9]
    assert times == (0.0, 1.0, 2.2, 3.0), "relative to the first frame"


def test_every_frame_of_every_pixel(tmp_path, tiny):
    pixels = moving_frames(9, 34, 50)
    path = write_clip(tmp_path / "clip.mkv", pixels, codec="libx264rgb")
    frames, _ = load_video(source(path), tiny.video_processor, EVERY_FRAME)
    np.testing.assert_array_equal(frames.permute(0, 2, 3, 1).numpy(), pixels)
    again, _ = load_video(source(None, path.read_bytes()), tiny.video_processor, EVERY_FRAME)
    assert torch.equal(again, frames), "from bytes"


def test_frames_that_are_stored_in_another_order(tmp_path, tiny):
    path = write_clip(tmp_path / "clip.mp4", numbered_frames(40), 10, bf="5", g="12")
    frames, _ = load_video(source(path), tiny.video_processor, EVERY_FRAME)
    assert read_numbers(frames) == list(range(40))


def test_frames_that_are_never_shown(tmp_path, tiny):
    """VP8 has frames that only others refer to; the bit that shows them is in their first byte."""
    path = write_clip(tmp_path / "clip.webm", numbered_frames(20), 10, "libvpx")
    hidden = lambda index, data: bytes([data[0] & ~0x10]) + data[1:] if index in (7, 8) else data  # noqa: E731
    path = remux(path, tmp_path / "hidden.webm", hidden)
    frames, times = load_video(source(path), tiny.video_processor, EVERY_FRAME)
    assert read_numbers(frames) == [*range(7), *range(9, 20)]
    assert times[6:8] == (0.6, 0.9)


def test_a_video_cut_from_another_without_encoding_it_again(tmp_path, tiny):
    """Its first packet is a key frame; the next, shown before it, refers to what was cut off."""
    x264 = "open-gop=1:keyint=10:min-keyint=10:bframes=3:b-adapt=0:scenecut=0"
    path = write_clip(tmp_path / "clip.mkv", numbered_frames(40), 10, **{"x264-params": x264})
    with av.open(str(path)) as container:
        packets = [packet for packet in container.demux() if packet.size]
    start = [index for index, packet in enumerate(packets) if packet.is_keyframe][1]
    assert packets[start + 1].pts < packets[start].pts
    path = remux(path, tmp_path / "cut.mkv", lambda index, data: data if index >= start else None)
    frames, times = load_video(source(path), tiny.video_processor, EVERY_FRAME)
    assert read_numbers(frames) == list(range(10, 40)) and times[:3] == (0.0, 0.1, 0.2)


def test_more_frames_than_there_are_repeat(tmp_path, tiny):
    path = write_clip(tmp_path / "clip.mp4", numbered_frames(3), 10)
    frames, times = load(path, tiny, num_frames=5)
    assert read_numbers(frames) == [0, 0, 1, 2, 2]
    assert times == (0.0, 0.0, 0.1, 0.2, 0.2)


def test_nothing_is_decoded_beyond_the_last_sample(tmp_path, tiny, monkeypatch):
    path = write_clip(tmp_path / "clip.mp4", numbered_frames(60), 30, "mpeg4", g="10")
    monkeypatch.setattr(Timeline, "sample", lambda *_: [3, 8])
    seen = []
    to_rgb = video._Reader._to_rgb
    monkeypatch.setattr(video._Reader, "_to_rgb", lambda self, frame: seen.append(frame.pts) or to_rgb(self, frame))
    # a hole behind it is not noticed
    data = bytearray(path.read_bytes())
    end = data.index(b"moov") - 4
    data[end - (end - 48) // 4 : end] = bytes(len(data[end - (end - 48) // 4 : end]))
    frames, _ = load_video(source(None, bytes(data)), tiny.video_processor, VideoOptions())
    assert read_numbers(frames) == [3, 8] and len(seen) == 2
    monkeypatch.setattr(Timeline, "sample", lambda *_: [3, 59])
    with pytest.raises(MediaError, match="clip: (damaged|cannot be decoded)"):
        load_video(source(None, bytes(data)), tiny.video_processor, VideoOptions())


@pytest.mark.parametrize(
    "matrix, upright",
    [
        ((1, 0, 0, 1), lambda a: a),
        ((0, 1, -1, 0), lambda a: np.rot90(a, -1, (1, 2))),
        ((-1, 0, 0, -1), lambda a: np.rot90(a, 2, (1, 2))),
        ((0, -1, 1, 0), lambda a: np.rot90(a, 1, (1, 2))),
        ((-1, 0, 0, 1), lambda a: a[:, :, ::-1]),
        ((1, 0, 0, -1), lambda a: a[:, ::-1]),
        ((0, 1, 1, 0), lambda a: a.transpose(0, 2, 1, 3)),
        ((0, -1, -1, 0), lambda a: np.rot90(a.transpose(0, 2, 1, 3), 2, (1, 2))),
    ],
    ids=["as it is", "90 clockwise", "180", "90 counterclockwise", "mirrored", "flipped", "transposed", "transversed"],
)
def test_frames_are_turned_upright(tmp_path, tiny, matrix, upright):
    pixels = moving_frames(2, 32, 48)
    data = turned(write_clip(tmp_path / "clip.mp4", pixels, codec="libx264rgb").read_bytes(), matrix)
    frames, _ = load_video(source(None, data), tiny.video_processor, EVERY_FRAME)
    np.testing.assert_array_equal(frames.permute(0, 2, 3, 1).numpy(), upright(pixels))


@pytest.mark.parametrize("matrix", [(0.7071, 0.7071, -0.7071, 0.7071), (0, 0, 0, 0), (1, 1, 0, 1)])
def test_other_angles_are_refused(tmp_path, tiny, matrix):
    data = turned(write_clip(tmp_path / "clip.mp4", moving_frames(2)).read_bytes(), matrix)
    with pytest.raises(MediaError, match="clip: is turned by an angle that is no multiple of 90 degrees"):
        load_video(source(None, data), tiny.video_processor, VideoOptions())


# refused


def test_too_many_bytes_of_sampled_frames(tmp_path, tiny, monkeypatch):
    monkeypatch.setattr(video, "MAX_SAMPLED_BYTES", 4 * 32 * 48 * 3)
    path = write_clip(tmp_path / "clip.mp4", numbered_frames(20))
    assert len(load(path, tiny, num_frames=4)[0]) == 4
    with pytest.raises(MediaError, match="clip: 5 sampled frames of 48 x 32 pixels are more than 18432 bytes"):
        load(path, tiny, num_frames=5)


def test_too_many_pixels_to_decode(tmp_path, tiny, monkeypatch):
    monkeypatch.setattr(video, "MAX_DECODED_PIXELS", 20 * 32 * 48)
    assert load(write_clip(tmp_path / "a.mp4", numbered_frames(20)), tiny, num_frames=2)
    with pytest.raises(MediaError, match="clip: 21 frames of 48 x 32 pixels are more than 30720 pixels to decode"):
        load(write_clip(tmp_path / "b.mp4", numbered_frames(21)), tiny, num_frames=2)


@pytest.mark.parametrize(
    "demuxer, text",
    [
        ("hls", "#EXTM3U\n#EXT-X-TARGETDURATION:1\n#EXTINF:1,\n{}\n#EXT-X-ENDLIST\n"),
        ("concat", "ffconcat version 1.0\nfile '{}'\n"),
    ],
    ids=["hls", "concat"],
)
@pytest.mark.parametrize("target", ["file", "http"])
def test_no_other_file_or_address_is_opened(tmp_path, tiny, monkeypatch, demuxer, text, target):
    """Playlists are refused by their first bytes; should one get past that, it still opens nothing."""
    secret = write_clip(tmp_path / "secret.ts", numbered_frames(20), codec="mpeg2video")
    asked = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            asked.append(self.path)
            self.send_error(404)

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    try:
        url = secret if target == "file" else f"http://127.0.0.1:{server.server_port}/secret.ts"
        playlist = tmp_path / "list.mp4"
        playlist.write_text(text.format(url))
        careless = {"protocol_whitelist": "file,http,tcp", "safe": "0"}
        with contextlib.suppress(av.FFmpegError), av.open(str(playlist), format=demuxer, options=careless) as container:
            asked += [frame.pts for frame in container.decode(video=0)]
        assert asked, "the playlist would be followed"
        asked.clear()
        with pytest.raises(MediaError, match="clip: not a video in any of the formats"):
            load(playlist, tiny)
        monkeypatch.setattr(video, "sniff_container", lambda *_: demuxer)
        with pytest.raises(MediaError):
            load(playlist, tiny)
        assert not asked
    finally:
        server.shutdown()
        server.server_close()


# from frames to patches


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("options", [VideoOptions(), VideoOptions(min_pixels=4096, max_pixels=16384)])
def test_prepared_pixels_are_those_of_transformers(tiny, count, options):
    frames = torch.from_numpy(moving_frames(count, 40, 24)).permute(0, 3, 1, 2)
    times = tuple(0.5 * index for index in range(count))
    item = prepare_video(frames, times, tiny.video_processor, options, "clip")
    bounds = {} if options.min_pixels is None else {"size": {"shortest_edge": 4096, "longest_edge": 16384}}
    expected = tiny.video_processor(videos=[frames], do_sample_frames=False, return_tensors="pt", **bounds)
    assert torch.equal(item.pixels, expected["pixel_values_videos"])
    assert item.pixels.dtype == torch.float32 and item.pixels.is_contiguous()
    assert [list(item.grid)] == expected["video_grid_thw"].tolist()
    t, h, w = item.grid
    assert t == (count + 1) // 2 and item.pixels.shape == (t * h * w, 3 * 2 * 4 * 4)
    assert 2 * t * h * w * 16 >= 4096 or not bounds
    assert (item.kind, item.name, item.timestamps) == ("video", "clip", times)


def test_the_digest_is_of_the_frames_and_not_of_their_times(tiny):
    def digest(frames, *times):
        frames = torch.from_numpy(frames).permute(0, 3, 1, 2)
        return prepare_video(frames, times, tiny.video_processor, VideoOptions(), "clip").digest

    frames = moving_frames(2)
    assert digest(frames, 0.0, 1.0) == digest(frames.copy(), 0.0, 2.0)
    assert digest(frames, 0.0, 1.0) != digest(frames[::-1].copy(), 0.0, 1.0)


@pytest.mark.parametrize("size", [(8, 1608), (4, 4), (7, 100), (1, 1), (3, 3), (100, 3)])
def test_frames_that_the_processor_refuses(tiny, size):
    frames = torch.zeros(2, 3, *size, dtype=torch.uint8)
    with pytest.raises(MediaError, match=f"clip: 2 frames of {size[1]} x {size[0]} pixels refused: "):
        prepare_video(frames, (0.0, 1.0), tiny.video_processor, VideoOptions(), "clip")
