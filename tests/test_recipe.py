"""Recipes: inheritance, overrides, round trip, and one line for every refusal."""

from pathlib import Path

import pytest
from pydantic import ValidationError

from megarl.errors import UserError
from megarl.recipe import Recipe, _fields, check_world, load_recipe, save_recipe

RECIPES = sorted((Path(__file__).parent.parent / "recipes").rglob("*.yaml"))

MINIMAL = """\
steps: 10
model: {path: some/checkpoint}
data: {path: some/data}
rollout: {max_new_tokens: 8}
optimizer: {learning_rate: 1e-3}
"""
INLINE = """\
steps: 10
model:
  config:
    model_type: qwen3_vl
    architectures: [Qwen3VLForConditionalGeneration]
    text_config: {vocab_size: 128}
    vision_config: {patch_size: 4, spatial_merge_size: 2, temporal_patch_size: 2}
  tiny_processor: {patch_size: 4, min_pixels: 256, max_pixels: 256}
data: {path: some/data}
rollout: {max_new_tokens: 8}
optimizer: {learning_rate: 1e-3}
"""


@pytest.fixture
def write(tmp_path, monkeypatch):
    """Writes files into the current directory, a fresh one."""
    monkeypatch.chdir(tmp_path)

    def write(name: str, text: str) -> str:
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text(text)
        return name

    return write


def refusal(path: str, *overrides: str) -> str:
    with pytest.raises(UserError) as caught:
        load_recipe(path, overrides)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_minimal_recipe_has_defaults(write):
    recipe = load_recipe(write("a.yaml", MINIMAL))
    assert recipe.optimizer.learning_rate == 1e-3
    assert recipe.algorithm.prompts_per_step == 32
    assert recipe.warmup is None
    assert recipe.algorithm.rollouts_per_step == 512
    assert recipe.total_updates == 10


def test_recipe_is_frozen(write):
    recipe = load_recipe(write("a.yaml", MINIMAL))
    with pytest.raises(ValidationError):
        recipe.rollout.temperature = 0.5


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.name)
def test_shipped_recipes_validate(path):
    check_world(load_recipe(path), world_size=1)


def test_every_key_is_described():
    assert [key for key, field in _fields(Recipe) if not field.description] == []


# Inheritance and overrides


def test_later_files_win(write):
    write("base.yaml", MINIMAL + "seed: 1\nrun_dir: base\n")
    write("parts/first.yaml", "seed: 2\nrun_dir: first\nalgorithm: {group_size: 4}\n")
    write("parts/second.yaml", "run_dir: second\nalgorithm: {epochs: 2}\n")
    write("child.yaml", "extends: [base.yaml, parts/first.yaml, parts/second.yaml]\nsteps: 3\n")
    recipe = load_recipe("child.yaml", ["steps=4"])
    assert (recipe.seed, recipe.run_dir, recipe.steps) == (2, "second", 4)
    assert (recipe.algorithm.group_size, recipe.algorithm.epochs) == (4, 2)


def test_paths_of_extends_are_relative_to_the_file(write):
    write("recipes/base.yaml", MINIMAL)
    write("recipes/models/small.yaml", "extends: ../base.yaml\nseed: 7\n")
    assert load_recipe("recipes/models/small.yaml").seed == 7


def test_a_file_that_is_reached_twice_counts_once(write):
    write("base.yaml", MINIMAL + "seed: 1\n")
    write("left.yaml", "extends: base.yaml\nseed: 2\n")
    write("right.yaml", "extends: base.yaml\n")
    write("child.yaml", "extends: [left.yaml, right.yaml]\n")
    assert load_recipe("child.yaml").seed == 2


def test_lists_are_replaced_and_null_switches_off(write):
    write("base.yaml", INLINE + "warmup: {steps: 3, learning_rate: 1e-3}\n")
    write("child.yaml", "extends: base.yaml\nwarmup:\nmodel: {config: null, tiny_processor: null, path: x}\n")
    recipe = load_recipe("child.yaml", ["model.freeze=[vision]"])
    assert recipe.warmup is None
    assert recipe.model.path == "x"
    assert recipe.model.freeze == ["vision"]


def test_circle_names_its_files(write):
    write("a.yaml", "extends: b.yaml\n")
    write("b.yaml", "extends: ./a.yaml\n")
    assert refusal("a.yaml") == "extends runs in a circle: a.yaml -> b.yaml -> a.yaml"


@pytest.mark.parametrize(
    "override, key, value",
    [
        ("optimizer.learning_rate=1e-3", "learning_rate", 1e-3),
        ("optimizer.learning_rate=3", "learning_rate", 3.0),
        ("optimizer.schedule=linear", "schedule", "linear"),
    ],
)
def test_override(write, override, key, value):
    recipe = load_recipe(write("a.yaml", MINIMAL), [override])
    assert getattr(recipe.optimizer, key) == value


