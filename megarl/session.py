"""What surrounds the loop: starting or resuming, warm-up, evaluation, reports, checkpoints, the end."""

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from megarl.errors import UserError
from megarl.evaluate import evaluate
from megarl.media.item import MODALITIES, EncodedPrompt
from megarl.models.build import fill, save_checkpoint
from megarl.observe.curve import draw_curve
from megarl.observe.files import replacing
from megarl.observe.metrics import MetricsLog
from megarl.observe.mismatch import MismatchParts, labelled_metrics, mismatch_by_label
from megarl.observe.progress import NullProgress, Progress
from megarl.observe.rollouts import RolloutRow, append_rows, write_rollouts
from megarl.observe.timer import PhaseTimer
from megarl.options import partial_options, rl_optimizer, sampling_options, step_options, warmup_optimizer
from megarl.parallel.agreement import any_rank, gathered
from megarl.partial_rollouts import PartialRollouts, flat, unflat
from megarl.platform.kernels import kernels
from megarl.platform.launch import StopSignal
from megarl.platform.watchdog import Watchdog
from megarl.recipe import Recipe
from megarl.resample import resample
from megarl.rewards import Batch
from megarl.rollout.engine import Rollout
from megarl.rollout.spread import generate_spread
from megarl.run import build_run, draw_key, start_ranks
from megarl.startup import (
    architecture,
    fetch_models,
    keep_recipe,
    prepare_data,
    refuse_other_architecture,
    refuse_other_recipe,
)
from megarl.training import checkpoint, checkpoint_folder
from megarl.training.credit import Credit, Scored
from megarl.training.grpo import PolicyStep, supervised_update
from megarl.training.reduce import over_data_parallel
from megarl.training.reference import ReferencePolicy

_WARMUP, _RL = "warm-up", "rl"
_CONTINUE = "continue"
"""In the run folder: the command stopped before the run's end and the same command goes on."""
_CURVE_SECONDS = 30.0
"""Between two drawings of the curve: one takes half a second, for which all ranks wait."""


