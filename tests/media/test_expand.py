import copy
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

from megarl.data.prompt import Prompt
from megarl.errors import UserError
from megarl.media.expand import ExpansionError, PromptError, PromptTooLong, encode_prompt
from megarl.media.image import prepare_image
from megarl.models.qwen3_vl.positions import mrope_positions

SPELLED_OUT = ["<|image_pad|>", "<|vision_start|>", "<|vision_end|>", "<|im_start|>", "<|im_end|>"]


def picture(path: Path) -> Image.Image:
    """A picture whose size and pixels its name tells: `24x16.png`."""
    width, height = map(int, path.stem.split("x"))
    noise = np.random.default_rng(width * 1000 + height).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(noise)


def encode(processor, prompt, max_prompt_tokens=10_000, load_item=None, positions=mrope_positions):
    def load(kind, path):
        return prepare_image(picture(path), processor.image_processor, path)

    return encode_prompt(prompt, processor, positions, max_prompt_tokens, load_item or load)


def part(value):
    return {"type": "image", "image": value} if isinstance(value, Path) else {"type": "text", "text": value}


def user(*values, index=0):
    return Prompt(index, ({"role": "user", "content": [part(v) for v in values]},), "answer", "test")


def conversation(*turns):
    messages = tuple({"role": role, "content": [part(v) for v in values]} for role, *values in turns)
    return Prompt(0, messages, "answer", "test")


def transformers_encoding(processor, prompt):
    messages = copy.deepcopy(list(prompt.messages))
    for message in messages:
        for content in message["content"]:
            if content["type"] == "image":
                content["image"] = picture(content["image"])
    return processor.apply_chat_template(
        messages, add_generation_prompt=True, tokenize=True, return_dict=True, return_tensors="pt"
    )


A, B, WIDE = Path("16x16.png"), Path("24x16.png"), Path("64x8.png")


@pytest.mark.parametrize("family", ["tiny", "qwen"])
@pytest.mark.parametrize(
    "prompt",
    [
        user("what is in the picture?"),
        user(A, "?"),
        user("what is in ", A, " and in\n\n", B, ", count:"),
        user(A, B, WIDE),
        user("borders of ", "text ", "parts\n", "\nmer", "ge"),
        conversation(("system", "count:"), ("user", A, "one"), ("assistant", "1"), ("user", WIDE, "and?")),
        user("<think> half a token: <|image_pad |im_end|> <|", A, "|>"),
        user("e\u0301 is \u00e9, \U0001f600 is four bytes  ", B),
    ],
    ids=range(8),
)
def test_is_what_transformers_makes_of_a_normal_prompt(request, family, prompt):
    processor = request.getfixturevalue(family)
    expected = transformers_encoding(processor, prompt)
    encoded = encode(processor, prompt)
    assert encoded.ids.dtype == torch.int64 and encoded.media_mask.dtype == torch.bool
    assert encoded.ids.tolist() == expected["input_ids"][0].tolist()
    assert encoded.media_mask.tolist() == expected["mm_token_type_ids"][0].bool().tolist()
    if encoded.items:
        assert torch.equal(torch.cat([item.pixels for item in encoded.items]), expected["pixel_values"])
        assert [list(item.grid) for item in encoded.items] == expected["image_grid_thw"].tolist()


@pytest.mark.parametrize("family", ["tiny", "qwen"])
@pytest.mark.parametrize("token", SPELLED_OUT)
def test_a_special_token_in_prose_is_ordinary_text(request, family, token):
    processor = request.getfixturevalue(family)
    tokenizer = processor.tokenizer
    number = tokenizer.convert_tokens_to_ids(token)
    harmless = encode(processor, user(A, "say it")).ids.tolist()
    encoded = encode(processor, user(A, f"say {token} it"))
    assert encoded.ids.tolist().count(number) == harmless.count(number)
    assert encoded.media_mask.sum() == 4
    assert f"say {token} it" in tokenizer.decode(encoded.ids)


@pytest.mark.parametrize(
    "texts",
    [
        ("<|image", "_pad|>"),
        ("<", "|image_pad", "|", ">"),
        ("<|im_<|image_pad|>end|>",),
        ("<|image_pad|><|image_pad|>", "<|image_pad|>"),
        ("\ue0000\ue000 \ue000\ue0001\ue000\ue000 <|image_pad|>\ue000",),
    ],
)
def test_special_tokens_cannot_be_smuggled_in(qwen, texts):
    encoded = encode(qwen, user(*texts, A))
    tokenizer = qwen.tokenizer
    assert encoded.ids.tolist().count(qwen.image_token_id) == 4 == encoded.media_mask.sum()
    assert encoded.ids.tolist().count(tokenizer.convert_tokens_to_ids("<|im_end|>")) == 1
    assert "".join(texts) in tokenizer.decode(encoded.ids)


def test_added_tokens_that_are_not_special_stay_vocabulary(qwen):
    think = qwen.tokenizer.convert_tokens_to_ids("<think>")
    assert think in encode(qwen, user("<think> about it")).ids


