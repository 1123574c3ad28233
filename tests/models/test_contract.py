"""What docs/adding-a-model.md asks of a family, run for each one that is registered: a new entry is checked at once."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from megarl.errors import PromptError, UserError
from megarl.models.families import FAMILIES
from megarl.models.hf_config import family_of, hf_config
from megarl.models.random_checkpoint import write_random_checkpoint
from tests import tiny
from tests.distributed import TP1, TP2, TP2_SP, Layout, lazy
from tests.media.prompts import encode, media, reference, user
from tests.models.test_build import same_tensors
from tests.training.test_checkpoint import _load_and_go_on, _save_and_go_on
from tests.training.test_gradients import reference_gradients, row_loss, worst

policies = lazy("tests.policies")
build = lazy("megarl.models.build")
packing = lazy("megarl.packing.rows")

LOG_PROBS, GRADIENTS = 1e-5, 1e-4
CP2 = Layout(2, 1, context_parallel=2)
LAYOUTS = [TP1, TP2, TP2_SP, CP2]
MEASURED_ELSEWHERE = {"qwen3_vl", "qwen3_vl_moe"}
"""By tests of each room, in more ways than here."""


def in_layouts(*layouts):
    """A test that runs for each family in each of the layouts, or in the first."""
    cases = [(name, layout) for name in FAMILIES for layout in layouts if name not in MEASURED_ELSEWHERE]
    cases += [pytest.param(name, layouts[0], marks=pytest.mark.slow) for name in sorted(MEASURED_ELSEWHERE)]
    return pytest.mark.parametrize("family, layout", cases, indirect=["family"], scope="module", ids=str)


@pytest.fixture(scope="module")
def family(request):
    return FAMILIES[request.param]


@pytest.fixture(scope="module")
def folder(family, tmp_path_factory):
    return tiny.write_family_checkpoint(tmp_path_factory.mktemp(family.model_type) / "checkpoint", family.model_type)


@pytest.fixture(scope="module")
def theirs(folder):
    return tiny.Reference(folder)


@pytest.fixture(scope="module")
def encoded(folder, tmp_path_factory):
    return tiny.make_prompts(tmp_path_factory.mktemp("pictures"), folder)


@pytest.fixture(scope="module")
def sequences(encoded):
    return tiny.make_sequences(encoded, group=2)


@pytest.fixture(scope="module")
def gradients(theirs, sequences):
    return reference_gradients(theirs.model, theirs, sequences)


every_family = pytest.mark.parametrize("family", FAMILIES, indirect=True, scope="module")
"""A test that runs for each of them."""


@in_layouts(*LAYOUTS)
def test_numbers(ranks, folder, encoded, sequences, theirs, gradients, layout, tmp_path):
    """Engine = trainer = transformers; gradients of every parameter; greedy answers are `generate`'s; what is saved is
    what was loaded, bit for bit."""
    stop = theirs.model.config.get_text_config().eos_token_id
    prompts, out = list(encoded.values()), tmp_path / "out"
    answers = ranks.run(_numbers, folder, prompts, sequences, stop, out, layout.sequence_parallel, **layout.job)
    for sampled, greedy, found in answers:
        for name, group in zip(encoded, sampled, strict=True):
            for ids, engine, trainer in group:
                expected = theirs.log_probs(encoded[name], ids)[0].detach()
                assert float((engine - expected).abs().max()) < LOG_PROBS, name
                assert float((trainer - expected).abs().max()) < LOG_PROBS, name
        assert worst(found, gradients)[0] < GRADIENTS, worst(found, gradients)
        if layout in (TP1, TP2_SP):
            for name, ids in zip(encoded, greedy, strict=True):
                assert ids.tolist() == theirs.greedy(encoded[name], 6).tolist(), name
    same_tensors(out, folder)


def _numbers(folder, prompts, sequences, stop, out, sequence_parallel):
    policy = policies.policy(folder, sequence_parallel=sequence_parallel)
    build.save_checkpoint(policy, out, tiny.load_processor(folder, family_of(folder)))
    trainer = policies.trainer(policy.model)
    engine = policies.engine(
        policy.model, enable_prefix_caching=True, enable_chunked_prefill=True, max_tokens_per_step=64
    )
    groups = engine.generate(prompts, policies.sampling(8), group_size=2)
    rollouts = [rollout for group in groups for rollout in group]
    scores = iter(policies.score(trainer, [packing.TokenSequence(r.prompt, r.ids) for r in rollouts]))
    sampled = [[(r.ids, r.log_probs, next(scores)) for r in group] for group in groups]
    greedy = [r.ids for (r,) in engine.generate(prompts, policies.sampling(6, (stop,), temperature=0.0))]
    return sampled, greedy, policies.gradients(policy, trainer, policies.rows(sequences), row_loss)


@pytest.mark.parametrize(
    "family, layout",
    # Qwen3-VL and mixtures: tests/training.
    [(name, TP2_SP) for name in FAMILIES if name not in MEASURED_ELSEWHERE],
    indirect=["family"],
    scope="module",
    ids=str,
)
def test_continuation(ranks, folder, sequences, layout, tmp_path):
    """Saved by one rank and loaded by two: the updates that follow are those of a run that went on."""
    args = folder, tmp_path / "run", sequences
    results, weights = ranks.run(_save_and_go_on, *args, False)[0]
    again, again_weights = ranks.run(_load_and_go_on, *args, layout.sequence_parallel, **layout.job)[0]
    assert [norm for norm, _ in again] == pytest.approx([norm for norm, _ in results], rel=1e-4)
    assert weights.keys() == again_weights.keys()
    assert max(float((weights[name] - again_weights[name]).abs().max()) for name in weights) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("family", sorted(FAMILIES.keys() - MEASURED_ELSEWHERE), indirect=True, scope="module")
def test_engines_in_another_layout(ranks, folder, encoded, sequences):
    """Weights trained on two data-parallel ranks are resharded to one engine, every tensor bit for bit: engine =
    trainer, before and after an update."""
    engines = Layout(2, 2)
    for differences in ranks.run(_resharded, folder, list(encoded.values()), sequences, engines, **Layout(2, 1).job):
        assert max(differences) < LOG_PROBS


def _resharded(folder, prompts, sequences, engines):
    parts = policies.parts(folder, TP1, engines, verify_sync=True)
    differences = []
    for _ in range(2):
        rollouts = [r for group in parts.engine.generate(prompts, policies.sampling(6)) for r in group]
        scores = policies.score(parts.trainer, [packing.TokenSequence(r.prompt, r.ids) for r in rollouts])
        differences += [float((r.log_probs - s).abs().max()) for r, s in zip(rollouts, scores, strict=True)]
        policies.one_update(parts.trainer, sequences)
        parts.sync()
    return differences


@every_family
def test_another_checkpoint_as_reference(ranks, family, folder, tmp_path):
    """`fill` writes every weight of a checkpoint into the module in place, under its names for this family."""
    other = shutil.copytree(folder, tmp_path / "other")
    weights = load_file(folder / "model.safetensors")
    save_file({name: w * 0.9 + 0.01 for name, w in weights.items()}, other / "model.safetensors", {"format": "pt"})
    for filled, loaded in ranks.run(_filled, folder, other):
        assert filled.keys() == loaded.keys()
        assert all(torch.equal(filled[name], weight) for name, weight in loaded.items())


def _filled(folder, other):
    policy = policies.policy(folder)
    build.fill(policy, other)
    return policies.weights(policy), policies.weights(policies.policy(other))


@every_family
def test_expansion_and_positions(family, folder, theirs):
    """Ids are what the family's processor makes of the same text, pixels and times; positions are its model's."""
    processor = tiny.load_processor(folder, family)
    rule = family.load("positions")(theirs.model.config)
    if not family.media:
        found = encode(processor, user("How many ", "<|im_end|>?"), positions=rule)
        expected = processor.tokenizer.encode("<|im_start|>How many ", add_special_tokens=False)
        plain = processor.tokenizer.encode("<|im_end|>", add_special_tokens=False, split_special_tokens=True)
        question = processor.tokenizer.encode("?", add_special_tokens=False)
        assert found.ids.tolist() == expected + plain + question
        assert found.positions.tolist() == [list(range(len(found.ids)))] * 3
        assert found.next_position == len(found.ids)
        return
    # Frames a second apart and frames that follow each other at 30 a second, an odd number and an even one.
    prompt = user("A ", media("24x16.png"), " b ", media("16x24x5@1.mp4"), " c ", media("16x16x6@30.mp4"), " d?")
    found, expected = encode(processor, prompt, positions=rule), reference(processor, prompt)
    assert found.ids.tolist() == expected["input_ids"][0].tolist()
    arguments = {key: value for key, value in expected.items() if key.endswith(("_thw", "_ts", "_type_ids"))}
    positions, delta = theirs.model.model.get_rope_index(expected["input_ids"], **arguments)
    assert found.positions.tolist() == positions[:, 0].tolist()
    assert found.next_position == len(found.ids) + int(delta)


@pytest.mark.parametrize(
    "family", [name for name in FAMILIES if not FAMILIES[name].media], indirect=True, scope="module"
)
def test_media_that_the_family_does_not_read(family, folder, theirs):
    """A row with media that nothing prepares is refused by what it is."""
    processor = tiny.load_processor(folder, family)
    with pytest.raises(PromptError, match="a part of type 'image' is not supported; accepted: text"):
        encode(processor, user("A ", media("24x16.png")), positions=family.load("positions")(theirs.model.config))


@pytest.mark.parametrize(
    "family, tied",
    # Published mixtures are not tied.
    [(name, tied) for name in FAMILIES for tied in (False, True) if not (tied and "moe" in name)],
    indirect=["family"],
    scope="module",
)
def test_random_weights(ranks, family, folder, tmp_path, tied):
    """Made from a config alone: transformers finds every weight in the checkpoint, and so does Megatron."""
    processor = tiny.load_processor(folder, family)
    config = tiny.family_config(processor, family.model_type, tied)
    write_random_checkpoint(tmp_path / "random", config, processor, 0.1, True, 3)
    _, loading = family.hf_class.from_pretrained(tmp_path / "random", output_loading_info=True)
    assert not loading["missing_keys"] and not loading["unexpected_keys"] and not loading["mismatched_keys"]
    ranks.run(_saved_again, tmp_path / "random", tmp_path / "out")
    same_tensors(tmp_path / "out", tmp_path / "random")


def _saved_again(folder, out):
    policy = policies.policy(folder)
    build.save_checkpoint(policy, out, tiny.load_processor(folder, family_of(folder)))


@every_family
def test_load_save_load_in_bfloat16(ranks, family, folder, tmp_path):
    """On two ranks that share the weights: the files hold the source's weights rounded once, and what is loaded from
    them has the same bits."""
    ranks.run(_saved_and_loaded, folder, tmp_path / "out", **TP2.job)
    found, expected = (load_file(f / "model.safetensors") for f in (tmp_path / "out", folder))
    assert found.keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name].to(torch.bfloat16)) for name, tensor in found.items())


def _saved_and_loaded(folder, out):
    options = build.ModelOptions(torch.bfloat16, tensor_model_parallel_size=TP2.tensor_parallel)
    policy = build.load_policy(folder, options)
    build.save_checkpoint(policy, out, tiny.load_processor(folder, family_of(folder)))
    again = dict(build.load_policy(out, options).model.named_parameters())
    assert all(p.dtype is torch.bfloat16 and torch.equal(p, again[n]) for n, p in policy.model.named_parameters())


@every_family
def test_what_travels(ranks, family, folder, tmp_path):
    """The user's own chat template, the tokenizer, the processor and the generation config, as they lie there."""
    source, out = shutil.copytree(folder, tmp_path / "source"), tmp_path / "out"
    (source / "chat_template.jinja").write_text("{% for m in messages %}<<{{ m.role }}>>{% endfor %}")
    (source / "generation_config.json").write_text('{"temperature": 0.6, "top_k": 20,   "eos_token_id": [3, 2]}')
    ranks.run(_saved_again, source, out)
    for name in ("generation_config.json", "chat_template.jinja"):
        assert (out / name).read_bytes() == (source / name).read_bytes()
    ours, theirs = (tiny.load_processor(f, family) for f in (out, source))
    said = [{"role": "user", "content": [{"type": "text", "text": "a"}]}]
    assert ours.apply_chat_template(said, tokenize=False) == "<<user>>"
    assert ours.tokenizer.get_vocab() == theirs.tokenizer.get_vocab()
    for part in ("image_processor", "video_processor") if family.media else ():
        assert getattr(ours, part).to_dict() == getattr(theirs, part).to_dict()


