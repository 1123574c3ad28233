"""The media lines of the bench: measured against a peer in the same run, and the budget that is kept."""

from types import SimpleNamespace

from megarl.bench.media import measure


def test_lines():
    recipe = SimpleNamespace(data=SimpleNamespace(media_threads=2))
    lines = measure(recipe, SimpleNamespace(pictures=8, videos=1, rounds=1))
    *throughput, memory = lines
    assert [line.name.split()[0] for line in throughput] == ["pictures", "pictures", "videos", "videos"]
    assert all(line.unit == "items/s" and line.megarl > 0 and line.peer > 0 for line in throughput)
    assert memory.unit == "MiB" and 0 < memory.ratio <= 0.25  # the budget is a quarter of the data set