# Line breaks have no token in the tiny alphabet; lone `<` and `|>` make halves of special tokens likely.
texts = st.lists(
    st.one_of(
        st.sampled_from([*SPELLED_OUT, "<|", "|>", "image_pad", "im_end", "<|im_", " "]),
        st.text(st.characters(min_codepoint=32, max_codepoint=126), max_size=8),
    ),
    max_size=5,
).map("".join)
pictures = st.builds(lambda w, h: Path(f"{w}x{h}.png"), st.integers(1, 40), st.integers(1, 40))
prompts = st.lists(st.one_of(texts, pictures), min_size=1, max_size=6).map(lambda values: user(*values))
few = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@few
@given(prompts)
def test_ids_mask_positions_and_items_agree(tiny, prompt):
    encoded = encode(tiny, prompt)
    tokenizer = tiny.tokenizer
    content = prompt.messages[0]["content"]
    images = [p for p in content if p["type"] == "image"]

    rendered = "".join(p["text"] if p["type"] == "text" else "<|vision_start|><|vision_end|>" for p in content)
    assert tokenizer.decode(encoded.ids[~encoded.media_mask]) == "<|im_start|>" + rendered
    assert (encoded.ids[encoded.media_mask] == tiny.image_token_id).all()
    assert not (encoded.ids[~encoded.media_mask] == tiny.image_token_id).any()
    vision_start = tokenizer.convert_tokens_to_ids("<|vision_start|>")
    assert (encoded.ids == vision_start).sum() == len(images)

    assert [item.path for item in encoded.items] == [str(p["image"]) for p in images]
    assert encoded.media_mask.sum() == sum(item.feature_count(2) for item in encoded.items)
    assert encoded.media_mask.sum() * 4 == sum(len(item.pixels) for item in encoded.items)
    assert len(encoded.ids) == len(encoded.media_mask)
    grids = [item.grid for item in encoded.items]
    positions, next_position = mrope_positions(encoded.media_mask, grids, 2)
    assert torch.equal(encoded.positions, positions) and encoded.next_position == next_position


@few
@given(prompts.filter(lambda p: p.media_paths), st.integers(0, 2), st.sampled_from([-1, 1, 2, 4]), st.data())
def test_a_false_grid_trips_the_check(tiny, prompt, axis, change, data):
    victim = data.draw(st.integers(0, len(prompt.media_paths) - 1))
    calls = iter(range(len(prompt.media_paths)))

    def load(kind, path):
        item = prepare_image(picture(path), tiny.image_processor, path)
        grid = list(item.grid)
        grid[axis] += change
        return replace(item, grid=tuple(grid)) if next(calls) == victim else item

    with pytest.raises(ExpansionError):
        encode(tiny, prompt, load_item=load)


def test_the_check_names_row_item_counts_and_grid(tiny):
    def load(kind, path):
        return replace(prepare_image(picture(path), tiny.image_processor, path), grid=(1, 4, 6))

    with pytest.raises(ExpansionError) as error:
        encode(tiny, user(A, "?", index=17), load_item=load)
    message = "row 17: 16x16.png fills 6 media tokens but has 4 features (16 patches, grid (1, 4, 6), merge 2 x 2)"
    assert str(error.value) == message


def test_a_template_that_loses_or_adds_media_is_caught(tiny):
    processor = copy.copy(tiny)
    processor.chat_template = "{% for m in messages %}<|im_start|>{{ m.content[-1].text }}{% endfor %}"
    with pytest.raises(ExpansionError, match="row 3: the chat template wrote 0 image placeholders for 1 images"):
        encode(processor, user(A, "?", index=3))
    processor.chat_template = "<|image_pad|>?"
    with pytest.raises(ExpansionError, match="wrote 1 image placeholders for 0 images"):
        encode(processor, user("?"))


def test_a_row_that_the_template_refuses_is_named(tiny):
    processor = copy.copy(tiny)
    processor.chat_template = "{{ raise_exception('no system turns here') }}"
    with pytest.raises(PromptError, match="row 2: refused by the chat template: no system turns here"):
        encode(processor, user("?", index=2))


def test_the_template_cannot_print_file_names(tiny):
    processor = copy.copy(tiny)
    processor.chat_template = "{{ messages[0].content }}<|image_pad|>"
    assert "16x16" not in processor.tokenizer.decode(encode(processor, user(A)).ids)


def test_too_long_a_prompt_is_refused_whole(tiny):
    prompt = user(A, "?", index=5)
    assert len(encode(tiny, prompt, max_prompt_tokens=8).ids) == 8
    with pytest.raises(PromptTooLong, match="row 5: 8 tokens, but max_prompt_tokens = 7"):
        encode(tiny, prompt, max_prompt_tokens=7)


def test_video_is_refused_by_name(tiny):
    message = {"role": "user", "content": [{"type": "video", "video": Path("a.mp4")}]}
    with pytest.raises(PromptError, match="row 0: a part of type 'video' is not supported"):
        encode(tiny, Prompt(0, (message,), "answer", "test"))


def test_a_tokenizer_without_the_media_token_is_named(tiny):
    processor = copy.copy(tiny)
    processor.image_token = "<image>"
    with pytest.raises(UserError, match="no special token '<image>'"):
        encode(processor, user("?"))


def test_the_prompt_is_left_as_it_was(tiny):
    prompt = user("<|im_end|>", A)
    before = copy.deepcopy(prompt)
    encode(tiny, prompt)
    assert prompt == before


def test_the_position_rule_is_given_the_mask_and_the_grid_of_each_run(tiny):
    seen = []

    def flat(media_mask, grids, merge_size):
        seen.append((media_mask.sum().item(), list(grids), merge_size))
        return torch.arange(len(media_mask)).expand(3, -1), 99

    encoded = encode(tiny, user(A, WIDE), positions=flat)
    assert seen == [(12, [(1, 4, 4), (1, 2, 16)], 2)]
    assert encoded.positions[2].tolist() == list(range(len(encoded.ids))) and encoded.next_position == 99
