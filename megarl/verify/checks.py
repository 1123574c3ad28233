"""The five checks, in the order in which they build on each other."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from megarl.parallel.agreement import from_first, gathered
from megarl.platform.kernels import kernels
from megarl.recipe import save_recipe
from megarl.verify.cases import Case
from megarl.verify.compare import CHECKS, Bounds, Check, gradient_check, log_prob_distance, norm
from megarl.verify.job import Job
from megarl.verify.one_rank_peer import RECIPE
from megarl.verify.peers import CASES, Answers, Asked, Peer

VISIBLE = 10
"""A step counts where it moved the log-probabilities this many times as far as engine and trainer may be apart: else
the engine could keep what it computed from the old weights and nobody would see it."""
_RATES = 6
"""Learning rates that are tried, each ten times the one before, from the recipe's: one update of a pretrained model
in bfloat16 changes hardly a weight."""

type _Scores = Sequence[Mapping[int, Tensor]]
"""Log-probabilities by case, of each rank."""


class Verification:
    """Runs the chosen checks.  All ranks go through all of it; rank 0 has the results.

    Args:
        job: what is verified.
        folder: seen by all ranks; the reference processes are asked and answer there.
        only: names of `CHECKS`.
        say: called with what is being done.
    """

    def __init__(self, job: Job, folder: Path, only: Sequence[str], say: Callable[[str], None]):
        self._job, self._folder, self._only, self._say = job, folder, only, say
        self._main = dist.get_rank() == 0
        self._alone = dist.get_world_size() == 1
        self._peers: dict[str, Peer] = {}

    def run(self) -> list[Check]:
        """The lines of the table, the same on all ranks."""
        try:
            checks = self._checks()
        finally:
            for peer in self._peers.values():
                peer.end()
        return from_first(lambda: checks)

    def _checks(self) -> list[Check]:
        job, only, training = self._job, self._only, self._job.training
        self._say("sampling")
        cases = job.sample(0)
        peers = self._ask(cases)
        self._say("scoring and differentiating")
        rows = training.rows(job.share(cases))
        scores = gathered(training.score(rows))
        differentiated = {"transformers", "layout", "packing"} & {*only}
        found = Found(cases, scores, *(training.gradients(cases, rows) if differentiated else ({}, math.nan)))
        unpacked = self._unpacked(cases) if "packing" in only else None
        several = any(gathered(any(len(row.members) > 1 for row in rows)))
        checks, bounds = {}, None
        if self._main:
            answers = self._answers(peers)
            exact, bounds = self._bounds(cases, answers)
            own = self._own(bounds)
            if "engine" in only:
                checks["engine"] = _by_modality(CHECKS["engine"], cases, scores, _sampled(cases), own)
            if "transformers" in only:
                checks["transformers"] = found.against("transformers", answers["transformers"]["float32"], exact)
            if "layout" in only:
                checks["layout"] = (
                    [Check(CHECKS["layout"], "everything", note="one rank already")]
                    if self._alone
                    else found.against("layout", *answers["one_rank"].values(), own)
                )
            if "packing" in only:
                checks["packing"] = (
                    found.against("packing", unpacked, own)
                    if several
                    else [Check(CHECKS["packing"], "everything", note="each of these sequences fills a row of its own")]
                )
        if "sync" in only:
            checks["sync"] = self._sync(cases, rows, scores, from_first(lambda: bounds))
        return [check for name in CHECKS for check in checks.get(name, [])]

    def _unpacked(self, cases: list[Case]) -> Answers:
        """One sequence a row."""
        training = self._job.training
        rows = training.rows(self._job.share(cases), packed=False)
        scores = {place: values for part in gathered(training.score(rows)) for place, values in part.items()}
        return Answers([scores[place] for place in range(len(cases))], *training.gradients(cases, rows))

    def _bounds(self, cases: list[Case], answers: dict[str, dict[str, Answers]]) -> tuple[Bounds, Bounds]:
        """Against transformers in float32, and between two computations of the job's type."""
        modalities = list(dict.fromkeys(case.modality for case in cases))
        if self._job.dtype is torch.float32:
            bounds = Bounds.float32(modalities)
            return bounds, bounds
        half, exact = answers["transformers"]["bfloat16"], answers["transformers"]["float32"]

        def by_modality(log_probs: list[Tensor]) -> dict[str, Tensor]:
            return {
                modality: torch.cat([x for case, x in zip(cases, log_probs, strict=True) if case.modality == modality])
                for modality in modalities
            }

        bounds = Bounds.bfloat16(
            by_modality(half.log_probs), by_modality(exact.log_probs), half.gradients, exact.gradients
        )
        return bounds, bounds.between_two()

    def _ask(self, cases: list[Case]) -> list[str]:
        """Which reference processes are asked; on a CPU they start now, beside the job's own work."""
        names = []
        if "transformers" in self._only or self._job.dtype is torch.bfloat16:
            names.append("transformers")
        if "layout" in self._only and not self._alone:
            names.append("one_rank")
        if self._main and names:
            training, recipe = self._job.training, self._job.recipe
            question = Asked(
                cases,
                self._job.checkpoint,
                self._job.dtype,
                recipe.rollout.scoring_temperature,
                training.objective,
                tuple(recipe.model.frozen),
            )
            torch.save(question, self._folder / CASES)
            save_recipe(recipe, self._folder / RECIPE)
            if not kernels().gpu:
                self._peers = {name: Peer(name, self._folder) for name in names}
        return names

    def _answers(self, names: Iterable[str]) -> dict[str, dict[str, Answers]]:
        answers = {}
        for name in names:
            self._say(f"waiting for {name.replace('_', ' ')}")
            if name not in self._peers:  # on a GPU, whose memory holds one of them at a time
                self._peers[name] = Peer(name, self._folder)
            answers[name] = self._peers[name].answers()
        return answers

    def _sync(self, cases: list[Case], rows: list, scores: _Scores, bounds: Bounds) -> list[Check]:
        """A step, the hook, and the engine again."""
        job, title = self._job, CHECKS["sync"]
        statistic = next(key for values in bounds.log_probs.values() for key in values)
        bound = max(values[statistic] for values in bounds.log_probs.values())
        rate = job.recipe.optimizer.learning_rate
        before = [scores[dist.get_rank()][place] for row in rows for place in row.members]
        for attempt in range(_RATES):
            self._say(f"an optimizer step at learning rate {rate:.1e}")
            job.begin(rate)
            job.training.step(cases, rows)
            after = job.training.score(rows)
            after = [after[place] for row in rows for place in row.members]
            moved = log_prob_distance(torch.cat(after), torch.cat(before))[statistic]
            moved = from_first(lambda moved=moved: moved)
            if moved >= VISIBLE * bound or attempt == _RATES - 1:
                break
            rate *= 10
        job.sync()
        self._say("sampling again")
        fresh = job.sample(1)
        answers = gathered(job.training.score(job.training.rows(job.share(fresh))))
        step = Check(
            title,
            "the step moved log-probabilities",
            {statistic: moved},
            at_least={statistic: VISIBLE * bound},
            note=f"learning rate {rate:.1e}",
        )
        found = _by_modality(title, fresh, answers, _sampled(fresh), self._own(bounds))
        return [step, *found]

    def _own(self, bounds: Bounds) -> Bounds:
        """Between two computations of the job: log-probabilities are equal where all give a token the same bits."""
        if not self._job.recipe.deterministic:
            return bounds
        return replace(bounds, log_probs={modality: {"max": 0.0} for modality in bounds.log_probs})


