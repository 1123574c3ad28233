import copy
from dataclasses import replace

import pytest
import torch

from megarl.errors import ExpansionError, PromptError, PromptTooLong, UserError
from megarl.media.expand import media_tokens
from tests.media.prompts import conversation, encode, load, media, reference, reference_positions, user

A, B, WIDE = media("16x16.png"), media("24x16.png"), media("64x8.png")
EVEN, ODD, ONE = media("16x16x4.mp4"), media("24x16x5@30.mp4"), media("16x24x1@29.97.mp4")


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
        user(EVEN, "?"),
        user("what is in ", ODD, " and ", EVEN, ", count:"),
        user(ODD, ODD, ONE),
        user(A, EVEN, "and", B, ODD, WIDE),
        user("<1.0 seconds>", ONE, "<", EVEN, ">\n"),
        conversation(("system", "count:"), ("user", EVEN, "one"), ("assistant", "1"), ("user", A, ODD, "and?")),
    ],
    ids=range(14),
)
def test_is_what_transformers_makes_of_a_normal_prompt(request, family, prompt):
    processor = request.getfixturevalue(family)
    expected = reference(processor, prompt)
    encoded = encode(processor, prompt)
    assert encoded.ids.dtype == torch.int64 and encoded.media_mask.dtype == torch.bool
    assert encoded.ids.tolist() == expected["input_ids"][0].tolist()
    assert encoded.media_mask.tolist() == (expected["mm_token_type_ids"][0] != 0).tolist()
    for kind, pixels, grids in [
        ("image", "pixel_values", "image_grid_thw"),
        ("video", "pixel_values_videos", "video_grid_thw"),
    ]:
        items = [item for item in encoded.items if item.kind == kind]
        assert [list(item.grid) for item in items] == (expected[grids].tolist() if items else [])
        assert not items or torch.equal(torch.cat([item.pixels for item in items]), expected[pixels])
    assert [item.name for item in encoded.items] == [source.name for source in prompt.media]

    positions, next_position = reference_positions(expected)
    assert torch.equal(encoded.positions, positions) and encoded.next_position == next_position


@pytest.mark.parametrize("rate", ["1", "7", "10", "12.5", "23.976", "24", "25", "29.97", "30", "60", "1000"])
@pytest.mark.parametrize("frames", [1, 2, 3, 8])
def test_frames_are_named_by_their_times_at_any_rate(tiny, rate, frames):
    prompt = user(media(f"8x8x{frames}@{rate}.mp4"))
    assert encode(tiny, prompt).ids.tolist() == reference(tiny, prompt)["input_ids"][0].tolist()


def test_at_a_variable_rate_too(tiny):
    video = media("8x8x5.mp4")
    times = {video.name: (0.0, 0.04, 3.0, 3.6, 61.26)}
    encoded = encode(tiny, user(video, "?"), load_item=lambda source: load(tiny, source, times))
    frame = "<|vision_start|><|video_pad|><|vision_end|>"
    frames = f"<0.0 seconds>{frame}<3.3 seconds>{frame}<61.3 seconds>{frame}"
    assert tiny.tokenizer.decode(encoded.ids) == f"<|im_start|><|vision_start|>{frames}<|vision_end|>?"
    assert encoded.items[0].timestamps == times[video.name], "the list that transformers extends is a copy"
    assert encoded.items[0].grid == (3, 2, 2)


@pytest.mark.parametrize("times", [(), (0.0, 1.0), (0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0)])
def test_times_must_be_those_of_the_frames(tiny, times):
    def load_item(source):
        return replace(load(tiny, source), timestamps=times)

    message = f"row 4: 8x8x5.mp4 has the times of {len(times)} frames; its grid"
    with pytest.raises(ExpansionError, match=message):
        encode(tiny, user(media("8x8x5.mp4"), row=4), load_item=load_item)


SPELLED_OUT = ["<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>", "<|im_start|>", "<|im_end|>"]


@pytest.mark.parametrize("family", ["tiny", "qwen"])
@pytest.mark.parametrize("token", SPELLED_OUT)
def test_a_special_token_in_prose_is_ordinary_text(request, family, token):
    processor = request.getfixturevalue(family)
    tokenizer = processor.tokenizer
    number = tokenizer.convert_tokens_to_ids(token)
    harmless = encode(processor, user(A, "say it", EVEN)).ids.tolist()
    encoded = encode(processor, user(A, f"say {token} it", EVEN))
    assert encoded.ids.tolist().count(number) == harmless.count(number)
    assert encoded.media_mask.sum() == sum(item.feature_count(2) for item in encoded.items)
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


