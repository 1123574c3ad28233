"""Media from files to tokens, against transformers' processor alone; and what is kept of it in memory."""

from pathlib import Path
from tempfile import TemporaryDirectory

import av
import numpy as np
from PIL import Image
from transformers import AutoProcessor
from transformers.video_utils import load_video

from megarl.bench.lines import Line, turns
from megarl.data.prompt import MediaSource, Prompt
from megarl.media.encoder import Encoder
from megarl.media.options import MediaOptions, VideoOptions
from megarl.models.qwen3_vl.positions import mrope_positions
from megarl.models.tiny_processor import build_tiny_processor

PICTURE = (640, 480)
VIDEO = (320, 240)
FRAMES, SAMPLED = 64, 16
QWEN3_VL = dict(patch_size=16, merge_size=2, temporal_patch_size=2, min_pixels=32**2 * 4, max_pixels=32**2 * 16384)
"""Patches and picture sizes of the released models; the recipe's own may be a toy's."""


def measure(recipe, options) -> list[Line]:
    """JPEG pictures and H.264 clips made on the spot, one prompt each, through a Qwen3-VL processor."""
    with TemporaryDirectory() as name:
        folder = Path(name)
        build_tiny_processor(folder, "".join(map(chr, range(32, 127))), 128, **QWEN3_VL)
        processor = AutoProcessor.from_pretrained(folder)
        pictures = [_write_picture(folder / f"{i}.jpg", i) for i in range(options.pictures)]
        videos = [_write_video(folder / f"{i}.mp4", i) for i in range(options.videos)]
        lines = []
        for kind, files in (("image", pictures), ("video", videos)):
            prompts = [_prompt(kind, file) for file in files]
            for threads in (0, recipe.data.media_threads):
                lines.append(_throughput_line(processor, kind, prompts, threads, options.rounds))
        lines.append(_memory_line(processor, [_prompt("image", file) for file in pictures], recipe.data.media_threads))
        return lines


def _throughput_line(processor, kind: str, prompts: list[Prompt], threads: int, rounds: int) -> Line:
    """Nothing is kept between rounds.  The peer decodes and prepares in its one thread in both lines."""
    settings = MediaOptions(video=VideoOptions(num_frames=SAMPLED), cache_bytes=1 << 30, threads=threads)

    def ours():
        with Encoder(processor, mrope_positions, 1 << 20, settings) as encoder:
            encoder.prefetch(prompts)
            for prompt in prompts:
                encoder.encode(prompt)

    def theirs():
        for prompt in prompts:
            _transformers(processor, prompt)

    mine, other = turns(ours, theirs, rounds)
    name = f"{'pictures' if kind == 'image' else 'videos'} to tokens, {threads or 'no'} thread(s) ahead"
    return Line(name, "items/s", len(prompts) / mine, len(prompts) / other)


def _memory_line(processor, prompts: list[Prompt], threads: int) -> Line:
    """Two epochs over a data set of four times the budget, with what comes next asked for ahead."""
    with Encoder(processor, mrope_positions, 1 << 20, MediaOptions(threads=0)) as encoder:
        total = sum(item.pixels.nbytes for prompt in prompts for item in encoder.encode(prompt).items)
    with Encoder(processor, mrope_positions, 1 << 20, MediaOptions(cache_bytes=total // 4, threads=threads)) as encoder:
        for _ in range(2):
            encoder.prefetch(prompts)
            for prompt in prompts:
                encoder.encode(prompt)
        kept = encoder.metrics()["media/cache_bytes_peak"]
    return Line("pixels kept, data set of 4 x the budget", "MiB", kept / 2**20, total / 2**20)


def _transformers(processor, prompt: Prompt) -> None:
    """What a user's own loop does, one prompt at a time."""
    text = processor.apply_chat_template(list(prompt.messages), add_generation_prompt=True, tokenize=False)
    (source,) = prompt.media
    if source.kind == "image":
        with Image.open(source.path) as image:
            processor(text=[text], images=[image.convert("RGB")], return_tensors="pt")
        return

    def indices(metadata, **_):
        return np.linspace(0, metadata.total_num_frames - 1, SAMPLED).round().astype(int)

    frames, metadata = load_video(str(source.path), backend="pyav", sample_indices_fn=indices)
    processor(text=[text], videos=[frames], video_metadata=[metadata], do_sample_frames=False, return_tensors="pt")


def _prompt(kind: str, path: Path) -> Prompt:
    content = [{"type": kind, kind: MediaSource(kind, path.name, path)}, {"type": "text", "text": "What is this?"}]
    return Prompt(0, 1, ({"role": "user", "content": content},), "", "bench")


def _noise(seed: int, frames: int, width: int, height: int) -> np.ndarray:
    """uint8 `[frames, height, width, 3]`, smooth as pictures are, so that codecs do ordinary work."""
    coarse = np.random.RandomState(seed).randint(0, 256, (frames, height // 16, width // 16, 3), dtype=np.uint8)
    return np.stack([np.asarray(Image.fromarray(f).resize((width, height), Image.Resampling.BICUBIC)) for f in coarse])


def _write_picture(path: Path, seed: int) -> Path:
    Image.fromarray(_noise(seed, 1, *PICTURE)[0]).save(path, quality=90)
    return path


def _write_video(path: Path, seed: int) -> Path:
    with av.open(str(path), "w") as container:
        stream = container.add_stream("libx264", rate=24)
        stream.width, stream.height, stream.pix_fmt = *VIDEO, "yuv420p"
        for pixels in _noise(seed, FRAMES, *VIDEO):
            for packet in stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")):
                container.mux(packet)
        for packet in stream.encode():
            container.mux(packet)
    return path
