"""Conversations: where an environment replies to a completion, the rollout goes on with what the policy says then.

What was sampled and what was said to it stay one sequence, token for token; all that was sampled is trained on.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from megarl.data.prompt import Prompt
from megarl.environments.dialogue import Step, as_prompt
from megarl.environments.replies import Replies
from megarl.environments.score import Score, checked, failed, reason_of, shown
from megarl.errors import MediaError, PromptError
from megarl.media.item import EncodedPrompt
from megarl.parallel.agreement import any_rank
from megarl.rollout.engine import Extend, Generate, Rollout, Turn
from megarl.rollout.sampling import named_key

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
        generate: the next turns.
        components: of each verdict.
        decided: `(make)` to what `make()` gives on one rank of those that share these prompts.  Collective over them.
    """

    replies: Replies
    limits: Limits
    decode: Callable[[Any], str]
    extend: Extend
    generate: Generate
    components: int
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
            return [named_key(keys[i // group_size], i % group_size, turn) for i in range(len(rollouts))]

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

    def _following(
        self, rollout: Rollout, verdict: Score | None, reply: Prompt | None
    ) -> tuple[Score | None, EncodedPrompt | None]:
        """The verdict, and the prompt of the next turn where there is one."""
        if reply is None or not rollout.finished:
            return verdict, None
        try:
            prompt = self.extend(rollout.prompt, rollout.ids, reply)
        except (MediaError, PromptError) as error:
            return failed(self.components, reason_of(error)), None
        fits = prompt.ids.numel() + self.limits.max_new_tokens <= self.limits.max_tokens
        return verdict, prompt if fits else None

    def _begin(self, rollouts: list[Rollout], seeds: list[int]) -> list[Any]:
        """States stay on the rank that makes the steps; None elsewhere.  What a `reset` raises is its state."""
        kept: list[Any] = [None] * len(rollouts)

        def make() -> None:
            kept[:] = self.replies.reset(
                [(rollout.prompt.prompt, seed) for rollout, seed in zip(rollouts, seeds, strict=True)]
            )

        self.decided(make)
        return kept

    def _steps(
        self, rollouts: list[Rollout], states: list[Any], going: list[int], turn: int
    ) -> list[tuple[Score | None, Prompt | None]]:
        """Verdict and reply of each conversation that goes on; the states move in place."""
        calls = [(states[i], self.decode(rollouts[i].ids), rollouts[i].finished) for i in going]
        found = []
        for i, step in zip(going, self.replies.step(calls), strict=True):
            try:
                if isinstance(step, Exception):
                    raise step
                if not isinstance(step, Step) or not isinstance(step.score, Score | None):
                    raise TypeError(f"step gave {shown(step)}, not a Step whose score is a Score or None")
                verdict = step.score and checked(step.score, self.components)
                reply = None if step.reply is None else as_prompt(step.reply, rollouts[i].prompt.prompt, turn)
            except Exception as error:
                found.append((failed(self.components, reason_of(error)), None))
            else:
                states[i] = step.state
                found.append((verdict, reply))
        return found
