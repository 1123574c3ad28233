import pytest

from megarl.observe.timer import PhaseTimer


@pytest.fixture
def clock(monkeypatch):
    """A clock that stands still until it is moved."""

    class Clock:
        now = 100.0

        def __call__(self) -> float:
            return self.now

    clock = Clock()
    monkeypatch.setattr("megarl.observe.timer.perf_counter", clock)
    return clock


def test_phases_add_up_within_a_step(clock):
    timer = PhaseTimer()
    for seconds in (2.0, 3.0):
        with timer("train"):
            clock.now += seconds
    with timer("rollout"):
        clock.now += 0.5
    clock.now += 10  # outside
    assert timer.pop() == {"time/train": 5.0, "time/rollout": 0.5}


def test_pop_starts_the_next_step(clock):
    timer = PhaseTimer()
    with timer("train"):
        clock.now += 1
    timer.pop()
    assert timer.pop() == {}


def test_nested_phases_are_each_charged(clock):
    timer = PhaseTimer()
    with timer("rollout"):
        clock.now += 1
        with timer("sync"):
            clock.now += 2
    assert timer.pop() == {"time/rollout": 3.0, "time/sync": 2.0}


def test_an_exception_passes_and_its_time_counts(clock):
    timer = PhaseTimer()
    with pytest.raises(RuntimeError, match="engine"), timer("rollout"):
        clock.now += 4
        raise RuntimeError("engine")
    with timer("rollout"):
        clock.now += 1
    assert timer.pop() == {"time/rollout": 5.0}


def test_queued_work_is_waited_for_and_charged(clock):
    def synchronize():
        clock.now += queued.pop() if queued else 0

    queued = [7.0]  # of whatever came before the phase
    timer = PhaseTimer(synchronize)
    with timer("train"):
        queued.append(3.0)
    assert timer.pop() == {"time/train": 3.0}


def test_a_failing_block_does_not_wait_for_the_device():
    calls = []
    timer = PhaseTimer(lambda: calls.append("synchronize"))
    with pytest.raises(RuntimeError), timer("train"):
        raise RuntimeError
    assert calls == ["synchronize"]


def test_an_error_that_synchronizing_reveals_passes(clock):
    def synchronize():
        if clock.now > 100:
            raise RuntimeError("illegal memory access")

    timer = PhaseTimer(synchronize)
    with pytest.raises(RuntimeError, match="illegal memory access"), timer("train"):
        clock.now += 1
    assert timer.pop() == {"time/train": 1.0}
