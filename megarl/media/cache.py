"""Prepared media in memory: kept while there is room, and prepared ahead by threads."""

import atexit
import threading
import time
import weakref
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Sequence

from megarl.data.prompt import Kind, MediaSource
from megarl.errors import MediaError
from megarl.media.item import MediaItem

Key = tuple[str, str]

_SIZES = 64
"""Items of a kind that are remembered for the size of the next one."""

_PATIENCE = 10.0
"""Seconds that `close` waits for items in the threads' hands."""


class ItemCache:
    """Media items by `MediaSource.key`, the least recently used dropped first.  Files must not change during a run.

    `prefetch` says what will be asked for next.  Threads prepare it in that order and stop where the bytes of
    what is prepared and not yet asked for, and of what is being prepared, reach the budget; each item that is
    asked for lets them go on.  Nothing waits for room but these threads: `get` prepares what no thread has begun
    in the caller's own thread, whatever the budget.  So the budget can be too small for a step, and costs time
    then, never the run.

    An item that someone still holds is found again without being decoded, also where the budget dropped it.

    A thread lives while there is something for it to do.  Threads are daemons; at the exit of the process those
    that are at work finish their item first, since a thread that dies inside a decoder can take the exit code
    with it.
    """

    def __init__(self, load: Callable[[MediaSource], MediaItem], max_bytes: int, threads: int):
        """`load` decodes and prepares, raises MediaError, and is called from any thread; `max_bytes` bounds the
        pixels that are kept; no more than `threads` items are prepared ahead at a time."""
        self._load = load
        self._max_bytes = max_bytes
        self._threads = threads
        self._change = threading.Condition()
        self._kept: OrderedDict[Key, MediaItem] = OrderedDict()
        self._alive: weakref.WeakValueDictionary[Key, MediaItem] = weakref.WeakValueDictionary()
        self._bytes = 0
        """Of `_kept`."""
        self._wanted: Counter[Key] = Counter()
        """How often an item of the last `prefetch` is still to be asked for; until then it is not dropped."""
        self._reserved = 0
        """Bytes of those of `_kept` that are wanted."""
        self._queue: OrderedDict[Key, MediaSource] = OrderedDict()
        """Wanted, and not begun."""
        self._loading: dict[Key, int] = {}
        """Bytes that are expected of what is being prepared."""
        self._errors: dict[Key, Exception] = {}
        """Of wanted items."""
        self._sizes: dict[Kind, deque[int]] = {}
        self._workers: set[threading.Thread] = set()
        self._at_exit = False
        self._clear_metrics()

    def get(self, source: MediaSource) -> MediaItem:
        """The prepared item: from memory, from the thread that is at it, or prepared here.

        Raises:
            MediaError: it cannot be decoded or prepared.
        """
        key = source.key
        start = time.perf_counter()
        with self._change:
            self._hits += self._peek(key) is not None
            if key in self._loading:
                self._wanted[key] = max(self._wanted[key], 1)  # so that it is there when the wait is over
                self._change.wait_for(lambda: key not in self._loading)
            item, error = self._peek(key), self._errors.get(key)
            self._asked_for(key)
            if item is not None:
                self._touch(key, item)
            elif error is None:
                self._queue.pop(key, None)
                self._loading[key] = self._expected(source.kind)
        if item is None and error is None:
            item, error = self._prepare(source)
        with self._change:
            self._start_worker()
            self._wait_seconds += time.perf_counter() - start
        if isinstance(error, MediaError):
            raise MediaError(source.name, error.reason)  # another source may have given the same bytes
        if error is not None:
            raise error
        return item

    def prefetch(self, sources: Sequence[MediaSource]) -> None:
        """Begin to prepare what will be asked for next, in order; a source may be named several times.

        Replaces what an earlier call named: what no thread has begun of it is forgotten, and what was prepared
        may be dropped.  Does nothing without threads or budget.
        """
        if not self._max_bytes or not self._threads:
            return
        with self._change:
            self._wanted = Counter(source.key for source in sources)
            self._errors.clear()
            self._queue.clear()
            for source in sources:
                if source.key in self._kept:
                    self._kept.move_to_end(source.key)
                elif source.key not in self._loading:
                    self._queue.setdefault(source.key, source)
            self._reserved = sum(self._kept[key].pixels.nbytes for key in self._wanted if key in self._kept)
            self._drop()
            self._start_worker()

    def metrics(self) -> dict[str, float]:
        """Since the last call: items that were decoded, and the seconds that this took, summed over threads; the
        seconds that `get` took; the most bytes kept at a time; how often `get` found its item prepared."""
        with self._change:
            values = {
                "media/decoded": float(self._decoded),
                "media/decode_seconds": self._decode_seconds,
                "media/wait_seconds": self._wait_seconds,
                "media/cache_bytes_peak": float(self._peak),
                "media/cache_hits": float(self._hits),
            }
            self._clear_metrics()
        return values

    def close(self) -> None:
        """Stop the threads after the items in their hands.  `get` works on, and `prefetch` starts new ones."""
        with self._change:
            self._queue.clear()
            workers = list(self._workers)
        deadline = time.monotonic() + _PATIENCE
        for worker in workers:
            worker.join(max(0.0, deadline - time.monotonic()))

    def _clear_metrics(self) -> None:
        self._decoded = self._hits = 0
        self._decode_seconds = self._wait_seconds = 0.0
        self._peak = self._bytes

    # What follows is called with the lock held, but for `_work` and `_prepare`.

    def _start_worker(self) -> None:
        """One, if there is work for it; it starts the next."""
        if len(self._workers) < self._threads and self._has_work():
            if not self._at_exit:
                atexit.register(_close, weakref.ref(self))
                self._at_exit = True
            worker = threading.Thread(target=self._work, name="media", daemon=True)
            worker.start()
            self._workers.add(worker)

    def _work(self) -> None:
        while (source := self._next()) is not None:
            self._prepare(source)

    def _next(self) -> MediaSource | None:
        """The next source to prepare; None, which ends the thread, where there is none or no room."""
        with self._change:
            while self._has_work():
                key, source = self._queue.popitem(last=False)
                item = self._alive.get(key)
                if item is None:
                    self._loading[key] = self._expected(source.kind)
                    self._start_worker()
                    return source
                self._keep(key, item)
            self._workers.discard(threading.current_thread())
            return None

    def _has_work(self) -> bool:
        if not self._queue:
            return False
        ahead = self._reserved + sum(self._loading.values())
        source = next(iter(self._queue.values()))
        # The first goes ahead whatever its size: one that is larger than the budget must not stop all others.
        return ahead == 0 or ahead + self._expected(source.kind) <= self._max_bytes

    def _expected(self, kind: Kind) -> int:
        """Bytes of an item that is not prepared yet.  Nothing is prepared beside the first of a kind."""
        return max(self._sizes.get(kind, ()), default=self._max_bytes)

    def _prepare(self, source: MediaSource) -> tuple[MediaItem | None, Exception | None]:
        item = error = None
        start = time.perf_counter()
        try:
            item = self._load(source)
        except MediaError as raised:
            error = MediaError(raised.name, raised.reason)  # without a traceback, which holds what was decoded
        except Exception as raised:  # a bug, raised where the item is asked for
            error = raised
        finally:
            with self._change:
                del self._loading[source.key]
                self._decode_seconds += time.perf_counter() - start
                if item is not None:
                    self._decoded += 1
                    self._sizes.setdefault(source.kind, deque(maxlen=_SIZES)).append(item.pixels.nbytes)
                    self._keep(source.key, item)
                elif error is not None and self._wanted[source.key]:
                    self._errors[source.key] = error
                self._change.notify_all()
        return item, error

    def _peek(self, key: Key) -> MediaItem | None:
        return self._kept.get(key) or self._alive.get(key)

    def _keep(self, key: Key, item: MediaItem) -> None:
        """Keep it, unless nobody waits for it and it is larger than the budget."""
        size = item.pixels.nbytes
        self._alive[key] = item
        if self._wanted[key]:
            self._reserved += size
        elif size > self._max_bytes:
            return
        self._queue.pop(key, None)
        self._kept[key] = item
        self._bytes += size
        self._drop()
        self._peak = max(self._peak, self._bytes)

    def _asked_for(self, key: Key) -> None:
        """Once; where nobody else will ask, it may be dropped."""
        if self._wanted[key]:
            self._wanted[key] -= 1
            if not self._wanted[key]:
                self._queue.pop(key, None)
                self._errors.pop(key, None)
                if key in self._kept:
                    self._reserved -= self._kept[key].pixels.nbytes

    def _touch(self, key: Key, item: MediaItem) -> None:
        """Most recently used."""
        if key not in self._kept:  # found alive
            self._keep(key, item)
            return
        self._kept.move_to_end(key)
        if not self._wanted[key] and item.pixels.nbytes > self._max_bytes:
            self._bytes -= self._kept.pop(key).pixels.nbytes
        self._drop()

    def _drop(self) -> None:
        """Back to the budget, as far as what is wanted allows."""
        while self._bytes > self._max_bytes:
            victim = next((key for key in self._kept if not self._wanted[key]), None)
            if victim is None:
                break
            self._bytes -= self._kept.pop(victim).pixels.nbytes


def _close(cache: "weakref.ref[ItemCache]") -> None:
    if (alive := cache()) is not None:
        alive.close()