@every_family
def test_frequencies_stay_float32(ranks, family, folder):
    """In a bfloat16 model too, as in transformers: rounded, they turn far tokens by another angle."""
    for rounded, exact in ranks.run(_frequencies, folder)[0]:
        assert rounded.dtype is torch.float32 and torch.equal(rounded, exact)


def _frequencies(folder):
    models = [build.load_policy(folder, build.ModelOptions(dtype)).model for dtype in (torch.bfloat16, torch.float32)]
    rounded, exact = ([m.inv_freq for m in model.modules() if hasattr(m, "inv_freq")] for model in models)
    assert rounded and next(models[0].parameters()).dtype is torch.bfloat16
    return list(zip(rounded, exact, strict=True))


@every_family
def test_frozen_language(ranks, family, folder, sequences):
    """What is frozen gets no gradient and does not move; what is not, of a family that has more, does."""
    (moved,) = ranks.run(_frozen_language, folder, sequences[:8])
    language = {name for name in moved if "visual" not in name}
    assert language and {name for name, changed in moved.items() if changed} == moved.keys() - language


def _frozen_language(folder, sequences):
    policy = policies.policy(folder, freeze=("language",))
    before = policies.weights(policy)
    assert not any(p.requires_grad for p in policy.model.language_model.parameters())
    if any(p.requires_grad for p in policy.model.parameters()):
        policies.one_update(policies.trainer(policy.model), sequences)
    return {name: not torch.equal(weight, before[name]) for name, weight in policies.weights(policy).items()}