@pytest.mark.parametrize(
    ("source", "grid", "message"),
    [
        (A, (1, 4, 6), "16x16.png fills 6 media tokens but has 4 features (16 patches, grid (1, 4, 6), merge 2 x 2)"),
        (A, (1, 2, 2), "16x16.png fills 1 media tokens but has 4 features (16 patches, grid (1, 2, 2), merge 2 x 2)"),
        (A, (1, 16, 1), "16x16.png fills 4 media tokens but has 4 features (16 patches, grid (1, 16, 1), merge 2 x 2)"),
        (A, (1, 0, 4), "16x16.png fills 0 media tokens but has 4 features (16 patches, grid (1, 0, 4), merge 2 x 2)"),
        (
            A,
            (1, -4, -4),
            "16x16.png fills 4 media tokens but has 4 features (16 patches, grid (1, -4, -4), merge 2 x 2)",
        ),
        (
            media("16x16x2.mp4"),
            (1, 4, 6),
            "16x16x2.mp4 fills 6 media tokens but has 4 features (16 patches, grid (1, 4, 6), merge 2 x 2)",
        ),
        (
            EVEN,
            (2, 4, 2),
            "16x16x4.mp4 fills 4 media tokens but has 8 features (32 patches, grid (2, 4, 2), merge 2 x 2)",
        ),
        (EVEN, (3, 4, 4), "16x16x4.mp4 has the times of 4 frames; its grid (3, 4, 4) holds 2 a temporal patch"),
    ],
    ids=range(8),
)
def test_the_check_names_row_item_counts_and_grid(tiny, source, grid, message):
    with pytest.raises(ExpansionError) as error:
        encode(tiny, user(source, "?", row=17), load_item=lambda s: replace(load(tiny, s), grid=grid))
    assert str(error.value) == f"row 17: {message}"


def test_tokens_that_fit_the_features_but_not_the_grid_are_caught(tiny, monkeypatch):
    monkeypatch.setattr(type(tiny), "replace_image_token", lambda *_: "<|image_pad|>" * 4)
    with pytest.raises(ExpansionError, match=r"fills 4 media tokens but has 4 features \(16 patches, grid \(1, 4, 6\)"):
        encode(tiny, user(A), load_item=lambda source: replace(load(tiny, source), grid=(1, 4, 6)))


def test_runs_that_are_no_frames_are_caught(tiny, monkeypatch):
    """A processor that writes as many tokens as there are features, but not frame by frame."""
    pad = "<|video_pad|>"
    for text in (f"{pad * 3}<{pad * 5}", f"{pad * 2}<{pad * 2}<{pad * 2}<{pad * 2}"):
        monkeypatch.setattr(type(tiny), "replace_video_token", lambda *_, text=text: text)
        with pytest.raises(ExpansionError, match=r"row 1: 16x16x4.mp4 fills runs of \[.*\] media tokens; its grid"):
            encode(tiny, user(EVEN))


def test_a_family_may_write_a_video_as_one_run(tiny, monkeypatch):
    seen = []

    def rule(mask, grids, merge_size, seconds):
        seen.append((grids, seconds))
        return torch.zeros(3, len(mask), dtype=torch.int64), 0

    monkeypatch.setattr(type(tiny), "replace_video_token", lambda *_: "<|video_pad|>" * 8)
    encoded = encode(tiny, user(EVEN, A), positions=rule)
    assert seen == [([(2, 4, 4), (1, 4, 4)], [0.2, 0.0])] and encoded.media_mask.sum() == 12


def test_a_template_that_loses_or_adds_media_is_caught(tiny):
    processor = copy.copy(tiny)
    processor.chat_template = "{% for m in messages %}<|im_start|>{{ m.content[-1].text }}{% endfor %}"
    with pytest.raises(ExpansionError, match="row 3: the chat template wrote 0 image placeholders for 1 images"):
        encode(processor, user(A, "?", row=3))
    with pytest.raises(ExpansionError, match="row 3: the chat template wrote 0 video placeholders for 1 videos"):
        encode(processor, user(EVEN, "?", row=3))
    processor.chat_template = "<|image_pad|>?"
    with pytest.raises(ExpansionError, match="wrote 1 image placeholders for 0 images"):
        encode(processor, user("?"))
    with pytest.raises(ExpansionError, match="wrote 1 image placeholders for 0 images"):
        encode(processor, user(EVEN))


