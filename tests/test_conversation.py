"""Conversations of the engine with an environment: what is sampled when, what is trained on, under any layout."""

import asyncio
import time
from dataclasses import dataclass

import pytest
import torch
from PIL import Image

from megarl.environments.dialogue import Media, Reply, Step
from megarl.environments.replies import Replies
from megarl.environments.score import Score
from megarl.media.encoder import Encoder
from megarl.models.families import FAMILIES
from megarl.models.hf_config import hf_config
from tests import tiny
from tests.distributed import TP1, TP2, Layout, lazy

conversation = lazy("megarl.conversation")
engines = lazy("megarl.rollout.engine")
agreement = lazy("megarl.parallel.agreement")
parallel_groups = lazy("megarl.parallel.engines")
parallel_state = lazy("megatron.core.parallel_state")
spreading = lazy("megarl.rollout.spread")
policies = lazy("tests.policies")

NEW, GROUP, TURNS = 6, 2, 3
NAMES = ["text", "image", "images", "video"]
LAYOUT_CASES = [TP1, TP2, Layout(2, 1, context_parallel=2), Layout(2, 1), Layout(2, 1, expert_parallel=2)]


@dataclass(frozen=True)
class Talk:
    """Replies to the first completions, to as many as the row's number says, with a text and a picture of its own."""

    most: int = 9

    def reset(self, prompt, seed):
        return {"row": prompt.row, "seed": seed, "said": 0}

    async def step(self, state, completion, finished):
        state = {**state, "said": state["said"] + 1}
        if state["said"] >= min(self.most, state["row"]):
            return Step(state, score=Score((float(state["said"]),), True, finished))
        picture = Image.new("RGB", (24, 16), (state["seed"] % 256, state["said"], state["row"]))
        return Step(state, Reply((f"{state['said']}: {len(completion)}", picture, "and?")))


def _talk(checkpoint, prompts, max_tokens, dialogue, layout):
    """Plain values of each rollout, in the order of the prompts, with the trainer's log-probabilities."""
    config = hf_config(str(checkpoint), None)
    family = FAMILIES[config.model_type]
    processor = tiny.load_processor(checkpoint, family)
    encoder = Encoder(processor, family.load("positions")(config), tiny.LONGEST)
    policy = policies.policy(checkpoint, sequence_parallel=layout.sequence_parallel)
    trainer, engine = policies.trainer(policy.model), policies.engine(policy.model, enable_prefix_caching=True)
    sampling = policies.sampling(NEW, stop_ids=tuple(range(64)))
    share = parallel_groups.shared_groups().same_prompts
    rounds = []

    def generate(prompts, keys, size=1):
        rounds.append(len(prompts))
        return spreading.generate_spread(engine, prompts, sampling, size, keys, lambda: False)

    talk = conversation.Conversations(
        Replies(dialogue, 1.0),
        conversation.Limits(TURNS, max_tokens, NEW),
        lambda ids: processor.tokenizer.decode(ids[:-1].tolist()),
        encoder.extend,
        generate,
        1,
        lambda make: agreement.from_first(make, share),
    )
    rank, ranks = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()
    places = list(range(rank, len(prompts), ranks))
    mine = [prompts[place] for place in places]
    groups = talk(generate(mine, places, GROUP), places)
    rollouts = [rollout for group in groups for rollout in group]
    scores = policies.score(trainer, [rollout.sequence for rollout in rollouts], tokens_per_row=512)
    restored = [
        engines.Rollout.restored(prompt, rollout.sampled(), encoder.extend)
        for prompt, group in zip(mine, groups, strict=True)
        for rollout in group
    ]
    plain = [
        {
            "prompt": one.prompt,
            "turns": [(turn.start, turn.ids, turn.log_probs) for turn in one.turns],
            "ids": one.ids,
            "log_probs": one.log_probs,
            "engine": one.sampled_log_probs,
            "trainer": score,
            "targets": one.sequence.targets,
            "finished": one.finished,
            "verdict": one.verdict and (one.verdict.error or one.verdict.components),
            "same": torch.equal(other.prompt.ids, one.prompt.ids)
            and torch.equal(other.prompt.positions, one.prompt.positions)
            and [i.digest for i in other.prompt.items] == [i.digest for i in one.prompt.items],
        }
        for one, score, other in zip(rollouts, scores, restored, strict=True)
    ]
    return {place: plain[i * GROUP : (i + 1) * GROUP] for i, place in enumerate(places)}, rounds


@pytest.fixture(scope="module")
def alone(ranks, checkpoint, prompts):
    ((found, _),) = ranks.run(_talk, checkpoint, [prompts[n] for n in NAMES], 512, Talk(), TP1, **TP1.job)
    return found


