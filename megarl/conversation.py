"""Conversations: where an environment replies to a completion, the rollout goes on with what the policy says then.

What was sampled and what was said to it stay one sequence, token for token; all that was sampled is trained on.
"""

import asyncio
import hashlib
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from megarl.data.prompt import Prompt
from megarl.environments.dialogue import Dialogue, Step, as_prompt
from megarl.media.item import EncodedPrompt
from megarl.parallel.agreement import any_rank
from megarl.rollout.engine import Extend, Rollout, Turn

Groups = list[list[Rollout]]


@dataclass(frozen=True)
class Limits:
    max_turns: int
    """Completions of a conversation."""
    max_tokens: int
    """Tokens of a conversation, those that its next completion may take included."""
    max_new_tokens: int
    """Of one completion."""


@dataclass(frozen=True)
class Conversations:
    """Goes on with rollouts that an environment replies to.

    Args:
        decode: `(ids) -> text`, without the stop token.
        extend: the prompt of the next turn.
        generate: `(prompts, keys) -> groups of one rollout`, or None on all ranks where it was interrupted.  Collective
            over all ranks of the job.
        decided: `(make)` to what `make()` gives on one rank of those that share these prompts.  Collective over them.
    """

    dialogue: Dialogue
    limits: Limits
    decode: Callable[[Any], str]
    extend: Extend
    generate: Callable[[list[EncodedPrompt], list[int]], Groups | None]
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
        seeds = [_seed(keys[i // group_size], i % group_size, 0) for i in range(len(rollouts))]
        states = self._begin(rollouts, seeds)
        going = list(range(len(rollouts)))
        for turn in range(1, self.limits.max_turns + 1):
            steps = self.decided(lambda going=going, turn=turn: self._steps(rollouts, states, going, turn))
            following = {}
            for i, (verdict, reply) in zip(going, steps, strict=True):
                prompt = None
                if reply is not None and turn < self.limits.max_turns and rollouts[i].finished:
                    prompt = self.extend(rollouts[i].prompt, rollouts[i].ids, reply)
                if prompt is None or prompt.ids.numel() + self.limits.max_new_tokens > self.limits.max_tokens:
                    rollouts[i] = replace(rollouts[i], verdict=verdict)
                else:
                    following[i] = prompt, reply
            going = list(following)
            if not any_rank(bool(going)):
                break
            fresh = self.generate(
                [following[i][0] for i in going], [_seed(keys[i // group_size], i % group_size, turn) for i in going]
            )
            if fresh is None:
                return None
            for i, (one,) in zip(going, fresh, strict=True):
                before = rollouts[i]
                said = Turn(before.prompt.ids.numel(), before.ids, before.log_probs, following[i][1])
                rollouts[i] = replace(one, turns=(*before.turns, said))
        return [rollouts[start : start + group_size] for start in range(0, len(rollouts), group_size)]

    def _begin(self, rollouts: list[Rollout], seeds: list[int]) -> list[Any]:
        """States stay on the rank that makes the steps; None elsewhere."""
        kept: list[Any] = [None] * len(rollouts)

        def make() -> None:
            for place, (rollout, seed) in enumerate(zip(rollouts, seeds, strict=True)):
                kept[place] = self.dialogue.reset(rollout.prompt.prompt, seed)

        self.decided(make)
        return kept

    def _steps(
        self, rollouts: list[Rollout], states: list[Any], going: list[int], turn: int
    ) -> list[tuple[Any, Prompt | None]]:
        """Verdict and reply of each conversation that goes on; the states move in place."""
        texts = [self.decode(rollouts[i].ids) for i in going]
        calls = [
            partial(self.dialogue.step, states[i], text, rollouts[i].finished)
            for i, text in zip(going, texts, strict=True)
        ]
        found = []
        for i, step in zip(going, asyncio.run(_all(calls)), strict=True):
            prompt = rollouts[i].prompt.prompt
            if not isinstance(step, Step):
                raise TypeError(f"row {prompt.row}: the environment's step gave {type(step).__name__}, not a Step")
            states[i] = step.state
            found.append((step.score, None if step.reply is None else as_prompt(step.reply, prompt, turn)))
        return found


async def _all(calls: list[Callable[[], Any]]) -> list[Any]:
    """The results, in order; those of coroutine functions wait beside each other."""

    async def one(call: Callable[[], Any]) -> Any:
        result = call()
        return await result if inspect.isawaitable(result) else result

    return list(await asyncio.gather(*map(one, calls)))


def _seed(key: int, member: int, turn: int) -> int:
    """63 bits of their own for each turn of each rollout."""
    digest = hashlib.blake2b(f"{key}/{member}/{turn}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