def test_override_reaches_into_the_inline_configuration(write):
    recipe = load_recipe(write("a.yaml", INLINE), ["model.config.text_config.hidden_size=96"])
    assert recipe.model.config["text_config"] == {"vocab_size": 128, "hidden_size": 96}


def test_interpolation(write):
    assert load_recipe(write("a.yaml", MINIMAL + "run_dir: runs/${steps}\n")).run_dir == "runs/10"


def test_secrets_of_the_environment_stay_there(write, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_abc")
    monkeypatch.setenv("SCRATCH", "/scratch")
    path = write("a.yaml", MINIMAL)
    assert load_recipe(path, ["run_dir=${oc.env:SCRATCH}/run"]).run_dir == "/scratch/run"
    with pytest.raises(
        UserError, match="oc.env:HF_TOKEN in override .*: the recipe is written into run folders"
    ) as said:
        load_recipe(path, ["run_dir=${oc.env:HF_TOKEN}"])
    assert "hf_abc" not in str(said.value)


# Round trip


@pytest.mark.parametrize("text", [MINIMAL, INLINE])
def test_round_trip(write, text):
    recipe = load_recipe(write("a.yaml", text), ["optimizer.adam_eps=1e-15", "rollout.top_p=0.1"])
    save_recipe(recipe, "b.yaml")
    assert load_recipe("b.yaml") == recipe


@pytest.mark.parametrize(
    "text", ["${steps}", "\\${steps}", "a\\\\${b}", "${", "???", "\\???", "1e-3", "null", "a: b", " ", "é\n"]
)
def test_round_trip_of_strings_that_yaml_or_omegaconf_would_read(write, text):
    recipe = load_recipe(write("a.yaml", MINIMAL))
    rollout = recipe.rollout.model_copy(update={"stop": [text]})
    recipe = recipe.model_copy(update={"rollout": rollout})
    save_recipe(recipe, "b.yaml")
    assert load_recipe("b.yaml") == recipe


# Refusals of files


@pytest.mark.parametrize(
    "text, message",
    [
        ("a: [", "recipe a.yaml cannot be read: while parsing a flow node"),
        ("steps: 1\nsteps: 2", "recipe a.yaml cannot be read: while constructing a mapping"),
        ("- steps", "recipe a.yaml is a list: a recipe is a mapping of keys to values"),
        ("3", "recipe a.yaml cannot be read: Invalid loaded object type: int"),
        ("extends: base.yaml", "recipe base.yaml (extended by a.yaml) does not exist"),
        ("extends: {a: b}", "extends = {'a': 'b'} in a.yaml: should be a path or a list of paths"),
        (MINIMAL + "run_dir: ${nowhere}", "a.yaml: Interpolation key 'nowhere' not found"),
        (MINIMAL + "run_dir: ???", "a.yaml: Missing mandatory value: run_dir"),
        (MINIMAL + "1: x", "unknown key '1' in a.yaml: should be one of seed, run_dir, steps, allow_dataset_change"),
        (
            MINIMAL + "algorithm.epochs: 2",
            "unknown key 'algorithm.epochs' in a.yaml: dots are for overrides, a file nests its keys",
        ),
    ],
)
def test_unusable_file(write, text, message):
    assert refusal(write("a.yaml", text)).startswith(message)


def test_missing_file(write):
    assert refusal("nowhere.yaml") == "recipe nowhere.yaml does not exist"


def test_folder_as_a_file(write):
    write("folder/a.yaml", MINIMAL)
    assert refusal("folder").startswith("recipe folder cannot be read: ")


@pytest.mark.parametrize("override", ["steps", "=3", "", " =3"])
def test_malformed_override(write, override):
    message = refusal(write("a.yaml", MINIMAL), override)
    assert message == f"override {override!r} should be key=value, such as optimizer.learning_rate=1e-3"


def test_unparsable_override(write):
    message = refusal(write("a.yaml", MINIMAL), "model.freeze=[vision")
    assert message.startswith("override 'model.freeze=[vision' cannot be read: ")


# Refusals of keys and values


@pytest.mark.parametrize(
    "key, hint",
    [
        ("optimizer.learning_rat", "did you mean 'optimizer.learning_rate'?"),
        ("optimzer", "did you mean 'optimizer'?"),
        ("group_size", "did you mean 'algorithm.group_size'?"),
        ("algorithm.temperature", "did you mean 'rollout.temperature' or 'evaluation.temperature'?"),
        (
            "checkpoint.zzz",
            "should be one of checkpoint.every, checkpoint.keep_last, checkpoint.keep_best, checkpoint.async_save",
        ),
    ],
)
def test_unknown_key_names_the_nearest(write, key, hint):
    message = refusal(write("a.yaml", MINIMAL), f"{key}=1")
    assert message == f"unknown key '{key}' in override '{key}=1': {hint}"


def test_unknown_key_of_a_source(write):
    """Whose name is no key of the schema."""
    found = refusal(write("a.yaml", MINIMAL), "environment.sources={geo: {nam: math}}")
    assert found.endswith("did you mean 'environment.sources.name'?")
    found = refusal("a.yaml", "environment.sources={geo: {zzzz: 1}}")
    assert "should be one of environment.sources.name, " in found


def test_environments_by_source(write):
    sources = "environment.sources={a: {name: math, extract: boxed}, b: {weight: 2}}"
    found = load_recipe(write("a.yaml", MINIMAL), [sources]).environment.specs
    assert found.default is None and found.of("c") is None and not found.bounded
    assert (found.of("a").name, found.of("a").key) == ("math", "environment.sources.a")
    assert (found.of("b").name, found.of("b").weight) == ("exact_match", 2)
    found = load_recipe("a.yaml", [sources, "environment.name=numeric"]).environment.specs
    assert found.of("c").name == "numeric"
    found = load_recipe("a.yaml").environment.specs
    assert found.of("c").name == "exact_match" and found.bounded


def test_unknown_key_names_the_file_that_sets_it(write):
    write("base.yaml", MINIMAL.replace("learning_rate", "learning_rat"))
    write("child.yaml", "extends: base.yaml\nseed: 2\n")
    assert refusal("child.yaml") == (
        "unknown key 'optimizer.learning_rat' in base.yaml: did you mean 'optimizer.learning_rate'?"
    )


def test_missing_key_says_what_it_is(write):
    message = refusal(write("a.yaml", MINIMAL.replace("steps: 10\n", "")))
    assert message == "steps is missing in a.yaml: should be RL steps; 0: warm-up and evaluation only"


@pytest.mark.parametrize(
    "setting, accepted",
    [
        ("steps=many", "should be a valid integer"),
        ("steps=1.5", "should be a valid integer"),
        ("steps=true", "should be a valid integer"),
        ("steps='3'", "should be a valid integer"),
        ("steps=-1", "should be greater than or equal to 0"),
        ("optimizer.learning_rate=true", "should be a valid number"),
        ("optimizer.learning_rate=.nan", "should be a finite number"),
        ("optimizer.learning_rate=0", "should be greater than 0"),
        ("run_dir=3", "should be a valid string"),
        ("rollout.cuda_graphs=1", "should be a valid boolean"),
        ("rollout.top_p=0", "should be greater than 0"),
        ("rollout.max_tokens_per_step=4097", "should be a multiple of 64"),
        ("rollout.block_size_tokens=8", "should be a multiple of 16"),
        ("algorithm.group_size=1", "should be greater than or equal to 2"),
        (
            "algorithm.advantage=gae",
            "should be 'group_std', 'group_mean', 'leave_one_out', 'batch_std', 'group_mean_batch_std', "
            "'component_std' or 'max_at_k'",
        ),
        ("algorithm.surrogate=ppo", "should be 'clipped', 'cispo', 'unclipped' or 'none'"),
        ("algorithm.dual_clip=1", "should be greater than 1"),
        ("algorithm.correction.level=word", "should be 'none', 'token', 'sequence' or 'geometric'"),
        ("optimizer=null", "should be a mapping"),
        ("model.freeze=vision", "should be a valid list"),
        ("environment.format=[0-9]", "should be a valid string"),
    ],
)
def test_wrong_value(write, setting, accepted):
    message = refusal(write("a.yaml", MINIMAL), setting)
    assert message.startswith(f"{setting.partition('=')[0]} = ")
    assert message.endswith(f" in override {setting!r}: {accepted}")


def test_wrong_item_of_a_list(write):
    message = refusal(write("a.yaml", MINIMAL), "model.freeze=[vision, visoin]")
    assert message == (
        "model.freeze.1 = 'visoin' in override 'model.freeze=[vision, visoin]': "
        "should be 'vision', 'projector' or 'language'"
    )


def test_unknown_key_through_an_interpolation(write):
    message = refusal(write("a.yaml", MINIMAL + "parallel: ${rollout}\n"))
    assert message.startswith("unknown key 'parallel.max_new_tokens' in a.yaml: ")


TINY = "model.tiny_processor"


@pytest.mark.parametrize(
    "text, overrides, message",
    [
        (MINIMAL, ["model.path=null"], "model.path = None, model.config = None: set exactly one"),
        (
            MINIMAL,
            ["model.config={a: 1}"],
            "model.path = 'some/checkpoint', model.config = {'a': 1}: set exactly one",
        ),
        (
            MINIMAL,
            ["model.init_std=0.1"],
            "model.path = 'some/checkpoint', model.init_std = 0.1: a checkpoint has weights: should be null, "
            "or model.init = 'random'",
        ),
        (
            MINIMAL,
            ["model.tiny_processor={patch_size: 4, min_pixels: 64, max_pixels: 64}"],
            "model.path = 'some/checkpoint', model.tiny_processor = {'alphabet': ",
        ),
        (
            MINIMAL,
            ["model.path=null", "model.config={architectures: [A]}"],
            "model.config = {'architectures': ['A']}: an inline configuration needs 'model_type'",
        ),
        (
            MINIMAL,
            ["model.path=null", "model.config={model_type: a}"],
            "model.config = {'model_type': 'a'}: an inline configuration needs 'architectures'",
        ),
        (INLINE, ["model.processor=x"], "model.processor = 'x', model.tiny_processor = {'alphabet': "),
        (
            INLINE,
            ["model.tiny_processor=null"],
            "model.processor = None, model.tiny_processor = None: set exactly one beside model.config",
        ),
        (INLINE, [f"{TINY}.alphabet=aba"], f"{TINY}.alphabet = 'aba': a character may occur only once"),
        (
            INLINE,
            [f"{TINY}.patch_size=null"],
            f"{TINY}.patch_size = None, {TINY}.min_pixels = 256, {TINY}.max_pixels = 256: belong together",
        ),
        (INLINE, [f"{TINY}.vocab_size=95"], f"{TINY}.vocab_size = 95, {TINY}.alphabet = "),
        (
            INLINE,
            [f"{TINY}.min_pixels=300"],
            f"{TINY}.min_pixels = 300, {TINY}.max_pixels = 256: min exceeds max",
        ),
        (
            INLINE,
            [f"{TINY}.min_pixels=9", f"{TINY}.max_pixels=63"],
            f"{TINY}.max_pixels = 63: should be at least 64, the pixels of one media token",
        ),
        (
            INLINE,
            [f"{TINY}.vocab_size=160"],
            f"{TINY}.vocab_size = 160, model.config.text_config.vocab_size = 128: should be equal",
        ),
        (
            INLINE,
            [f"{TINY}.merge_size=1"],
            f"{TINY}.merge_size = 1, model.config.vision_config.spatial_merge_size = 2: should be equal",
        ),
        (
            MINIMAL,
            ["model.freeze=[vision,projector,language]"],
            "model.freeze = ['vision', 'projector', 'language'], steps = 10: nothing is left to train",
        ),
        (
            MINIMAL,
            ["parallel.pipeline_model_parallel_size=2"],
            "parallel.pipeline_model_parallel_size = 2: only 1 is accepted, since rollouts share",
        ),
        (
            MINIMAL,
            ["parallel.sequence_parallel=true"],
            "parallel.sequence_parallel = True, parallel.tensor_model_parallel_size = 1: ",
        ),
        (
            MINIMAL,
            ["parallel.tensor_model_parallel_size=2", "rollout.max_requests=3"],
            "rollout.max_requests = 3, parallel.tensor_model_parallel_size = 2: should be a multiple",
        ),
        (
            MINIMAL,
            ["rollout.parallel.tensor_model_parallel_size=2", "rollout.max_requests=3"],
            "rollout.max_requests = 3, rollout.parallel.tensor_model_parallel_size = 2: should be a multiple",
        ),
        (
            MINIMAL,
            ["rollout.quantization={}", "model.lora.merge_for_rollouts=false"],
            "model.lora.merge_for_rollouts = False, rollout.quantization = {'format': 'fp8', ",
        ),
        (
            MINIMAL,
            ["rollout.quantization.training=true", "algorithm.kl_coefficient=0.1", "algorithm.reference=teacher"],
            "rollout.quantization.training = True, algorithm.reference = 'teacher': another model's",
        ),
        (
            MINIMAL,
            ["rollout.quantization.training=true", "model.lora={}"],
            "rollout.quantization.training = True, model.lora = {'rank': 16, ",
        ),
        (
            MINIMAL,
            ["rollout.quantization.training=true", "rollout.parallel.tensor_model_parallel_size=2"],
            "rollout.quantization.training = True, rollout.parallel = ",
        ),
        (
            MINIMAL,
            ["parallel.context_parallel_size=2", "rollout.parallel={}"],
            "rollout.parallel.tensor_model_parallel_size = 1, rollout.parallel.expert_model_parallel_size = 1, "
            "rollout.parallel.expert_tensor_parallel_size = 1: the trainer's layout already: set rollout.parallel",
        ),
        (
            MINIMAL,
            ["parallel.tensor_model_parallel_size=2", "rollout.parallel.sequence_parallel=true"],
            "rollout.parallel.sequence_parallel = True, rollout.parallel.tensor_model_parallel_size = 1: sequence",
        ),
        (
            MINIMAL,
            [
                "parallel.context_parallel_size=2",
                "rollout.parallel.tensor_model_parallel_size=3",
                "rollout.max_requests=3",
            ],
            "rollout.parallel.tensor_model_parallel_size = 3: should divide, or be a multiple of, the 2 ranks",
        ),
        (
            MINIMAL,
            ["algorithm.curriculum.share=0.01"],
            "algorithm.curriculum = {'share': 0.01, 'discount': 0.5}, algorithm.prompts_per_step = 32: no ",
        ),
        (
            MINIMAL,
            ["algorithm.curriculum={}", "algorithm.surrogate=none", "algorithm.kl_coefficient=1"],
            "algorithm.surrogate = 'none', algorithm.curriculum = {'share': 0.5, 'discount': 0.5}: there is",
        ),
        (
            MINIMAL,
            ["evaluation.samples=4"],
            "evaluation.samples = 4, evaluation.temperature = 0.0: greedy answers to a prompt are equal",
        ),
        (
            MINIMAL,
            ["evaluation.samples=513", "evaluation.temperature=1"],
            "evaluation.samples = 513, rollout.max_requests = 512: the engine should hold all samples",
        ),
        (
            MINIMAL,
            ["parallel.tensor_model_parallel_size=2", "training.tokens_per_row=4097"],
            "training.tokens_per_row = 4097, parallel.tensor_model_parallel_size = 2, "
            "parallel.context_parallel_size = 1: should be a multiple",
        ),
        (
            MINIMAL,
            ["environment.format='[0-9'"],
            "environment.format = '[0-9': should be think_answer or a regular expression: unterminated character set",
        ),
        (
            MINIMAL,
            ["environment.format_reward=0.1"],
            "environment.format_reward = 0.1, environment.format = None: the reward needs a format",
        ),
        (
            MINIMAL,
            ["environment.options={count_tolerance: 1}"],
            "environment.options.count_tolerance = 1: exact_match has no options",
        ),
        (
            MINIMAL,
            ["environment={name: visual_answer, options: {tolerance: 1}}"],
            "environment.options.tolerance = 1: visual_answer has count_tolerance",
        ),
        (
            MINIMAL,
            ["environment={name: visual_answer, options: {count_tolerance: 0.5}}"],
            "environment.options.count_tolerance = 0.5: should be a valid integer",
        ),
        (
            MINIMAL,
            ["environment={name: numeric, options: {absolute_tolerance: -1}}"],
            "environment.options.absolute_tolerance = -1: should be greater than or equal to 0",
        ),
        (
            MINIMAL,
            ["environment={name: box_iou, options: {threshold: .inf}}"],
            "environment.options.threshold = inf: should be a finite number",
        ),
        (
            MINIMAL,
            ["environment.name=exactmatch"],
            "environment.name = 'exactmatch': should be one of exact_match, visual_answer, multiple_choice, numeric, ",
        ),
        (
            MINIMAL,
            ["environment.name='my rewards:Reward'"],
            "environment.name = 'my rewards:Reward': should be one of exact_match, ",
        ),
        (
            MINIMAL,
            ["environment={name: 'rewards:Reward', extract: boxed}"],
            "environment.extract = 'boxed', environment.name = 'rewards:Reward': your own environment is given",
        ),
        (
            MINIMAL,
            ["environment.extract='Answer: .*'"],
            "environment.extract = 'Answer: .*': should be answer, boxed or have a group that is the answer",
        ),
        (
            MINIMAL,
            ["environment.extract='(('"],
            "environment.extract = '((': should be answer, boxed or a regular expression: missing )",
        ),
        (
            MINIMAL,
            ["environment.sources={a/b.c: {name: math, format_reward: 1}}"],
            "environment.sources.a/b.c.format_reward = 1.0, environment.sources.a/b.c.format = None: the reward needs",
        ),
        (
            MINIMAL,
            ["environment.dialogue={name: talk}"],
            "environment.dialogue.name = 'talk': should be one of zoom, or your own as package.module:Name",
        ),
        (
            MINIMAL,
            ["environment.dialogue={name: zoom, options: {role: system}}"],
            "environment.dialogue.options.role = 'system': should be 'user' or 'tool'",
        ),
        (
            MINIMAL,
            ["environment.dialogue={name: zoom}"],
            "environment.dialogue = {'name': 'zoom', 'options': {}, 'max_turns': 4}, "
            "rollout.max_sequence_tokens = None: a conversation needs a bound",
        ),
        (
            MINIMAL,
            ["rollout.max_sequence_tokens=64"],
            "rollout.max_sequence_tokens = 64, data.max_prompt_tokens = 1024, rollout.max_new_tokens = 8: a prompt and",
        ),
        (
            MINIMAL,
            ["rollout.partial={extra_prompts: 4, tokens_per_round: 3}"],
            "rollout.partial.tokens_per_round = 3, rollout.max_new_tokens = 8: a round should be a whole part",
        ),
        (
            MINIMAL,
            ["rollout.partial={extra_prompts: 4, tokens_per_round: 2}", "algorithm.resample_rounds=1"],
            "rollout.partial.extra_prompts = 4, algorithm.resample_rounds = 1: a group is judged when it is done",
        ),
        (
            MINIMAL,
            ["rollout.partial={extra_prompts: 4, tokens_per_round: 2}", "algorithm.curriculum={share: 0.5}"],
            "rollout.partial.extra_prompts = 4, algorithm.curriculum = {'share': 0.5, ",
        ),
        (
            MINIMAL,
            ["data.generator_options.train=8"],
            "data.generator_options = {'train': 8}, data.generator = None: options need a generator",
        ),
        (
            MINIMAL,
            ["algorithm.minibatches=5"],
            "algorithm.minibatches = 5, algorithm.prompts_per_step = 32: minibatches should divide",
        ),
        (
            MINIMAL,
            ["rollout.temperature=0"],
            "rollout.temperature = 0.0, algorithm.group_size = 16, steps = 10: the greedy rollouts",
        ),
        (
            MINIMAL,
            ["rollout.top_k=1"],
            "rollout.top_k = 1, algorithm.group_size = 16, steps = 10: the greedy rollouts",
        ),
        (
            MINIMAL,
            ["rollout.top_p=0.9", "algorithm.old_log_probs=rollout"],
            "rollout.top_p = 0.9, algorithm.old_log_probs = 'rollout': the trainer knows only",
        ),
        (
            MINIMAL,
            ["rollout.top_k=20", "algorithm.old_log_probs=rollout"],
            "rollout.top_k = 20, algorithm.old_log_probs = 'rollout': the trainer knows only",
        ),
        (
            MINIMAL,
            ["rollout.top_p=0.9", "algorithm.correction.drop_max=1"],
            "rollout.top_p = 0.9, algorithm.correction.drop_max = 1.0: the trainer knows only",
        ),
        (
            MINIMAL,
            ["algorithm.advantage=max_at_k"],
            "algorithm.advantage = 'max_at_k', algorithm.best_of = None: max_at_k needs best_of",
        ),
        (
            MINIMAL,
            ["algorithm.best_of=4"],
            "algorithm.advantage = 'group_std', algorithm.best_of = 4: max_at_k needs best_of",
        ),
        (
            MINIMAL,
            ["algorithm.advantage=max_at_k", "algorithm.best_of=17"],
            "algorithm.best_of = 17, algorithm.group_size = 16: ",
        ),
        (
            MINIMAL,
            ["algorithm.advantage=component_std"],
            "algorithm.advantage = 'component_std', environment.format_reward = 0.0, environment.overlong_buffer = 0: ",
        ),
        (
            MINIMAL,
            [
                "algorithm={advantage: component_std, kl_in: reward, kl_coefficient: 0.1}",
                "environment={format: a, format_reward: 0.1}",
            ],
            "algorithm.advantage = 'component_std', algorithm.kl_in = 'reward': ",
        ),
        (
            MINIMAL,
            ["algorithm={kl_in: reward, kl_coefficient: 0.1}"],
            "algorithm.advantage = 'group_std', algorithm.kl_in = 'reward': where a group's answers earn the same, ",
        ),
        (
            MINIMAL,
            ["algorithm={advantage: batch_std, resample_rounds: 1}"],
            "algorithm.advantage = 'batch_std', algorithm.resample_rounds = 1: a group whose rewards are equal teaches",
        ),
        (
            MINIMAL,
            ["deterministic=true", "parallel.tensor_model_parallel_size=2"],
            "deterministic = True, parallel.tensor_model_parallel_size = 2: ranks add up",
        ),
        (
            MINIMAL,
            ["deterministic=true", "parallel.context_parallel_size=2"],
            "deterministic = True, parallel.context_parallel_size = 2: ranks add up",
        ),
        (
            MINIMAL,
            ["deterministic=true", "parallel.expert_model_parallel_size=2"],
            "deterministic = True, parallel.expert_model_parallel_size = 2: ranks add up",
        ),
        (
            MINIMAL,
            ["deterministic=true", "rollout.parallel.tensor_model_parallel_size=2"],
            "deterministic = True, rollout.parallel = {'tensor_model_parallel_size': 2, ",
        ),
        (
            MINIMAL,
            ["deterministic=true", "rollout.quantization.format=int8"],
            "deterministic = True, rollout.quantization = {'format': 'int8', ",
        ),
        (
            MINIMAL,
            ["deterministic=true", "model.lora.rank=2"],
            "deterministic = True, model.lora = {'rank': 2, ",
        ),
        (
            MINIMAL,
            ["deterministic=true", "rollout.top_p=0.9"],
            "deterministic = True, rollout.top_p = 0.9: the trainer does not know",
        ),
        (
            MINIMAL,
            ["deterministic=true", "rollout.top_k=5"],
            "deterministic = True, rollout.top_k = 5: the trainer does not know",
        ),
        (
            MINIMAL,
            ["algorithm={router_replay: true, perception: {coefficient: 0.01}}"],
            "algorithm.router_replay = True, algorithm.perception.coefficient = 0.01: the engine chose its experts ",
        ),
        (
            MINIMAL,
            ["algorithm={surrogate: none, kl_coefficient: 1, resample_rounds: 1}"],
            "algorithm.surrogate = 'none', algorithm.resample_rounds = 1: there is no policy gradient",
        ),
        (
            MINIMAL,
            ["environment.overlong_buffer=9"],
            "environment.overlong_buffer = 9, rollout.max_new_tokens = 8: the buffer is a part",
        ),
        (
            MINIMAL,
            ["environment.overlong_penalty=0.5"],
            "environment.overlong_penalty = 0.5, environment.overlong_buffer = 0: the penalty needs a buffer",
        ),
        (
            MINIMAL,
            ["algorithm={surrogate: cispo, dual_clip: 3}"],
            "algorithm.dual_clip = 3.0, algorithm.surrogate = 'cispo': ",
        ),
        (
            MINIMAL,
            ["algorithm.kl_in=reward"],
            "algorithm.kl_in = 'reward', algorithm.kl_coefficient = 0.0: there is no reference policy without",
        ),
        (
            MINIMAL,
            ["algorithm.reference_every=10"],
            "algorithm.reference_every = 10, algorithm.kl_coefficient = 0.0: there is no reference policy without",
        ),
        (
            MINIMAL,
            ["algorithm={ratio: sequence, correction: {level: token}}"],
            "algorithm.ratio = 'sequence', algorithm.correction.level = 'token': weights of single tokens",
        ),
        (
            MINIMAL,
            ["algorithm={old_log_probs: rollout, correction: {level: sequence}}"],
            "algorithm.old_log_probs = 'rollout', algorithm.correction.level = 'sequence': the ratio to what",
        ),
        (
            MINIMAL,
            ["algorithm.correction={level: token, low: 2, high: 2}"],
            "algorithm.correction.low = 2.0, algorithm.correction.high = 2.0: low should be below high",
        ),
        (
            MINIMAL,
            ["algorithm.correction.bound=mask"],
            "algorithm.correction.bound = 'mask', algorithm.correction.level = 'none': ",
        ),
        (
            MINIMAL,
            ["algorithm.perception.masked_entropy_coefficient=0.03"],
            "algorithm.perception.masked_entropy_coefficient = 0.03, algorithm.perception.coefficient = 0.0: ",
        ),
        (
            MINIMAL,
            ["algorithm={entropy_coefficient: 0.1, perception: {coefficient: 0.01, entropy_coefficient: 0.03}}"],
            "algorithm.perception.entropy_coefficient = 0.03, algorithm.entropy_coefficient = 0.1: one wants",
        ),
        (
            MINIMAL,
            ["algorithm.reference=teacher"],
            "algorithm.reference = 'teacher', algorithm.kl_coefficient = 0.0: there is no reference policy without",
        ),
        (
            MINIMAL,
            ["algorithm={reference: teacher, kl_coefficient: 1, reference_every: 2}"],
            "algorithm.reference = 'teacher', algorithm.reference_every = 2: a checkpoint does not move",
        ),
        (
            MINIMAL,
            ["algorithm.surrogate=none"],
            "algorithm.surrogate = 'none', algorithm.kl_coefficient = 0.0, algorithm.kl_in = 'loss': without a policy",
        ),
        (
            MINIMAL,
            ["rollout.max_tokens_per_step=256"],
            "rollout.max_tokens_per_step = 256, rollout.max_requests = 512: every decoding request",
        ),
        (
            MINIMAL,
            ["rollout.enable_chunked_prefill=false", "rollout.max_tokens_per_step=960"],
            "rollout.enable_chunked_prefill = False, rollout.max_tokens_per_step = 960, "
            "data.max_prompt_tokens = 1024: ",
        ),
        (
            MINIMAL,
            ["training.tokens_per_row=1031"],
            "data.max_prompt_tokens = 1024, rollout.max_new_tokens = 8, training.tokens_per_row = 1031: ",
        ),
        (
            MINIMAL,
            ["optimizer.warmup_steps=11"],
            "optimizer.warmup_steps = 11, steps = 10, algorithm.epochs = 1, algorithm.minibatches = 1: "
            "the run has only 10 updates",
        ),
    ],
)
def test_conflict(write, text, overrides, message):
    found = refusal(write("a.yaml", text), *overrides)
    assert found.startswith(message)
    assert found.endswith(" (in a.yaml)")


@pytest.mark.parametrize(
    "overrides",
    [
        ["steps=0", "rollout.temperature=0"],
        ["steps=0", "optimizer.warmup_steps=11"],
        ["steps=0", "model.freeze=[vision,projector,language]"],
        ["training.tokens_per_row=1032"],
        ["optimizer.warmup_steps=10"],
        ["rollout.top_p=0.9"],
        ["algorithm={advantage: max_at_k, best_of: 16}"],
        ["algorithm={reference: teacher, surrogate: none, kl_coefficient: 1, kl_estimator: k2}"],
        ["algorithm.perception={coefficient: 0.01, entropy_coefficient: 0.03, masked_entropy_coefficient: 0.03}"],
        ["algorithm={ratio: sequence, correction: {level: geometric, bound: mask, low: 0.5, drop_max: 3}}"],
        ["algorithm={advantage: leave_one_out, kl_in: reward, kl_coefficient: 0.01, reference_every: 5}"],
        ["parallel.tensor_model_parallel_size=2", "parallel.sequence_parallel=true"],
        ["environment={extract: 'Answer: (.*)', format: think_answer, format_reward: 0.1}"],
        ["environment={name: 'my.rewards:Make.reward', options: {anything: [1, {a: b}]}}"],
        ["environment.sources={a: {name: numeric, options: {relative_tolerance: 1}}}"],
        ["algorithm.advantage=component_std", "environment.sources={a: {format: x, format_reward: 0.1}}"],
        ["algorithm.advantage=component_std", "environment.name='rewards:Two'"],
    ],
)
def test_no_conflict(write, overrides):
    load_recipe(write("a.yaml", MINIMAL), overrides)


# World size


def test_data_parallel_size(write):
    recipe = load_recipe(write("a.yaml", MINIMAL), ["parallel.tensor_model_parallel_size=4"])
    check_world(recipe, 8)
    assert recipe.parallel.data_parallel_size(8) == 2


@pytest.mark.parametrize(
    "overrides, world_size, message",
    [
        ([], 0, "world size = 0: should be at least 1"),
        (
            ["parallel.tensor_model_parallel_size=2"],
            3,
            "parallel.tensor_model_parallel_size = 2, parallel.context_parallel_size = 1: their product should divide "
            "the world size, which is 3",
        ),
        (
            ["parallel.expert_model_parallel_size=2", "parallel.expert_tensor_parallel_size=3"],
            4,
            "parallel.expert_model_parallel_size = 2, parallel.expert_tensor_parallel_size = 3: their product should "
            "divide the world size, which is 4",
        ),
        (
            ["parallel.expert_tensor_parallel_size=2"],
            2,
            "parallel.expert_tensor_parallel_size = 2, parallel.tensor_model_parallel_size = 1: the first should "
            "divide the second",
        ),
        (
            ["rollout.parallel.expert_tensor_parallel_size=2"],
            2,
            "rollout.parallel.expert_tensor_parallel_size = 2, rollout.parallel.tensor_model_parallel_size = 1: the "
            "first should divide the second",
        ),
        (
            ["parallel.expert_model_parallel_size=3", "parallel.context_parallel_size=2"],
            6,
            "parallel.expert_model_parallel_size = 3, parallel.expert_tensor_parallel_size = 1: their product should "
            "divide, or be a multiple of, tensor times context parallel size, which is 2",
        ),
        (
            ["rollout.parallel.tensor_model_parallel_size=2"],
            3,
            "rollout.parallel.tensor_model_parallel_size = 2: should divide the world size, which is 3",
        ),
        (
            ["rollout.parallel.expert_model_parallel_size=4"],
            2,
            "rollout.parallel.expert_model_parallel_size = 4, rollout.parallel.expert_tensor_parallel_size = 1: their "
            "product should divide the world size, which is 2",
        ),
        (
            ["algorithm.minibatches=2"],
            32,
            "algorithm.prompts_per_step = 32, algorithm.minibatches = 2: a minibatch should give each of 32 "
            "data-parallel ranks whole groups",
        ),
        (
            ["warmup={steps: 1, learning_rate: 1e-3, batch_size: 3}"],
            2,
            "warmup.batch_size = 3: should be a multiple of the data parallel size, which is 2",
        ),
    ],
)
def test_world_that_does_not_divide(write, overrides, world_size, message):
    recipe = load_recipe(write("a.yaml", MINIMAL), overrides)
    with pytest.raises(UserError) as caught:
        check_world(recipe, world_size)
    assert str(caught.value) == message
