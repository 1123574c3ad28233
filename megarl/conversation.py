"""Conversations: where an environment replies to a completion, the rollout goes on with what the policy says then.

What was sampled and what was said to it stay one sequence, token for token; all that was sampled is trained on.
"""

import asyncio
import contextlib
import hashlib
import inspect
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from megarl.data.prompt import Prompt
from megarl.environments.dialogue import Dialogue, Step, as_prompt
from megarl.environments.score import reason_of
from megarl.errors import MediaError, PromptError
from megarl.media.item import EncodedPrompt
from megarl.parallel.agreement import any_rank
from megarl.rollout.engine import Extend, Rollout, Turn

Groups = list[list[Rollout]]
Generate = Callable[[list[EncodedPrompt], list[int]], Groups | None]

_AT_A_TIME = 64
"""Replies that are waited for."""


@dataclass(frozen=True)
class Limits:
    max_turns: int
    """Completions of a conversation."""
    max_tokens: int
    """Tokens of a conversation, those that its next completion may take included."""
    max_new_tokens: int
    """Of one completion."""
    seconds: float
    """Of a reply."""


@dataclass(frozen=True)
class Conversations:
    """Goes on with rollouts that an environment replies to.

    Args:
        decode: `(ids) -> text`, without the stop token.
        extend: the prompt of the next turn.
        generate: `(prompts, keys) -> groups of one rollout`, or None on all ranks where it was interrupted.  Collective
            over all ranks of the job.
        failed: `(reason)` to the verdict on a conversation in which the dialogue has failed.
        decided: `(make)` to what `make()` gives on one rank of those that share these prompts.  Collective over them.
    """

    dialogue: Dialogue
    limits: Limits
    decode: Callable[[Any], str]
    extend: Extend
    generate: Generate
    failed: Callable[[str], Any]
    decided: Callable[[Callable[[], Any]], Any]

    def __call__(self, groups: Groups, keys: Sequence[int]) -> Groups | None:
        """The groups with each conversation at its end, or None where the generation was interrupted.  Collective over
        all ranks of the job: they go on together, also those whose conversations are over.

        Args:
            groups: of first completions; the same on all ranks that share their prompts.
            keys: one of each group, which decides its draws.
        """
        group_size = len(groups[0]) if groups else 1
        rollouts = [rollout for group in groups for rollout in group]

        def seeds(turn: int) -> list[int]:
            return [_seed(keys[i // group_size], i % group_size, turn) for i in range(len(rollouts))]

        states = self._begin(rollouts, seeds(0))
        going = list(range(len(rollouts)))
        for turn in range(1, self.limits.max_turns + 1):
            made = self.decided(lambda going=going, turn=turn: self._steps(rollouts, states, going, turn))
            following = {}
            for i, (verdict, reply) in zip(going, made, strict=True):
                verdict, prompt = self._following(rollouts[i], verdict, reply if turn < self.limits.max_turns else None)
                if prompt is None:
                    rollouts[i] = replace(rollouts[i], verdict=verdict)
                else:
                    following[i] = prompt, reply
            going = list(following)
            if not any_rank(bool(going)):
                break
            draws = seeds(turn)
            fresh = self.generate([following[i][0] for i in going], [draws[i] for i in going])
            if fresh is None:
                return None
            for i, (one,) in zip(going, fresh, strict=True):
                before = rollouts[i]
                said = Turn(before.prompt.ids.numel(), before.ids, before.log_probs, following[i][1])
                rollouts[i] = replace(one, turns=(*before.turns, said))
        return [rollouts[start : start + group_size] for start in range(0, len(rollouts), group_size)]

    def _following(self, rollout: Rollout, verdict: Any, reply: Prompt | None) -> tuple[Any, EncodedPrompt | None]:
        """The verdict, and the prompt of the next turn where there is one."""
        if reply is None or not rollout.finished:
            return verdict, None
        try:
            prompt = self.extend(rollout.prompt, rollout.ids, reply)
        except (MediaError, PromptError) as error:
            return self.failed(reason_of(error)), None
        fits = prompt.ids.numel() + self.limits.max_new_tokens <= self.limits.max_tokens
        return verdict, prompt if fits else None

    def _begin(self, rollouts: list[Rollout], seeds: list[int]) -> list[Any]:
        """States stay on the rank that makes the steps; None elsewhere.  What a `reset` raises is its state."""
        kept: list[Any] = [None] * len(rollouts)

        def make() -> None:
            calls = [
                partial(self.dialogue.reset, rollout.prompt.prompt, seed)
                for rollout, seed in zip(rollouts, seeds, strict=True)
            ]
            kept[:] = asyncio.run(_all(calls, self.limits.seconds))

        self.decided(make)
        return kept

    def _steps(
        self, rollouts: list[Rollout], states: list[Any], going: list[int], turn: int
    ) -> list[tuple[Any, Prompt | None]]:
        """Verdict and reply of each conversation that goes on; the states move in place."""
        calls = [partial(self._step, states[i], self.decode(rollouts[i].ids), rollouts[i].finished) for i in going]
        found = []
        for i, step in zip(going, asyncio.run(_all(calls, self.limits.seconds)), strict=True):
            try:
                if isinstance(step, Exception):
                    raise step
                if not isinstance(step, Step):
                    raise TypeError(f"step gave {type(step).__name__}, not a Step")
                reply = None if step.reply is None else as_prompt(step.reply, rollouts[i].prompt.prompt, turn)
            except Exception as error:
                found.append((self.failed(reason_of(error)), None))
            else:
                states[i] = step.state
                found.append((step.score, reply))
        return found

    def _step(self, state: Any, text: str, finished: bool) -> Any:
        if isinstance(state, Exception):  # of `reset`
            raise state
        return self.dialogue.step(state, text, finished)


async def _all(calls: list[Callable[[], Any]], seconds: float) -> list[Any]:
    """What each gives, in order, or the exception that it raises; they wait beside each other.

    Each is made in a thread that ends with the process: one that does not come back in time is left to itself.
    """
    room = asyncio.Semaphore(_AT_A_TIME)

    async def one(call: Callable[[], Any]) -> Any:
        async with room:
            try:
                async with asyncio.timeout(seconds):
                    result = await _in_thread(call)
                    return await result if inspect.isawaitable(result) else result
            except TimeoutError:
                return TimeoutError(f"took more than {seconds:g} s")
            except Exception as error:
                return error

    return list(await asyncio.gather(*map(one, calls)))


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
        except BaseException as error:  # it ends the call, not the job
            told = partial(tell, done.set_exception, RuntimeError(reason_of(error)))
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(told)

    threading.Thread(target=work, daemon=True).start()
    return await done


def _seed(key: int, member: int, turn: int) -> int:
    """63 bits of their own for each turn of each rollout."""
    digest = hashlib.blake2b(f"{key}/{member}/{turn}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