@dataclass(frozen=True, eq=False)
class Found:
    """What the job says about the cases, packed as in a run."""

    cases: Sequence[Case]
    scores: _Scores
    gradients: Mapping[str, Tensor]
    """By Hugging Face name; on rank 0."""
    loss: float
    """Per token."""

    def against(self, name: str, expected: Answers, bounds: Bounds) -> list[Check]:
        """Log-probabilities, loss, gradient norm and gradients."""
        title, theirs = CHECKS[name], norm(expected.gradients)
        ours = norm({weight: self.gradients[weight] for weight in expected.gradients.keys() & self.gradients.keys()})
        return [
            *_by_modality(title, self.cases, self.scores, expected.log_probs, bounds),
            Check(
                title,
                "loss and gradient norm",
                {"loss": abs(self.loss - expected.loss), "norm": abs(ours - theirs) / max(theirs, 1e-30)},
                {"loss": bounds.loss, "norm": bounds.gradient},
                note=f"loss {expected.loss:.6f}, norm {theirs:.6f}",
            ),
            gradient_check(title, self.gradients, expected.gradients, bounds),
        ]


def _by_modality(
    title: str,
    cases: Sequence[Case],
    scores: _Scores,
    expected: Sequence[Tensor],
    bounds: Bounds,
) -> list[Check]:
    """One line for each modality, over the answers of all ranks."""
    checks = []
    for modality in dict.fromkeys(case.modality for case in cases):
        pairs = [
            (values, expected[place])
            for part in scores
            for place, values in part.items()
            if cases[place].modality == modality
        ]
        measured = log_prob_distance(torch.cat([a for a, _ in pairs]), torch.cat([b for _, b in pairs]))
        tokens = sum(case.completion.numel() for case in cases if case.modality == modality)
        checks.append(
            Check(title, f"log-probabilities, {modality}, {tokens} tokens", measured, bounds.log_probs[modality])
        )
    return checks


def _sampled(cases: Sequence[Case]) -> list[Tensor]:
    """The engine's log-probabilities."""
    return [case.sampled for case in cases]