@pytest.mark.parametrize("layout", LAYOUT_CASES, ids=lambda layout: layout.name)
def test_conversations(ranks, checkpoint, mixture_checkpoint, prompts, alone, layout):
    """Engine = trainer for all that was sampled, in every turn; the same conversations whatever the layout."""
    mixed = layout.expert_parallel > 1
    folder = mixture_checkpoint if mixed else checkpoint
    answers = ranks.run(_talk, folder, [prompts[n] for n in NAMES], 512, Talk(), layout, **layout.job)
    together = {place: group for found, _ in answers for place, group in found.items()}
    turns = set()
    for place, group in together.items():
        for one, lonely in zip(group, alone[place], strict=True):
            assert (one["engine"] - one["trainer"]).abs().max() < 1e-5
            assert one["same"]
            turns.add(len(one["turns"]))
            assert one["verdict"] in (None, (float(len(one["turns"]) + 1),))
            if not mixed:
                assert torch.equal(one["prompt"].ids, lonely["prompt"].ids) and torch.equal(one["ids"], lonely["ids"])
                assert (one["engine"] - lonely["engine"]).abs().max() < 1e-5
    assert turns == {0, 1, 2}
    assert len({len(rounds) for _, rounds in answers}) == 1  # ranks that share experts sample together


def test_what_was_sampled_stays(alone, prompts, reference):
    """Each turn's tokens stand where they were sampled, and have the probability that transformers gives them there."""
    for place, group in alone.items():
        for one in group:
            ids = one["prompt"].ids
            for start, sampled, _ in one["turns"]:
                assert torch.equal(ids[start : start + sampled.numel()], sampled)
                assert not one["prompt"].media_mask[start : start + sampled.numel()].any()
            whole = reference.logits(one["prompt"], one["ids"]).log_softmax(-1)
            everything = torch.cat([ids, one["ids"]])
            places = [torch.arange(start, start + t.numel()) for start, t, _ in one["turns"]]
            places = torch.cat([*places, torch.arange(ids.numel(), everything.numel())])
            assert torch.equal(everything[places], one["targets"])
            expected = whole[places - 1].gather(1, everything[places][:, None])[:, 0]
            assert (one["engine"] - expected).abs().max() < 1e-5
            assert len(one["prompt"].items) == len(prompts[NAMES[place]].items) + len(one["turns"])


def test_no_room(ranks, checkpoint, prompts):
    """A conversation whose next completion might not fit ends where it is, and is judged as it stands."""
    prompt = prompts["images"]
    longest = prompt.ids.numel() + NEW
    ((found, rounds),) = ranks.run(_talk, checkpoint, [prompt], longest, Talk(), TP1, **TP1.job)
    assert all(one["turns"] == [] and one["verdict"] is None for one in found[0])
    assert rounds == [1]


class NoStep(Talk):
    def step(self, state, completion, finished):
        return "no"


class NoReply(Talk):
    def step(self, state, completion, finished):
        return Step(state, Reply((3,)))


class NoPicture(Talk):
    def step(self, state, completion, finished):
        return Step(state, Reply((Media("image", b"GIF?"),)))


class NoScore(Talk):
    def step(self, state, completion, finished):
        return Step(state, score=1.0)


class TooMany(Talk):
    def step(self, state, completion, finished):
        return Step(state, score=Score((1.0, 2.0), True, True))


class NoBytes(Talk):
    def step(self, state, completion, finished):
        return Step(state, Reply((Media("image", "a/b.png"),)))


class Cancelled(Talk):
    async def step(self, state, completion, finished):
        raise asyncio.CancelledError


class Slow(Talk):
    async def step(self, state, completion, finished):
        await asyncio.sleep(30)


class Hangs(Talk):
    def step(self, state, completion, finished):
        time.sleep(30)


class Raises(Talk):
    def step(self, state, completion, finished):
        raise KeyError("of mine")


class NeverBegins(Talk):
    def reset(self, prompt, seed):
        raise SystemExit("not today")


@pytest.mark.parametrize(
    "dialogue, complaint",
    [
        (NoStep(), "TypeError: step gave str 'no', not a Step whose score is a Score or None"),
        (NoScore(), "TypeError: step gave Step "),
        (TooMany(), "ValueError: score gave 2 components: should be 1"),
        (
            NoBytes(),
            "TypeError: row 4, reply to turn 1, part 0: Media('image', data of type str): should be a kind and",
        ),
        (Cancelled(), "RuntimeError: CancelledError"),
        (NoReply(), "TypeError: row 4, reply to turn 1, part 0: of type int, not a text, a Pillow image or Media"),
        (NoPicture(), "MediaError: row 4, reply to turn 1, part 0: not a picture in any of the formats"),
        (Slow(), "TimeoutError: took more than 1 s"),
        (Hangs(), "TimeoutError: took more than 1 s"),
        (Raises(), "KeyError: 'of mine'"),
        (NeverBegins(), "RuntimeError: SystemExit: not today"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_dialogue_that_fails(ranks, checkpoint, prompts, dialogue, complaint):
    """Its conversation ends, and the verdict says why; the job goes on."""
    ((found, _),) = ranks.run(_talk, checkpoint, [prompts["repeat"]], 512, dialogue, TP1, **TP1.job)
    for one in found[0]:
        assert one["turns"] == [] and one["verdict"].startswith(complaint)