def test_a_template_that_moves_media_moves_the_items(tiny):
    processor = copy.copy(tiny)
    processor.chat_template = "<|video_pad|>, <|image_pad|>, <|image_pad|>"
    encoded = encode(processor, user(A, WIDE, ODD))
    assert encoded.items[0].kind == "video" and [item.name for item in encoded.items[1:]] == [A.name, WIDE.name]
    assert encoded.ids.tolist() == reference(processor, user(A, WIDE, ODD))["input_ids"][0].tolist()


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{{ raise_exception('no system\n turns here') }}", "no system turns here"),
        ("{{ messages[0].content + '' }}", "can only concatenate list"),
        ("{{ messages[7].role.upper() }}", "has no element 7"),
        ("{{ 1 // 0 }}", "integer .*zero"),
    ],
)
def test_a_row_that_the_template_refuses_is_named(tiny, template, reason):
    processor = copy.copy(tiny)
    processor.chat_template = template
    with pytest.raises(PromptError, match=f"row 2: refused by the chat template: .*{reason}"):
        encode(processor, user("?", row=2))


def test_text_that_is_no_unicode_is_named(tiny):
    with pytest.raises(PromptError, match="row 2: half of a surrogate pair in the text of a message"):
        encode(tiny, user("\ud800 is half a letter", row=2))


def test_the_template_cannot_print_file_names(tiny):
    processor = copy.copy(tiny)
    processor.chat_template = "{{ messages[0].content }}<|image_pad|>"
    assert "16x16" not in processor.tokenizer.decode(encode(processor, user(A)).ids)


def test_too_long_a_prompt_is_refused_whole(tiny):
    prompt = user(A, "?", row=5)
    assert len(encode(tiny, prompt, max_prompt_tokens=8).ids) == 8
    with pytest.raises(PromptTooLong, match="row 5: 8 tokens, but max_prompt_tokens = 7"):
        encode(tiny, prompt, max_prompt_tokens=7)


def test_what_the_processor_has_no_part_for_is_refused_by_name(tiny):
    processor = copy.copy(tiny)
    processor.video_processor = None
    assert encode(processor, user(A)).items
    with pytest.raises(PromptError, match="row 1: a part of type 'video' is not supported; accepted: image, text"):
        encode(processor, user(EVEN))


@pytest.mark.parametrize("kind", ["image", "video"])
def test_a_tokenizer_without_the_media_token_is_named(tiny, kind):
    processor = copy.copy(tiny)
    setattr(processor, f"{kind}_token", "<media>")
    with pytest.raises(UserError, match=f"no special token '<media>' for {kind}s; its special tokens: <|endoftext|>"):
        media_tokens(processor)


def test_kinds_that_are_merged_differently_are_refused(tiny):
    processor = copy.copy(tiny)
    processor.video_processor = copy.copy(tiny.video_processor)
    processor.video_processor.merge_size = 4
    with pytest.raises(UserError, match="merge_size is 2 for images and 4 for videos"):
        media_tokens(processor)


def test_the_prompt_is_left_as_it_was(tiny):
    prompt = user("<|im_end|>", A)
    before = copy.deepcopy(prompt)
    encode(tiny, prompt)
    assert prompt == before


def test_the_position_rule_is_given_the_mask_and_the_grid_of_each_run(tiny):
    seen = []

    def flat(media_mask, grids, merge_size, seconds):
        seen.append((media_mask.sum().item(), list(grids), merge_size))
        return torch.arange(len(media_mask)).expand(3, -1), 99

    encoded = encode(tiny, user(A, WIDE, ODD), positions=flat)
    frame = (1, *encoded.items[2].grid[1:])
    count = 12 + encoded.items[2].feature_count(2)
    assert seen == [(count, [(1, 4, 4), (1, 2, 16), frame, frame, frame], 2)]
    assert encoded.positions[2].tolist() == list(range(len(encoded.ids))) and encoded.next_position == 99
