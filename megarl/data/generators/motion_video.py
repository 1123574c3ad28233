"""Clips of a square that moves, as real video files, and the direction that it moves in."""

from dataclasses import dataclass
from pathlib import Path

import av
import numpy as np

from megarl.data.folder import whole_folder
from megarl.data.generators.rows import draw_distinct, row, write_rows

DIRECTIONS = {"left": (-1, 0), "right": (1, 0), "up": (0, -1), "down": (0, 1)}
"""Steps to the right and downwards, by answer."""

SIZE = 16
FRAMES = 4
SQUARE = 8
STEP = 3
"""Width and height of a frame, the square's side, and how far it moves from frame to frame, in pixels.  A smaller or
slower one changes little within the two frames of a temporal patch, and a tiny model finds its direction late."""
RATE = 2
"""Frames a second: what Qwen3-VL's video processor samples by itself."""


@dataclass(frozen=True)
class Motion:
    direction: str
    x: int
    y: int
    """Upper left corner of the square in the first frame, 0 to 15."""
    square: int
    ground: int
    """Brightness of the square and of the ground, 0 to 255."""

    def frames(self) -> np.ndarray:
        """uint8 `[frames, height, width]`, grey.  What leaves the picture on one side comes in on the other."""
        frames = np.full((FRAMES, SIZE, SIZE), self.ground, np.uint8)
        right, down = DIRECTIONS[self.direction]
        side = np.arange(SQUARE)
        for number, frame in enumerate(frames):
            rows = (self.y + STEP * number * down + side) % SIZE
            columns = (self.x + STEP * number * right + side) % SIZE
            frame[np.ix_(rows, columns)] = self.square
        return frames


def write_motion_video(folder: Path, train: int = 1024, test: int = 256) -> None:
    """Write the data set: `clips/NNNN.mp4`, `train.jsonl` and `test.jsonl`.

    A clip (H.264, 2 seconds) shows a bright square that moves over a dark ground and comes in again where it leaves:
    every place is as likely in every frame and direction, so that one frame says nothing.  Directions come in
    turn.  No two clips start at the same place with the same direction and the same brightness of square and
    ground.  The bytes are the same on every run, for one version of the encoder.

    Raises:
        UserError: `folder` is there already and is not empty.
    """
    with whole_folder(folder) as temporary:
        rows = write_clips(temporary, train + test, "?", "motion")
        write_rows(temporary, rows[:train], rows[train:])


def write_clips(folder: Path, count: int, question: str, source: str) -> list[str]:
    """`clips/NNNN.mp4` in `folder`, and the row of each."""
    (folder / "clips").mkdir()
    rows = []
    for number, motion in enumerate(draw_distinct(11, count, _draw)):
        name = f"clips/{number:04d}.mp4"
        write_clip(folder / name, motion.frames(), RATE)
        rows.append(row([("video", name), question], motion.direction, source))
    return rows


def _draw(generator: np.random.RandomState, number: int) -> Motion:
    x, y, square, ground = (int(generator.randint(low, high)) for low, high in ((0, SIZE),) * 2 + ((200, 256), (0, 56)))
    return Motion(list(DIRECTIONS)[number % len(DIRECTIONS)], x, y, square, ground)


def write_clip(path: Path, frames: np.ndarray, rate: int) -> None:
    """Encode grey frames, uint8 `[frames, height, width]`, as an mp4.

    Quantiser 0 is lossless in luma; nothing is in chroma.  One thread and `bitexact` make the bytes a function
    of the frames and the encoder's version.
    """
    _, height, width = frames.shape
    with av.open(str(path), "w", format="mp4", options={"fflags": "+bitexact"}) as container:
        options = {"qp": "0", "preset": "veryfast", "threads": "1"}
        stream = container.add_stream("libx264", rate=rate, options=options)
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        for frame in frames:
            picture = av.VideoFrame.from_ndarray(np.repeat(frame[..., None], 3, axis=2), format="rgb24")
            container.mux(stream.encode(picture))
        container.mux(stream.encode())
