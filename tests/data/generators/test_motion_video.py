from collections import Counter

import av
import numpy as np
import pytest

from megarl.data.generators import motion_video
from megarl.data.generators.motion_video import DIRECTIONS, FRAMES, RATE, SIZE, SQUARE, STEP, write_motion_video
from megarl.errors import UserError
from tests.data.generators.folders import assert_held_out, digest, parts, rows


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data") / "motion"
    write_motion_video(folder, train=160, test=80)
    return folder


def test_rows(folder):
    assert rows(folder, "train")[0] == {
        "messages": [
            {
                "role": "user",
                "content": [{"type": "video", "video": "clips/0000.mp4"}, {"type": "text", "text": "?"}],
            }
        ],
        "answer": "left",
        "source": "motion",
    }
    for split, count in (("train", 40), ("test", 20)):
        assert Counter(row["answer"] for row in rows(folder, split)) == dict.fromkeys(DIRECTIONS, count)
    assert_held_out(folder)


def test_every_square_moves_as_its_answer_says(folder):
    """And as no other answer says; judged by the decoded frames alone."""
    for row in rows(folder, "test"):
        frames, times = decoded(folder / parts(row)[0]["video"])
        assert frames.shape == (FRAMES, SIZE, SIZE)
        assert times == [number / RATE for number in range(FRAMES)]
        bright = frames > 128
        assert (bright.sum((1, 2)) == SQUARE**2).all()
        for before, after in zip(bright[:-1], bright[1:], strict=True):
            for way, (x, y) in DIRECTIONS.items():
                moved = np.roll(before, (STEP * y, STEP * x), axis=(0, 1))
                assert (moved == after).all() == (way == row["answer"])


def test_one_frame_says_nothing():
    """In the first and the last frame the square is equally often in every corner, whatever the direction."""
    generator = np.random.RandomState(3)
    motions = [motion_video._draw(generator, number) for number in range(4000)]
    for direction in DIRECTIONS:
        frames = np.stack([motion.frames()[[0, -1]] > 128 for motion in motions if motion.direction == direction])
        assert np.abs(frames.mean(0) - SQUARE**2 / SIZE**2).max() < 0.08


def decoded(path):
    """Grey frames [n, height, width], and their times in seconds."""
    with av.open(str(path)) as container:
        assert container.streams.video[0].codec_context.name == "h264"
        pictures = list(container.decode(video=0))
    frames = np.stack([picture.to_ndarray(format="rgb24") for picture in pictures])
    assert np.ptp(frames.astype(int), axis=-1).max() <= 1
    return frames[..., 0], [float(picture.pts * picture.time_base) for picture in pictures]


def test_the_bytes_are_the_same_every_time(folder, tmp_path):
    write_motion_video(tmp_path, train=160, test=80)
    assert digest(tmp_path) == digest(folder)


def test_nothing_is_overwritten(folder):
    before = digest(folder)
    with pytest.raises(UserError, match="is there already"):
        write_motion_video(folder)
    assert digest(folder) == before
