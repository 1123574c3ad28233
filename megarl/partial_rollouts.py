"""Partial rollouts: a step does not wait for its longest completions, which go on in the next.

More prompts are sampled than a step trains on.  As soon as enough of their groups are done the step has its batch; what
the others have so far is kept, and goes on under the next step's weights, so that the tokens of a rollout may be of
several weights.  Kimi Team 2025, "Kimi k1.5" (arXiv 2501.12599, section 2.6.2) with its budget of tokens, and Zhou et
al. 2025, "APRIL" (arXiv 2509.18521) with more prompts than needed.

What is sampled when is decided by how far all ranks together are: it is the same under any layout.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megarl.media.item import EncodedPrompt
from megarl.rollout.engine import Generate, Rollout


@dataclass(frozen=True)
class PartialOptions:
    prompts_per_step: int
    extra_prompts: int
    """In flight beside those that a step trains on."""
    group_size: int
    tokens_per_round: int
    """New tokens of a rollout after which all ranks look who is done; divides `max_new_tokens`."""
    max_new_tokens: int


@dataclass(frozen=True, eq=False)
class Group:
    """Rollouts of one prompt, as far as they are."""

    number: int
    """In the order in which the run's groups begin, from 0: decides its prompt and its draws."""
    rollouts: tuple[Rollout, ...]


class PartialRollouts:
    """The groups in flight of the prompts that this rank samples.

    Args:
        begin: `(numbers) -> prompts` of groups that begin.
        generate: at most `tokens_per_round` new tokens of each.
        key: `(number, member)` to what decides a rollout's draws.
        mine: whether a group's prompt is sampled here.
        done_anywhere: the numbers in the lists of all ranks, sorted.  Collective.
    """

    def __init__(
        self,
        options: PartialOptions,
        begin: Callable[[list[int]], list[EncodedPrompt]],
        generate: Generate,
        key: Callable[[int, int], int],
        mine: Callable[[int], bool],
        done_anywhere: Callable[[list[int]], list[int]],
    ):
        self._options, self._begin, self._generate = options, begin, generate
        self._key, self._mine, self._done_anywhere = key, mine, done_anywhere
        self._carried: list[Group] = []
        """At the end of the last step."""

    def begins(self, step: int) -> range:
        """Numbers of the groups that begin in a step, from 1."""
        o = self._options
        first = o.prompts_per_step * (step - 1) + (o.extra_prompts if step > 1 else 0)
        return range(first, o.prompts_per_step * step + o.extra_prompts)

    def step(self, step: int) -> dict[int, Group] | None:
        """The groups that a step trains on, of those sampled here, by their place in the batch: of the groups that are
        done the ones that began first.  None on all ranks where it was interrupted; what was carried stays as it was.
        Collective over all ranks of the job."""
        numbers = [number for number in self.begins(step) if self._mine(number)]
        fresh = [
            Group(number, (_nothing(prompt),) * self._options.group_size)
            for number, prompt in zip(numbers, self._begin(numbers), strict=True)
        ]
        groups = [*self._carried, *fresh]
        while True:
            done = self._done_anywhere([group.number for group in groups if self._done(group)])
            if len(done) >= self._options.prompts_per_step:
                break
            groups = self._round(groups, version=step - 1)
            if groups is None:
                return None
        place = {number: at for at, number in enumerate(done[: self._options.prompts_per_step])}
        self._carried = [group for group in groups if group.number not in place]
        return {place[group.number]: group for group in groups if group.number in place}

    def _round(self, groups: list[Group], version: int) -> list[Group] | None:
        open_ones = [
            (at, member)
            for at, group in enumerate(groups)
            for member, rollout in enumerate(group.rollouts)
            if not self._over(rollout)
        ]
        before = [groups[at].rollouts[member] for at, member in open_ones]
        fresh = self._generate(
            [one.prompt.followed_by(one.ids) for one in before],
            [self._key(groups[at].number, member) for at, member in open_ones],
        )
        if fresh is None:
            return None
        grown = [list(group.rollouts) for group in groups]
        for (at, member), one, (more,) in zip(open_ones, before, fresh, strict=True):
            grown[at][member] = _joined(one, more, version)
        return [Group(group.number, tuple(rollouts)) for group, rollouts in zip(groups, grown, strict=True)]

    def _over(self, rollout: Rollout) -> bool:
        return rollout.finished or rollout.ids.numel() >= self._options.max_new_tokens

    def _done(self, group: Group) -> bool:
        return all(map(self._over, group.rollouts))

    @property
    def numbers(self) -> list[int]:
        """Of the groups that the last step left in flight here."""
        return [group.number for group in self._carried]

    def state(self) -> list[tuple[int, list[dict[str, Tensor]]]]:
        """What the last step left in flight here, as plain tensors, by the groups' numbers."""
        return [
            (
                group.number,
                [
                    {
                        "ids": r.ids.int(),
                        "log_probs": r.log_probs,
                        "weight_versions": r.weight_versions,
                        "finished": torch.tensor([r.finished]),
                    }
                    for r in group.rollouts
                ],
            )
            for group in self._carried
        ]

    def resume(self, state: Mapping[int, Sequence[Mapping[str, Tensor]]], keep: bool = True) -> None:
        """Takes of all ranks' `state` what is sampled here.

        Args:
            keep: False: nothing of the groups but their numbers, since their prompts are others.
        """
        numbers = sorted(number for number in state if self._mine(number))
        self._carried = [
            Group(number, tuple(_taken(prompt, one) if keep else _nothing(prompt) for one in state[number]))
            for number, prompt in zip(numbers, self._begin(numbers), strict=True)
        ]


def flat(states: Mapping[int, list[dict[str, Tensor]]]) -> dict[str, Tensor]:
    """For a file: tensors by `number/member/name`."""
    return {
        f"{number}/{member}/{name}": tensor
        for number, rollouts in states.items()
        for member, rollout in enumerate(rollouts)
        for name, tensor in rollout.items()
    }


def unflat(tensors: Mapping[str, Tensor]) -> dict[int, list[dict[str, Tensor]]]:
    """What `flat` was made of, by number."""
    found: dict[int, dict[int, dict[str, Tensor]]] = {}
    for key, tensor in tensors.items():
        number, member, name = key.split("/")
        found.setdefault(int(number), {}).setdefault(int(member), {})[name] = tensor
    return {number: [members[member] for member in sorted(members)] for number, members in found.items()}


def _nothing(prompt: EncodedPrompt) -> Rollout:
    versions = torch.empty(0, dtype=torch.int32)
    return Rollout(prompt, torch.empty(0, dtype=torch.long), torch.empty(0), False, weight_versions=versions)


def _taken(prompt: EncodedPrompt, state: Mapping[str, Tensor]) -> Rollout:
    return replace(
        _nothing(prompt),
        ids=state["ids"].long(),
        log_probs=state["log_probs"],
        weight_versions=state["weight_versions"],
        finished=bool(state["finished"]),
    )


def _joined(before: Rollout, more: Rollout, version: int) -> Rollout:
    """One rollout, of whose tokens the later ones are of the weights of that version."""
    added = torch.full_like(more.ids, version, dtype=torch.int32)
    return Rollout(
        before.prompt,
        torch.cat([before.ids, more.ids]),
        torch.cat([before.log_probs, more.log_probs]),
        more.finished,
        weight_versions=torch.cat([before.weight_versions, added]),
    )
