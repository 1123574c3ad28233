"""Calls of a dialogue's methods, many at a time, none of which can hang or end the rank."""

import asyncio
import contextlib
import inspect
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from megarl.environments.dialogue import Dialogue
from megarl.environments.score import reason_of

AT_A_TIME = 64
"""Calls that are waited for."""
_ALIVE_SECONDS = 1.0


class Replies:
    """A dialogue, and the event loop that its coroutines live in as long as it does: what a client keeps open between
    two calls belongs to one.

    Each call begins in a thread that ends with the process: one that does not come back in time is left to itself.
    """

    def __init__(self, dialogue: Dialogue, seconds: float, alive: Callable[[], None] = lambda: None):
        """
        Args:
            seconds: for a call.
            alive: called now and then while they are waited for.
        """
        self.dialogue = dialogue
        self._seconds, self._alive = seconds, alive
        self._runner = asyncio.Runner()

    def reset(self, calls: Sequence[tuple]) -> list[Any]:
        """What `Dialogue.reset` gives for the arguments of each call, in order, or the exception that it raises."""
        return self._runner.run(self._all([partial(self.dialogue.reset, *call) for call in calls]))

    def step(self, calls: Sequence[tuple]) -> list[Any]:
        """Likewise of `Dialogue.step`; a state that is an exception is raised again."""
        return self._runner.run(self._all([partial(self._step, *call) for call in calls]))

    def _step(self, state: Any, completion: str, finished: bool) -> Any:
        if isinstance(state, Exception):  # of `reset`
            raise state
        return self.dialogue.step(state, completion, finished)

    async def _all(self, calls: list[Callable[[], Any]]) -> list[Any]:
        room = asyncio.Semaphore(AT_A_TIME)
        watch = asyncio.create_task(self._sign())
        try:
            return list(await asyncio.gather(*(self._one(call, room) for call in calls)))
        finally:
            watch.cancel()

    async def _sign(self) -> None:
        while True:
            self._alive()
            await asyncio.sleep(_ALIVE_SECONDS)

    async def _one(self, call: Callable[[], Any], room: asyncio.Semaphore) -> Any:
        async with room:
            try:
                async with asyncio.timeout(self._seconds):
                    result = await _in_thread(call)
                    return await _kept(result) if inspect.isawaitable(result) else result
            except TimeoutError:
                return TimeoutError(f"took more than {self._seconds:g} s")
            except Exception as error:
                return error


async def _kept(result: Any) -> Any:
    """Whatever it raises ends the call, not the job."""
    try:
        return await result
    except (KeyboardInterrupt, SystemExit) as error:
        raise RuntimeError(reason_of(error)) from None
    except asyncio.CancelledError as error:
        if asyncio.current_task().cancelling():  # the time is over
            raise
        raise RuntimeError(reason_of(error)) from None


async def _in_thread(call: Callable[[], Any]) -> Any:
    loop = asyncio.get_running_loop()
    done = loop.create_future()

    def tell(give: Callable[[Any], None], value: Any) -> None:
        if not done.done():
            give(value)

    def work() -> None:
        try:
            told = partial(tell, done.set_result, call())
        except Exception as error:
            told = partial(tell, done.set_exception, error)
        except BaseException as error:
            told = partial(tell, done.set_exception, RuntimeError(reason_of(error)))
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(told)

    threading.Thread(target=work, daemon=True).start()
    return await done