class Session:
    """One command's stretch of a run.  Its constructor resumes from the run folder's last checkpoint."""

    def __init__(self, recipe: Recipe, stop: StopSignal):
        self._signal = stop
        self._started = self._drawn = time.monotonic()
        self._main = dist.get_rank() == 0
        folder = Path(recipe.run_dir)
        ranks = start_ranks()
        if self._main:
            (folder / _CONTINUE).unlink(missing_ok=True)
            refuse_other_recipe(recipe, folder)
            prepare_data(recipe)
        ranks.broadcast(None)  # the others wait for rank 0
        self._recipe = fetch_models(recipe, ranks)
        self._checkpoints, self._reference_folder = folder / "checkpoints", folder / "reference"
        self._newest, self._said = checkpoint_folder.newest_whole(self._checkpoints)
        minutes = recipe.limits.no_progress_minutes
        self._watchdog = Watchdog(minutes and 60 * minutes)
        self.run = build_run(self._recipe, folder, ranks, self._watchdog.alive)
        self._sampling = sampling_options(recipe, self.run.stop_ids)
        self.timer = PhaseTimer(torch.cuda.synchronize if kernels().gpu else None, self._watchdog.enter)
        self.policy_step: PolicyStep | None = None
        self._reference: ReferencePolicy | None = None
        self._accuracy: float | None = None
        self._evaluated: int | None = None
        """The step of `_accuracy`."""
        self._stopped = False
        self._resampled = 0.0
        self._said_failed = False
        self._dropped: list[tuple[int, list[Rollout]]] = []
        self._progress = Progress(recipe.steps) if self._main else NullProgress()
        self._resume()
        if self._main:
            keep_recipe(recipe, folder)
        self._log = MetricsLog(folder, self._step if self._phase == _RL else -1) if self._main else None

    def __enter__(self) -> "Session":
        self._progress.__enter__()
        layout = f"{dist.get_world_size()} rank(s), tensor parallel {dist.get_world_size() // self.run.dp_size}"
        self._progress.message(f"megarl: {layout}; {kernels()}")
        rejected = [f.name for f in self.run.folder.glob("rejected_*.jsonl")]
        if rejected:
            self._progress.message(f"bad rows were dropped: see {', '.join(sorted(rejected))} in {self.run.folder}")
        for line in self._said:
            self._progress.message(line)
        if self._newest:
            self._progress.message(f"resumed after {self._phase} step {self._step}")
        self._watchdog.start()
        return self

    def __exit__(self, *exception) -> None:
        self._watchdog.stop()
        self._progress.__exit__(*exception)
        self.run.judges.close()
        if self._log:
            self._log.close()

    def _resume(self) -> None:
        newest, settings = self._newest, self._recipe.checkpoint
        state = checkpoint.read_progress(newest) if newest else {}
        if newest:
            refuse_other_architecture(state["architecture"], self._architecture)
        keep = checkpoint_folder.Retention(settings.keep_last, settings.keep_best)
        self._writer = checkpoint.CheckpointWriter(self._checkpoints, keep, newest, settings.async_save)
        self._skipped = state.get("skipped", 0)
        self._phase = state.get("phase", _WARMUP if self._recipe.warmup else _RL)
        self._step = state.get("step", 0)
        self._seconds_before = state.get("seconds", 0.0)
        if self._phase == _RL and self._step > self._recipe.steps:
            raise UserError(f"steps = {self._recipe.steps}: the run has made {self._step}; should be at least that")
        if self._phase == _WARMUP:
            quantization = self._recipe.rollout.quantization
            if quantization is not None and quantization.training:
                self.run.calibrate()
            self.run.trainer.begin(warmup_optimizer(self._recipe))
        else:
            self._begin_rl(newest, state.get("calibration"))
        if newest:
            checkpoint.load(newest, self.run.trainer)
            self.run.sync()
        same_prompts = state.get("prompts_sha256") == self.run.train_prompts.content_sha256
        if newest and self._phase == _RL and self.run.solve_rates is not None:
            self._resume_solve_rates(newest, same_prompts)
        self._partial = self._partial_rollouts(newest if self._phase == _RL else None, same_prompts)

    def _resume_solve_rates(self, newest: Path, same_prompts: bool) -> None:
        """Those of the checkpoint, unless its prompts were others, which the recipe has allowed."""
        rates, counts = self.run.solve_rates, checkpoint.read_solve_rates(newest)
        if not same_prompts:
            self._said.append("the training prompts are others than before: their solve rates begin anew")
            counts = 0 * rates.counts
        rates.restore(self._step, counts)

    def _begin_rl(self, resumed: Path | None = None, calibration: dict[str, float] | None = None) -> None:
        """A fresh optimizer, the scales of quantised rollouts, which are the checkpoint's where one is gone on from,
        and the reference policy: another checkpoint, the weights that RL began with, or those that it has moved to by
        the checkpoint that is gone on from."""
        run, algorithm = self.run, self._recipe.algorithm
        if algorithm.reference:
            teacher = Path(algorithm.reference)
            self._reference = ReferencePolicy.filled(run.policy.model, lambda: fill(run.policy, teacher))
        elif algorithm.kl_coefficient:
            if resumed and algorithm.reference_every:
                checkpoint.load_reference(resumed, run.policy.model)
            elif self._reference_folder.exists():
                checkpoint.load_weights(self._reference_folder, run.policy.model)
                run.sync()
            else:
                checkpoint.save_weights(self._reference_folder, run.policy.model)
            self._reference = ReferencePolicy(run.policy.model, changed=run.trainer.changed)
        if calibration is not None:
            run.parts.quantization.restore(calibration)
        elif run.parts.quantization is not None:
            run.calibrate()
        run.trainer.begin(rl_optimizer(self._recipe))
        options = step_options(self._recipe)
        self.policy_step = PolicyStep(run.trainer, self._reference, options, run.merge_size, run.cost)

    def warm_up(self) -> None:
        """The supervised phase, where the recipe has one and it is not over."""
        run, warmup = self.run, self._recipe.warmup
        if self._phase != _WARMUP:
            return
        for step in range(self._step + 1, warmup.steps + 1):
            sequences = run.warmup_sequences(step)
            self._watchdog.enter("warm-up", step)
            tokens_per_row = self._recipe.training.tokens_per_row
            loss = supervised_update(run.trainer, sequences, tokens_per_row, run.merge_size, run.cost)
            self._step = step
            self._progress.phase("warm-up", step, warmup.steps, loss=loss)
            if self._signal.agreed():
                return self.stop()
        run.sync()
        self._phase, self._step = _RL, 0
        self._begin_rl()

    def steps(self) -> Iterator[int]:
        """The RL steps that are left, from 1.  After each: a checkpoint where one is due or asked for."""
        if self._stopped:
            return
        if self._step == 0 and self._recipe.evaluation.at_start:
            self._log_step(0, self._evaluate(0))
        for step in range(self._step + 1, self._recipe.steps + 1):
            self._watchdog.step = step
            yield step
            self._step = step
            moves, every = self._recipe.algorithm.reference_every, self._recipe.checkpoint.every
            if moves and step % moves == 0:
                self._reference.take()
            self._writer.poll()
            if self._signal.agreed():
                return self.stop()
            if every and step % every == 0:
                self._save()

    def sample(self, step: int) -> dict[int, list[Rollout]] | None:
        """The groups of a step that this rank offers to those that train, by their places in its batch; None on all
        ranks where one was interrupted.  Collective."""
        run = self.run
        self._make_room()
        if self._partial is not None:
            found = self._partial.step(step)
            self._prefetch(step + 1)
            if found is None:
                return None
            return {place: list(group.rollouts) for place, group in found.items() if run.offers(group.number)}
        groups = self._generate(*run.step_prompts(step))
        if groups is not None:
            groups = self._resample(step, groups)
        return None if groups is None else run.offered(step, groups)

    def _make_room(self) -> None:
        """For the engine, as the recipe says."""
        if self._recipe.training.offload == "optimizer":
            self.run.trainer.offload()

    def _prefetch(self, step: int) -> None:
        """Begins to prepare the media of the prompts that begin in a step."""
        if self._partial is None:
            self.run.prefetch_step(step)
        else:
            self.run.prefetch_numbers(self._partial.begins(step))

    def _generate(self, prompts: list[EncodedPrompt], keys: list[int]) -> list[list[Rollout]] | None:
        """Rollouts of these prompts, all turns; None on all ranks where one was interrupted."""
        run = self.run

        def generate(prompts: list[EncodedPrompt], keys: list[int], size: int = 1) -> list[list[Rollout]] | None:
            return generate_spread(run.engine, prompts, self._sampling, size, keys, self._interrupted)

        groups = generate(prompts, keys, self._recipe.algorithm.group_size)
        return None if groups is None else run.conversed(groups, keys, generate, run.parts.same_prompts)

    def _interrupted(self) -> bool:
        """Asked in mid-rollout: whether this rank shall stop.  A sign of life, too."""
        self._watchdog.alive()
        return self._signal.asked()

    def _resample(self, step: int, groups: list[list[Rollout]]) -> list[list[Rollout]] | None:
        """The groups, with those that teach nothing replaced as far as the recipe lets them be; None on all ranks where
        one was interrupted."""
        run, rounds = self.run, self._recipe.algorithm.resample_rounds

        def draw(number: int, positions: list[int]) -> list[list[Rollout]] | None:
            return self._generate(*run.other_prompts(step, number, positions))

        groups, self._resampled, self._dropped = resample(groups, rounds, run.constant, draw)
        return groups

    def record(self, step: int, batch: Batch) -> None:
        """What the step's completions, also those of groups that were replaced, say about their prompts."""
        self.run.record(step, batch, self._dropped)

    def _partial_rollouts(self, newest: Path | None, same_prompts: bool) -> PartialRollouts | None:
        """With what the checkpoint that is gone on from left in flight; None where each step samples to the end."""
        options, run = partial_options(self._recipe), self.run
        if options is None:
            return None
        sampling = replace(self._sampling, max_new_tokens=options.tokens_per_round)
        ranks = parallel_state.get_data_parallel_group()

        def generate(prompts: list[EncodedPrompt], keys: list[int]) -> list[list[Rollout]] | None:
            return generate_spread(run.engine, prompts, sampling, 1, keys, self._interrupted)

        def key(number: int, member: int) -> int:
            return draw_key(self._recipe.seed, f"rollout {member}", 0, number)

        def done_anywhere(numbers: list[int]) -> list[int]:
            return sorted(set().union(*gathered(numbers, ranks)))

        partial = PartialRollouts(options, run.numbered_prompts, generate, key, run.samples_here, done_anywhere)
        if newest:
            left = unflat(checkpoint.read_rollouts(newest))
            if left and not same_prompts:
                self._said.append("the training prompts are others than before: rollouts in flight begin anew")
            partial.resume(left, keep=same_prompts)
        return partial

    def report(self, step: int, batch: Batch, scored: Scored, credit: Credit, learned: dict[str, float]) -> None:
        """Writes what the step did: metrics, rollouts, and the evaluation where one is due.

        Raises:
            UserError: too many steps in a row had updates that were skipped.
        """
        phases, rewards = self.timer.pop(), batch.metrics()
        labels = [sample.sequence.prompt.modality for sample in batch.samples]
        # Of the weights that score: what older ones sampled is off by what was learned since.
        engine, trainer = (
            [values[rollout.of_version(step - 1)] for values, rollout in zip(part, batch.rollouts, strict=True)]
            for part in ([sample.rollout_log_probs for sample in batch.samples], scored.trainer)
        )
        parts = mismatch_by_label(engine, trainer, labels, MODALITIES)
        parts = MismatchParts(over_data_parallel(parts.sums), over_data_parallel(parts.maximum, dist.ReduceOp.MAX))
        trained = sum(len(s.sequence) for s in batch.samples) * self._recipe.algorithm.epochs
        trained = float(over_data_parallel(torch.tensor([float(trained)])))
        values = {
            **rewards,
            **learned,
            **labelled_metrics(parts, MODALITIES),
            **scored.metrics,
            **phases,
            "throughput/generated_tokens_per_s": rewards["rollout/tokens"] / phases["time/rollout"],
            "throughput/trained_tokens_per_s": trained / phases["time/train"],
            "media/encoded": self.run.engine.features.encoded,
            "media/asked": self.run.engine.asked,
            "media/feature_bytes_peak": self.run.engine.features.peak_bytes,
            **self.run.encoder.metrics(),
            "rollout/imbalance": self.run.imbalance,
            "sync/bytes": self.run.sync.bytes,
            "memory/offloaded_bytes": self.run.trainer.offloaded_bytes,
            "rollout/resampled": self._resampled,
            **self._partial_metrics(step, batch),
            **(self.run.solve_rates.metrics() if self.run.solve_rates else {}),
        }
        self._failed(step)
        self._save_rollouts(step, batch, scored, credit)
        self._progress.step(step, values)
        every = self._recipe.evaluation.every
        if step == self._recipe.steps or (every and step % every == 0):
            values |= self._evaluate(step)
            self._prefetch(step + 1)  # the evaluation has asked for other media since
        self._log_step(step, values)
        self._skipped = self._skipped + 1 if learned["optimizer/skipped_updates"] else 0
        if self._skipped > self._recipe.limits.max_skipped_steps:
            self._end_not_finite(step, batch, scored, credit)

    def _partial_metrics(self, step: int, batch: Batch) -> dict[str, float]:
        """Over all ranks: how many steps old the weights of the sampled tokens are, and the groups left in flight."""
        if self._partial is None:
            return {}
        ages = torch.cat([step - 1 - rollout.weight_versions for rollout in batch.rollouts]).double()
        open_ones = sum(map(self.run.offers, self._partial.numbers))
        total = over_data_parallel(torch.tensor([ages.sum(), ages.numel(), open_ones], dtype=torch.float64)).tolist()
        return {"rollout/weight_age": total[0] / total[1], "rollout/carried_groups": total[2]}

    def _end_not_finite(self, step: int, batch: Batch, scored: Scored, credit: Credit) -> None:
        folder = self.run.folder / "not_finite"
        rows = self._rollout_rows(batch, scored, credit)
        write_rollouts(folder / f"step_{step}.rank_{dist.get_rank()}.jsonl", rows)
        self._writer.wait()
        dist.barrier()  # every rank has written: the first that fails ends the others
        raise UserError(
            f"step {step}: loss or gradients were not finite in {self._skipped} steps in a row and limits."
            f"max_skipped_steps = {self._recipe.limits.max_skipped_steps}: the step's rollouts are in {folder}"
        )

    def finish(self) -> None:
        """The exported checkpoint, the curve and the last line; nothing after a stop."""
        if self._stopped:
            return
        if self._accuracy is None:
            self._evaluate(self._step)
        if self._step:
            self._save()
        self._writer.wait()
        self._watchdog.enter("export")
        save_checkpoint(self.run.policy, self.run.folder / "checkpoint", self.run.processor)
        if self._main:
            draw_curve(self.run.folder)
        seconds = self._seconds()
        self._progress.finish(self._accuracy, self.run.chance, self._step, seconds, self.run.folder)

    def _evaluate(self, step: int) -> dict[str, float]:
        with self.timer("evaluate"):
            self._make_room()
            found = evaluate(self.run, self._watchdog.alive)
        self._accuracy, self._evaluated = found.accuracy, step
        failed = self._failed(step)
        by_source = {source: values["accuracy"] for source, values in found.by_source.items()}
        of_several = {name: value for name, value in found.overall.items() if name != "accuracy"}
        self._progress.evaluation(step, found.accuracy, self.run.chance, by_source, of_several)
        chance = self.run.chance
        return {**found.metrics(), "eval/chance": chance, "eval/failed": failed, **self.timer.pop()}

    def _failed(self, step: int) -> int:
        """Completions that could not be judged since the last call, on all ranks.  Writes them down, and says so the
        first time."""
        count, failures = self.run.scorer.take_failures()
        if not any_rank(count > 0):
            return 0
        everyone = gathered((count, failures))
        failures = [failure for _, theirs in everyone for failure in theirs]
        if self._main:
            path = self.run.folder / "reward_failures.jsonl"
            append_rows(path, ({"step": step, **vars(failure)} for failure in failures))
            if not self._said_failed:
                first = failures[0]
                where = f"row {first.row} ({first.source})"
                self._progress.message(f"step {step}: a reward failed, of {where}: {first.reason}; see {path}")
        self._said_failed = True
        return sum(count for count, _ in everyone)

    def _log_step(self, step: int, values: dict[str, float]) -> None:
        if self._log:
            self._log.write(step, values)
            if "eval/accuracy" in values and time.monotonic() > self._drawn + _CURVE_SECONDS:
                draw_curve(self.run.folder)
                self._drawn = time.monotonic()

    def _save_rollouts(self, step: int, batch: Batch, scored: Scored, credit: Credit) -> None:
        every, most = self._recipe.observe.save_rollouts_every, self._recipe.observe.max_saved_rollouts
        if not self._main or not every or step % every or not most:
            return
        rows = self._rollout_rows(batch, scored, credit, most)
        write_rollouts(self.run.folder / "rollouts" / f"step_{step}.jsonl", rows)

    def _rollout_rows(self, batch: Batch, scored: Scored, credit: Credit, most: int | None = None) -> list[RolloutRow]:
        tokenizer = self.run.processor.tokenizer
        return [
            RolloutRow(
                prompt_index=rollout.prompt.prompt.index,
                source=rollout.prompt.prompt.source,
                prompt=tokenizer.decode(rollout.prompt.ids.tolist()),
                turns=1 + len(rollout.turns),
                media=tuple(source.name for source in rollout.prompt.prompt.media),
                answer=rollout.prompt.prompt.answer,
                completion=text,
                reward=reward,
                advantage=advantage,
                finished="stop" if rollout.finished else "length",
                ids=rollout.sequence.targets.tolist(),
                engine_logprobs=rollout.sampled_log_probs.tolist(),
                trainer_logprobs=trainer.tolist(),
            )
            for rollout, text, reward, advantage, trainer in list(
                zip(
                    batch.rollouts,
                    batch.texts,
                    batch.rewards.tolist(),
                    credit.advantages.tolist(),
                    scored.trainer,
                    strict=True,
                )
            )[:most]
        ]

    def _seconds(self) -> float:
        return self._seconds_before + time.monotonic() - self._started

    def _save(self) -> None:
        progress = {
            "phase": self._phase,
            "step": self._step,
            "seconds": self._seconds(),
            "skipped": self._skipped,
            "architecture": self._architecture,
        }
        if self._phase == _RL and self.run.parts.quantization is not None:
            progress["calibration"] = self.run.parts.quantization.calibration
        rates = self.run.solve_rates
        if rates is not None or self._partial is not None:
            progress["prompts_sha256"] = self.run.train_prompts.content_sha256
        score = self._accuracy if self._phase == _RL and self._evaluated == self._step else None
        moving = self._reference if self._recipe.algorithm.reference_every else None
        name = checkpoint_folder.name_of(self._phase, self._step)
        self._watchdog.enter("save")
        rollouts = None
        if self._partial is not None:
            ranks = parallel_state.get_data_parallel_group()
            rollouts = flat({number: one for part in gathered(self._partial.state(), ranks) for number, one in part})
        self._writer.save(name, self.run.trainer, progress, score, moving, rollouts, rates and rates.counts)

    @property
    def _architecture(self) -> dict:
        return architecture(self.run.policy.bridge.hf_pretrained.config)

    def stop(self) -> None:
        """Saves the state after the last step that was made, and leaves a word that the run is to go on."""
        self._save()
        self._writer.wait()
        self._stopped = True
        if self._main:
            with replacing(self.run.folder / _CONTINUE) as file:
                file.write(f"stopped after {self._phase} step {self._step}\n".encode())
        self._progress.message(f"stopped after {self._phase} step {self._step}: the same command continues from there")
