import errno
import io
import os
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

from megarl.data.prompt import MediaSource
from megarl.errors import MediaError, UserError
from megarl.media.load import load_item
from megarl.media.options import ImageOptions, MediaOptions, VideoOptions
from tests.media.files import encoded, moving_frames, noise, write_clip


def source(path, data=None):
    return MediaSource("video", "clip", path=path if data is None else None, data=data)


def test_items_are_loaded_as_the_options_say_from_files_and_bytes(tmp_path, tiny):
    clip = write_clip(tmp_path / "clip.mp4", moving_frames(20), 10)
    picture = tmp_path / "picture.png"
    picture.write_bytes(encoded(noise(48, 32), "PNG"))
    small = MediaOptions(ImageOptions(64, 256), VideoOptions(num_frames=2, min_pixels=64, max_pixels=512))
    for kind, path in (("video", clip), ("image", picture)):
        items = {}
        for name, options in (("default", MediaOptions()), ("small", small)):
            from_file = load_item(tiny, MediaSource(kind, "a", path=path), options)
            from_bytes = load_item(tiny, MediaSource(kind, "b", data=path.read_bytes()), options)
            assert from_file.digest == from_bytes.digest and (from_file.name, from_bytes.name) == ("a", "b")
            assert from_file.timestamps == from_bytes.timestamps
            items[name] = from_file
        assert items["small"].pixels.numel() < items["default"].pixels.numel()
        assert items["small"].kind == kind


def test_threads_do_not_disturb_each_other(tmp_path, tiny):
    paths = [write_clip(tmp_path / f"{seed}.mp4", moving_frames(20, seed=seed), 10) for seed in range(4)]
    expected = [load_item(tiny, source(path), MediaOptions()).digest for path in paths]
    with ThreadPoolExecutor(4) as pool:
        items = list(pool.map(lambda path: load_item(tiny, source(path), MediaOptions()), paths * 10))
    assert [item.digest for item in items] == expected * 10
    assert len(set(expected)) == 4


def test_hundreds_of_cycles_leave_handles_and_memory_flat(tmp_path, tiny):
    good = write_clip(tmp_path / "clip.mp4", moving_frames(12, 96, 128), 10, audio=True)
    gif = write_clip(tmp_path / "clip.gif", moving_frames(12, 96, 128), 10)
    cut = source(None, good.read_bytes().replace(b"avcC", b"xxxx"))

    def cycles(count):
        for _ in range(count):
            load_item(tiny, source(good), MediaOptions())
            load_item(tiny, source(gif), MediaOptions())
            with pytest.raises(MediaError):
                load_item(tiny, cut, MediaOptions())
        with open("/proc/self/statm") as statm:
            pages = int(statm.read().split()[1])
        return len(os.listdir("/proc/self/fd")), pages * os.sysconf("SC_PAGESIZE")

    cycles(20)
    handles, bytes_before = cycles(20)
    handles_after, bytes_after = cycles(150)
    assert handles_after == handles
    # one leaked set of decoded frames a cycle would be 66 MB
    assert bytes_after - bytes_before < 24 << 20


def test_a_processor_without_videos_is_the_users_mistake(tmp_path):
    path = write_clip(tmp_path / "clip.mp4", moving_frames(2))
    for processor in (SimpleNamespace(), SimpleNamespace(video_processor=None)):
        with pytest.raises(UserError, match="clip: the model's processor prepares no videos"):
            load_item(processor, source(path), MediaOptions())


@pytest.mark.parametrize("error", [MemoryError(), OSError(errno.EMFILE, "too many open files"), OSError(errno.EIO, "")])
@pytest.mark.parametrize("kind", ["image", "video"])
def test_trouble_of_the_machine_is_no_bad_item(tiny, tmp_path, monkeypatch, kind, error):
    """Else good rows were rejected, today and not tomorrow."""

    class Broken(io.BytesIO):
        def read(self, *_):
            raise error

    path = tmp_path / "a"
    path.write_bytes(b"x")
    monkeypatch.setattr(type(path), "open", lambda *_: Broken(b"x"))
    with pytest.raises(type(error)):
        load_item(tiny, MediaSource(kind, "a", path), MediaOptions())