# What Megatron would compute otherwise


@every_family
def test_what_bridge_would_lose_is_refused(family, folder, tmp_path):
    """One line that names the key in the config, its value and what is accepted."""
    values = json.loads((folder / "config.json").read_text())
    text = values.get("text_config", values)
    prefix = "text_config." if "text_config" in values else ""
    cases = [(key, "gelu" if only == "silu" else not only, repr(only)) for key, only in family.fixed.items()]
    cases.append(("rope_parameters", {**text["rope_parameters"], "rope_type": "dynamic", "factor": 2.0}, "default"))
    for key, value, accepted in cases:
        changed = {**text, key: value}
        (tmp_path / "config.json").write_text(json.dumps({**values, "text_config": changed} if prefix else changed))
        with pytest.raises(UserError) as refused:
            hf_config(str(tmp_path), None)
        message = str(refused.value)
        assert f"{prefix}{key}" in message and f"should be {accepted}" in message.replace("one of ", ""), message
        assert "\n" not in message


LLAMA3 = {"rope_type": "llama3", "factor": 4.0, "rope_theta": 10000.0}
LLAMA3 |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}

LINEAR = {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}


@pytest.mark.parametrize("rope", [LLAMA3, LINEAR], ids=["llama3", "linear"])
def test_scaled_rope(ranks, tmp_path, rope):
    """Llama's own scaling and the linear one: log-probabilities as transformers has them, and not those without."""
    folder = tiny.write_family_checkpoint(tmp_path / "scaled", "llama", rope_parameters=rope)
    scaled = tiny.Reference(folder)
    plain = tiny.Reference(tiny.write_family_checkpoint(tmp_path / "plain", "llama"))
    (tmp_path / "pictures").mkdir()
    sequences = tiny.make_sequences(tiny.make_prompts(tmp_path / "pictures", folder))
    (found,) = ranks.run(_scores, folder, sequences)
    for sequence, ours in zip(sequences, found, strict=True):
        expected, other = (m.log_probs(sequence.prompt, sequence.completion)[0].detach() for m in (scaled, plain))
        assert float((ours - expected).abs().max()) < LOG_PROBS
        assert float((ours - other).abs().max()) > 100 * LOG_PROBS


def _scores(folder, sequences):
    return policies.score(policies.trainer(policies.policy(folder).model), sequences)


def test_another_scaling_of_llama3_is_refused(tmp_path):
    """Megatron has three of the four numbers built in."""
    folder = tiny.write_family_checkpoint(tmp_path, "llama", rope_parameters={**LLAMA3, "low_freq_factor": 2.0})
    with pytest.raises(UserError, match=r"rope_parameters.low_freq_factor = 2.0: should be 1, as Megatron has it"):
        hf_config(str(folder), None)
