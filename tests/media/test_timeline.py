from fractions import Fraction
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers.models.qwen3_vl.video_processing_qwen3_vl import Qwen3VLVideoProcessor
from transformers.video_utils import VideoMetadata

from megarl.media.options import VideoOptions
from megarl.media.timeline import Timeline

NTSC = [Fraction(24000, 1001), Fraction(30000, 1001), Fraction(60000, 1001)]


def timeline(times):
    return Timeline.from_stamps([round(time * 1000) for time in times], Fraction(1, 1000), [])


@pytest.mark.parametrize("rate", [1, 2, Fraction(15, 2), 10, 12, 15, 24, 25, 30, 50, 60, 120, *NTSC], ids=str)
@pytest.mark.parametrize("base", ["exact", Fraction(1, 90_000), Fraction(1, 1000)], ids=str)
def test_at_a_constant_rate_the_frames_are_those_of_transformers(rate, base):
    rate, processor = Fraction(rate), Qwen3VLVideoProcessor(min_frames=4, max_frames=64)
    unit = 1 / rate if base == "exact" else base
    for total in [*range(1, 40), 89, 90, 91, 150, 299, 1000]:
        stamps = [round(index / rate / unit) for index in range(total)]
        line = Timeline.from_stamps(stamps, unit, [rate])
        assert line.rate == float(rate)
        for fps in (None, 0.3, 1, 2, 3.3, 12.5):
            expected = processor.sample_frames(VideoMetadata(total, fps=float(rate)), fps=fps)
            chosen = line.sample(processor, VideoOptions(fps=fps))
            assert chosen == expected.tolist(), (total, fps)
            assert [line.times[i] for i in chosen] == [i / float(rate) for i in expected], "as transformers has them"


@pytest.mark.parametrize("rate", [1, 3, 10, 12, 24, 25, 30, 60], ids=str)
def test_a_rate_that_no_header_tells_is_found_in_the_times(rate):
    for total in [*range(4, 80), 240, 299, 1001]:
        stamps = [round(Fraction(1000 * index, rate)) for index in range(total)]
        line = Timeline.from_stamps(stamps, Fraction(1, 1000), [Fraction(7)])
        assert line.rate == rate, "not the 7 of the header"


@pytest.mark.parametrize("total", [1, 2, 5, 30, 299])
@pytest.mark.parametrize("num_frames", [1, 2, 3, 8, 300])
def test_a_number_of_frames_is_spread_as_transformers_spreads_it(total, num_frames):
    line = Timeline.from_stamps(range(total), Fraction(1, 30), [Fraction(30)])
    processor = Qwen3VLVideoProcessor()
    expected = processor.sample_frames(VideoMetadata(total, fps=30.0), num_frames=num_frames)
    assert line.sample(processor, VideoOptions(num_frames=num_frames)) == expected.tolist()


def test_the_bounds_of_the_recipe_come_before_those_of_the_processor():
    line = Timeline.from_stamps(range(300), Fraction(1, 30), [Fraction(30)])  # ten seconds
    processor = SimpleNamespace(fps=2, min_frames=4, max_frames=12, num_frames=None)

    def count(**options):
        return len(line.sample(processor, VideoOptions(**options)))

    assert count() == 12 and count(fps=0.1) == 4
    assert count(min_frames=1, max_frames=50) == 20
    assert count(fps=0.1, min_frames=2, max_frames=3) == 2
    assert count(fps=30, min_frames=2, max_frames=1000) == 300
    assert len(line.sample(SimpleNamespace(fps=None), VideoOptions())) == 300
    assert len(line.sample(SimpleNamespace(num_frames=7), VideoOptions())) == 7
    assert len(line.sample(SimpleNamespace(num_frames=7), VideoOptions(fps=1))) == 10


def test_one_late_frame_makes_a_rate_variable_even_in_a_coarse_time_base():
    assert Timeline.from_stamps([0, 1, 2, 4], Fraction(1, 30), [Fraction(30)]).rate is None


def test_frames_of_a_variable_rate_are_spread_in_time_and_not_in_number():
    # 1.5 s at 20 frames a second, then one frame a second
    line = timeline([0.05 * index for index in range(30)] + [2.0, 3.0, 4.0, 5.0, 6.0])
    chosen = line.sample(None, VideoOptions(num_frames=7))
    assert [line.times[index] for index in chosen] == [0, 1, 2, 3, 4, 5, 6]
    # 35 frames, 34 mean intervals in 6 s: 6.18 s at one frame a second
    assert len(line.sample(None, VideoOptions(fps=1, min_frames=1, max_frames=99))) == 6


@given(st.lists(st.integers(1, 3000), min_size=2, max_size=40), st.integers(2, 30))
def test_every_sample_is_a_nearest_frame(gaps, num_frames):
    stamps = np.cumsum([0, *gaps]).tolist()
    line = Timeline.from_stamps(stamps, Fraction(1, 1000), [])
    chosen = line.sample(None, VideoOptions(num_frames=num_frames))
    assert len(chosen) == num_frames and chosen == sorted(chosen)
    assert (chosen[0], chosen[-1]) == (0, len(stamps) - 1)
    times = np.array(line.times)
    if num_frames == len(times):
        assert chosen == list(range(num_frames)), "all of them"
        return
    for place, index in enumerate(chosen):
        away = abs(times - times[-1] * place / (num_frames - 1))
        assert away[index] <= away.min() + 1e-9
