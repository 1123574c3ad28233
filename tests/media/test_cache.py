"""Items are decoded once, within the budget, by threads that never stop the one that asks."""

import gc
import subprocess
import sys
import threading
import time
import weakref

import pytest
import torch

from megarl.data.prompt import MediaSource
from megarl.errors import MediaError
from megarl.media.cache import ItemCache
from megarl.media.item import MediaItem

SIZE = 64
"""Bytes of an item, unless its name says otherwise: `a*3` has three times as many."""


class Loader:
    """Makes items up, notes which and where, and waits where it is told to."""

    def __init__(self):
        self.begun = []
        self.threads = set()
        self.at_once = self.most_at_once = 0
        self.gate = threading.Event()
        self.gate.set()
        self._lock = threading.Lock()

    def __call__(self, source):
        with self._lock:
            self.begun.append(source.name)
            self.threads.add(threading.current_thread())
            self.at_once += 1
            self.most_at_once = max(self.most_at_once, self.at_once)
        try:
            assert self.gate.wait(20)
            if source.name.startswith("bad"):
                raise MediaError(source.name, "cannot be decoded")
            if source.name.startswith("bug"):
                raise ZeroDivisionError("a bug")
            size = SIZE * int(source.name.partition("*")[2] or 1)
            return MediaItem(source.kind, torch.zeros(size // 4), (1, 2, 2), b"", source.name)
        finally:
            with self._lock:
                self.at_once -= 1


def source(name, kind="image"):
    return MediaSource(kind, name, data=name.encode())


def sources(names):
    return [source(name) for name in names.split()]


@pytest.fixture
def loader():
    return Loader()


@pytest.fixture
def make(loader):
    made = []

    def build(items=1000, threads=2):
        made.append(ItemCache(loader, items * SIZE, threads))
        return made[-1]

    yield build
    loader.gate.set()
    for cache in made:
        cache.close()


def until(condition):
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end, "nothing more happens"
        time.sleep(0.001)


def settle(cache):
    """Until no thread is left."""
    until(lambda: not cache._workers)


def names(cache, wanted):
    return [cache.get(s).name for s in sources(wanted)]


def test_an_item_is_decoded_once(make, loader):
    cache = make()
    assert names(cache, "a b a b a") == ["a", "b", "a", "b", "a"]
    assert loader.begun == ["a", "b"]


def test_the_least_recently_used_item_goes_first(make, loader):
    cache = make(items=2)
    names(cache, "a b a c a b")
    assert loader.begun == ["a", "b", "c", "b"]


def test_an_item_above_the_budget_is_not_kept_and_drops_nothing(make, loader):
    cache = make(items=2)
    names(cache, "a big*3 big*3 a")
    assert loader.begun == ["a", "big*3", "big*3"]
    assert cache.metrics()["media/cache_bytes_peak"] == SIZE


def test_an_item_in_use_is_not_decoded_again(make, loader):
    cache = make(items=1)
    held = [cache.get(s) for s in sources("a big*3")]
    names(cache, "b c a big*3")
    assert loader.begun == ["a", "big*3", "b", "c"]
    del held
    gc.collect()
    names(cache, "b big*3")
    assert loader.begun == ["a", "big*3", "b", "c", "b", "big*3"]


def test_an_item_that_was_dropped_in_use_comes_back_once(make, loader):
    """It is asked for while it waits in line for a thread that finds it alive."""
    cache = make(items=2)
    held = cache.get(source("a"))
    names(cache, "b c")
    cache.prefetch(sources("b c a a"))
    assert cache.get(source("a")) is held
    names(cache, "b c")
    settle(cache)
    assert cache.get(source("a")) is held and loader.begun == ["a", "b", "c"]
    assert cache._bytes == sum(item.pixels.nbytes for item in cache._kept.values()) == 2 * SIZE
    assert cache._reserved == 0


def test_the_same_bytes_under_other_names_are_one_item_and_kinds_are_two(make, loader):
    cache = make()
    for name, kind in [("a", "image"), ("b", "image"), ("c", "video")]:
        cache.get(MediaSource(kind, name, data=b"same"))
    assert loader.begun == ["a", "c"]


def test_prefetched_items_are_there_when_asked_for(make, loader):
    cache = make()
    cache.prefetch(sources("a b c a b"))
    settle(cache)
    names(cache, "a b c a b")
    assert sorted(loader.begun) == ["a", "b", "c"]
    assert threading.main_thread() not in loader.threads
    metrics = cache.metrics()
    assert (metrics["media/decoded"], metrics["media/cache_hits"]) == (3, 5)


def test_what_a_thread_is_at_is_waited_for(make, loader):
    cache = make()
    loader.gate.clear()
    cache.prefetch(sources("a"))
    until(lambda: loader.begun)
    threading.Timer(0.05, loader.gate.set).start()
    assert names(cache, "a") == ["a"] and loader.begun == ["a"]
    metrics = cache.metrics()
    assert metrics["media/wait_seconds"] >= 0.04 and metrics["media/cache_hits"] == 0


def test_what_no_thread_has_begun_is_prepared_by_the_one_that_asks(make, loader):
    cache = make(threads=1)
    loader.gate.clear()
    cache.prefetch(sources("a b c"))
    until(lambda: loader.begun)
    threading.Timer(0.05, loader.gate.set).start()
    assert names(cache, "c") == ["c"] and threading.main_thread() in loader.threads
    names(cache, "a b")
    assert sorted(loader.begun) == ["a", "b", "c"]


def test_several_are_prepared_at_once_and_not_more_than_there_are_threads(make, loader):
    cache = make(threads=3)
    names(cache, "first")  # tells the size of the others
    loader.gate.clear()
    cache.prefetch(sources("a b c d e f g"))
    until(lambda: loader.at_once == 3)
    time.sleep(0.02)
    loader.gate.set()
    settle(cache)
    assert loader.most_at_once == 3 and sorted(loader.begun) == ["a", "b", "c", "d", "e", "f", "first", "g"]


def test_prefetching_stops_at_the_budget_and_goes_on_where_there_is_room(make, loader):
    cache = make(items=3)
    wanted = "a b c d e f g h i j"
    cache.prefetch(sources(wanted))
    settle(cache)
    assert sorted(loader.begun) == ["a", "b", "c"]
    names(cache, "a b")
    settle(cache)
    assert sorted(loader.begun) == ["a", "b", "c", "d", "e"]
    names(cache, "c d e f g h i j")
    settle(cache)
    assert sorted(loader.begun) == wanted.split(), "each once"
    assert cache.metrics()["media/cache_bytes_peak"] == 3 * SIZE


def test_prefetching_drops_what_was_asked_for_before_what_will_be(make, loader):
    cache = make(items=3)
    names(cache, "old1 old2 old3")
    cache.prefetch(sources("old1 a b"))
    settle(cache)
    begun = list(loader.begun)
    names(cache, "old1 a b")
    assert loader.begun == begun and sorted(begun[3:]) == ["a", "b"]


def test_an_item_named_twice_stays_until_it_was_asked_for_twice(make, loader):
    cache = make(items=1)
    cache.prefetch(sources("a b a"))
    settle(cache)
    names(cache, "a b a")
    assert loader.begun.count("a") == 1


def test_an_item_above_the_budget_does_not_stop_the_others(make, loader):
    cache = make(items=2)
    wanted = "a big*9 b c"
    cache.prefetch(sources(wanted))
    for name in wanted.split():
        settle(cache)
        names(cache, name)
    assert sorted(loader.begun) == sorted(wanted.split())
    assert threading.main_thread() not in loader.threads
    assert cache.metrics()["media/cache_bytes_peak"] <= 11 * SIZE


@pytest.mark.parametrize(("items", "threads"), [(0, 2), (2, 0)])
def test_without_budget_or_threads_nothing_is_prepared_ahead(make, loader, items, threads):
    cache = make(items=items, threads=threads)
    cache.prefetch(sources("a b c"))
    settle(cache)
    assert not loader.begun and names(cache, "a b c") == ["a", "b", "c"]


def test_a_new_call_replaces_what_nobody_has_begun(make, loader):
    cache = make(items=2, threads=1)
    cache.prefetch(sources("a b c d"))
    settle(cache)
    cache.prefetch(sources("x y"))
    settle(cache)
    assert loader.begun == ["a", "b", "x", "y"], "what was prepared and is not wanted makes room"
    names(cache, "x y")
    settle(cache)
    assert loader.begun == ["a", "b", "x", "y"]


def test_an_error_is_raised_where_its_item_is_asked_for_and_named_after_the_asker(make, loader):
    cache = make()
    cache.prefetch(sources("a bad b"))
    settle(cache)
    assert names(cache, "a b") == ["a", "b"]
    with pytest.raises(MediaError) as error:
        cache.get(MediaSource("image", "other name", data=b"bad"))
    assert str(error.value) == "other name: cannot be decoded"
    assert loader.begun.count("bad") == 1, "the thread's error, not a second try"


def test_errors_are_not_kept(make, loader):
    cache = make()
    cache.prefetch(sources("bad bad"))
    settle(cache)
    for tries in (1, 1, 2, 3):
        with pytest.raises(MediaError):
            cache.get(source("bad"))
        assert loader.begun.count("bad") == tries
    cache.prefetch(sources("bad"))
    settle(cache)
    cache.prefetch([])
    with pytest.raises(MediaError):
        cache.get(source("bad"))
    assert loader.begun.count("bad") == 5


def test_a_bug_in_a_thread_is_raised_where_the_item_is_asked_for(make, loader):
    cache = make()
    cache.prefetch(sources("bug a"))
    settle(cache)
    with pytest.raises(ZeroDivisionError):
        cache.get(source("bug"))
    assert names(cache, "a") == ["a"]


def test_metrics_are_those_since_the_last_call(make, loader):
    cache = make()
    names(cache, "a a b")
    first, second = cache.metrics(), cache.metrics()
    assert (first["media/decoded"], first["media/cache_hits"], first["media/cache_bytes_peak"]) == (2, 1, 2 * SIZE)
    assert first["media/decode_seconds"] > 0 and first["media/wait_seconds"] >= first["media/decode_seconds"]
    assert second == dict.fromkeys(first, 0.0) | {"media/cache_bytes_peak": 2 * SIZE}


def test_many_threads_may_ask_at_once(make, loader):
    cache = make(items=5, threads=3)
    wanted = [f"n{number % 12}" for number in range(300)]
    found = []

    def ask(start):
        found.extend(cache.get(source(wanted[(start + place) % 300])).name for place in range(300))

    cache.prefetch(sources(" ".join(wanted)))
    askers = [threading.Thread(target=ask, args=(start,), daemon=True) for start in range(0, 300, 50)]
    for asker in askers:
        asker.start()
    for asker in askers:
        asker.join(20)
        assert not asker.is_alive()
    assert len(found) == 1800
    settle(cache)
    assert cache._bytes == sum(item.pixels.nbytes for item in cache._kept.values()) <= 5 * SIZE
    assert cache._reserved == sum(i.pixels.nbytes for key, i in cache._kept.items() if cache._wanted[key])
    assert not cache._loading and not cache._errors


def test_closing_forgets_what_nobody_has_begun(make, loader):
    cache = make(threads=1)
    loader.gate.clear()
    cache.prefetch(sources("a b c"))
    until(lambda: loader.begun)
    threading.Timer(0.05, loader.gate.set).start()
    cache.close()
    assert loader.begun == ["a"] and not cache._workers
    assert names(cache, "b") == ["b"]


def test_an_unused_cache_is_freed_with_its_items(loader):
    cache = ItemCache(loader, 1000, 2)
    cache.prefetch(sources("a b"))
    settle(cache)
    item = weakref.ref(cache.get(source("a")))
    cache = weakref.ref(cache)
    gc.collect()
    assert cache() is None and item() is None


def test_the_process_ends_while_threads_are_at_work():
    program = """
import sys, time, types
sys.modules["torch"] = types.SimpleNamespace(Tensor=object)  # takes seconds to import, and is not at work here
from megarl.data.prompt import MediaSource
from megarl.media.cache import ItemCache

def load(source):
    time.sleep(0.2)
    print(source.name, flush=True)
    raise SystemError("late")

cache = ItemCache(load, 100, 2)
cache.prefetch([MediaSource("image", str(n), data=b"%d" % n) for n in range(1000)])
time.sleep(0.05)
"""
    start = time.monotonic()
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "0\n", "")
    assert time.monotonic() - start < 50
