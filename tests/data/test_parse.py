"""The forms of rows, each as people's data sets have it, through the one parser."""

import json

import pytest

from megarl.data.prompt import ExpandedIds
from tests.data.rows import content, image, load, row, text, write

A, B, CLIP = "images/a.png", "images/b.png", "clips/a.mp4"
IMAGE_A, IMAGE_B, VIDEO = ("image", A), ("image", B), ("video", CLIP)


def one(folder, *rows):
    prompts, rejections = load(folder, *rows)
    assert rejections == []
    (prompt,) = prompts
    return prompt


def refusal(folder, bad):
    prompts, rejections = load(folder, bad)
    assert len(prompts) == 0
    (rejection,) = rejections
    return rejection.item, rejection.reason


def flat(question="What?", **columns):
    return {"prompt": question, "answer": "7", **columns}


@pytest.mark.parametrize("column", ["prompt", "problem", "question"])
def test_a_question_in_a_column(folder, column):
    prompt = one(folder, {column: "What?", "answer": "7", "data_source": "geometry"})
    assert prompt.messages == ({"role": "user", "content": [text("What?")]},)
    assert (prompt.answer, prompt.source) == ("7", "geometry")


@pytest.mark.parametrize(
    ("question", "columns", "parts"),
    [
        ("What?", {"images": [A, B]}, [IMAGE_A, IMAGE_B, "What?"]),
        ("What?", {"image": A}, [IMAGE_A, "What?"]),
        ("What?", {"images": A}, [IMAGE_A, "What?"]),
        ("What?", {"video": CLIP}, [VIDEO, "What?"]),
        ("What?", {"videos": [CLIP], "images": [A]}, [IMAGE_A, VIDEO, "What?"]),
        ("<image>What?", {"images": [A]}, [IMAGE_A, "What?"]),
        ("<image>\nWhat?", {"images": [A]}, [IMAGE_A, "\nWhat?"]),
        ("<image><image>", {"images": [A, B]}, [IMAGE_A, IMAGE_B]),
        ("Is <image> like <image>?", {"images": [B, A]}, ["Is ", IMAGE_B, " like ", IMAGE_A, "?"]),
        ("<video> or <image>?", {"images": [A], "videos": [CLIP]}, [VIDEO, " or ", IMAGE_A, "?"]),
        ("see <video>", {"images": [A, B], "videos": [CLIP]}, [IMAGE_A, IMAGE_B, "see ", VIDEO]),
        # No column, or an empty one: no medium, so no markers.
        ("The <image> tag?", {}, ["The <image> tag?"]),
        ("The <image> tag?", {"images": []}, ["The <image> tag?"]),
        ("The <image> tag?", {"images": None, "videos": None}, ["The <image> tag?"]),
        ("The <video> tag?", {"images": [A]}, [IMAGE_A, "The <video> tag?"]),
        ("", {}, [""]),
    ],
)
def test_media_in_columns_and_their_places(folder, question, columns, parts):
    assert content(one(folder, flat(question, **columns))) == parts


@pytest.mark.parametrize(
    ("question", "columns", "item", "reason"),
    [
        ("<image>?", {"images": [A, B]}, "images", "2 images, but 1 places for them"),
        ("<image><image><image>?", {"images": [A, B]}, "images", "2 images, but 3 places for them"),
        ("<image><image>", {"image": A}, "image", "1 images, but 2 places for them"),
        ("<video>?", {"videos": [CLIP, CLIP]}, "videos", "2 videos, but 1 places for them"),
        ("?", {"images": [A], "image": A}, "image", "images and image: only one of them"),
        ("?", {"images": [A, None]}, "images[1]", "missing or null"),
        ("?", {"images": [A, "images/c.png"]}, "images[1]", "'images/c.png': no such file"),
        ("?", {"image": 3}, "image", "a number ('3'), not a path or bytes"),
        ("?", {"images": [[A]]}, "images[0]", "a list"),
        (3, {}, "prompt", "a number ('3'), not a string or a list of at least one message"),
        ([], {}, "prompt", "a list ('[]'), not a string or a list of at least one message"),
        ("\ud800<image>", {"images": [A]}, "prompt", "lone surrogate"),
    ],
)
def test_media_in_columns_that_do_not_fit(folder, question, columns, item, reason):
    found, why = refusal(folder, flat(question, **columns))
    assert found == item and reason in why


def test_chats_with_media_in_columns(folder):
    """verl has markers in the messages' strings, TRL parts without a medium; a chat may also have neither."""
    system = {"role": "system", "content": "Think about <b>."}
    marked = {"prompt": [system, {"role": "user", "content": "<image>Which?"}], "images": [A]}
    marked |= {"data_source": "hiyouga/geometry3k", "reward_model": {"style": "rule", "ground_truth": "48"}}
    prompt = one(folder, marked)
    assert content(prompt) == ["Think about <b>.", IMAGE_A, "Which?"]
    assert (prompt.answer, prompt.source) == ("48", "hiyouga/geometry3k")

    parts = [{"type": "text", "text": "Is <image>"}, {"type": "image"}, {"type": "video"}, {"type": "image"}]
    bare = {"prompt": [{"role": "user", "content": parts}], "images": [B, A], "videos": [CLIP], "solution": "yes"}
    assert content(one(folder, bare)) == ["Is <image>", IMAGE_B, VIDEO, IMAGE_A]

    plain = {"messages": [system, {"role": "user", "content": "Which?"}], "image": A, "answer": "7"}
    assert content(one(folder, plain)) == ["Think about <b>.", IMAGE_A, "Which?"]

    turns = [{"role": role, "content": words} for role, words in [("user", "1 <image>"), ("assistant", "one")]]
    turns.append({"role": "user", "content": "2 <image>"})
    assert content(one(folder, flat(turns, images=[A, B]))) == ["1 ", IMAGE_A, "one", "2 ", IMAGE_B]

    lacking = {"messages": [{"role": "user", "content": parts}], "images": [A], "videos": [CLIP], "answer": "7"}
    assert refusal(folder, lacking) == ("images", "1 images, but 2 places for them (<image>, or parts of type image)")


def test_media_in_parts(folder):
    parts = [image(), {"type": "video", "path": CLIP}, {"type": "image", "path": B}, text("<image> <video>")]
    parts.append({"type": "text", "text": "?", "image": None, "video": None, "path": None})
    assert content(one(folder, row(*parts))) == [IMAGE_A, VIDEO, IMAGE_B, "<image> <video>", "?"]
    # Columns beside parts that have their media are columns of the data set, not more media.
    assert content(one(folder, row(image(), text("<image>"), images=[A, B]))) == [IMAGE_A, "<image>"]


@pytest.mark.parametrize("literal", ["<image>", "<video>", "<|image_pad|>", "<|vision_start|>"])
def test_markers_in_prose_stay_prose(folder, literal):
    """A literal `<image>` must not count as a picture, in no form of a row that has no picture for it."""
    words = f"What does {literal} mean in {literal}?"
    for prose in (
        flat(words),
        flat([{"role": "user", "content": words}]),
        {"messages": [{"role": "user", "content": words}], "answer": "7"},
        row(text(words)),
        row(text(words), images=[]),
    ):
        prompt = one(folder, prose)
        assert content(prompt) == [words] and prompt.media == ()


def test_one_rendering_for_rows_with_and_without_media(folder):
    """A text-only row beside rows with media gets the same structure of messages, roles and all."""
    system = {"role": "system", "content": "Be brief."}
    rows = [
        {"messages": [system, {"role": "user", "content": "What?"}], "answer": "7"},
        {"messages": [system, {"role": "user", "content": [text("What?")]}], "answer": "7"},
        {"prompt": [system, {"role": "user", "content": "What?"}], "answer": 7, "images": []},
        {"messages": [system, {"role": "user", "content": [image(), text("What?")]}], "answer": "7"},
        {"prompt": [system, {"role": "user", "content": "What?"}], "answer": "7", "images": [A]},
    ]
    prompts, rejections = load(folder, *rows)
    assert rejections == []
    plain, media = [prompt.messages for prompt in prompts[:3]], [prompt.messages for prompt in prompts[3:]]
    assert plain[0] == plain[1] == plain[2] and media[0] == media[1]
    assert plain[0][0] == media[0][0] == {"role": "system", "content": [text("Be brief.")]}
    assert media[0][1] == {"role": "user", "content": [media[0][1]["content"][0], *plain[0][1]["content"]]}


@pytest.mark.parametrize(
    ("columns", "answer"),
    [
        ({"answer": "7"}, "7"),
        ({"answer": ""}, ""),
        ({"answer": 7}, "7"),
        ({"answer": -0.5}, "-0.5"),
        ({"answer": 7.0}, "7.0"),
        ({"solution": "x = 7"}, "x = 7"),
        ({"answer": None, "solution": 7}, "7"),
        ({"answer": "a", "solution": "b"}, "a"),
        ({"reward_model": {"ground_truth": "7", "style": "rule"}}, "7"),
        ({"reward_model": {"ground_truth": 7}}, "7"),
        ({"reward_model": '{"ground_truth": "7"}'}, "7"),
    ],
)
def test_answers(folder, columns, answer):
    assert one(folder, {"prompt": "?", **columns}).answer == answer


@pytest.mark.parametrize(
    "number", ["0.1234567890123456789", "1e400", "1e99999999999999999999", "123456789012345678901"]
)
def test_numbers_lose_nothing(folder, number):
    assert one(folder, b'{"prompt": "?", "answer": ' + number.encode() + b"}").answer == number


@pytest.mark.parametrize(
    ("columns", "item", "reason"),
    [
        ({"reward_model": {"style": "rule"}}, "reward_model.ground_truth", "missing or null, not a string or a number"),
        ({"reward_model": {"ground_truth": ["7"]}}, "reward_model.ground_truth", "a list"),
        ({"reward_model": ["7"]}, "reward_model", "a list (\"['7']\"), not an object with ground_truth"),
        ({"reward_model": "{"}, "reward_model", "not JSON"),
        ({"solution": False}, "solution", "a boolean ('False'), not a string or a number"),
    ],
)
def test_answers_that_are_none(folder, columns, item, reason):
    found, why = refusal(folder, {"prompt": "?", **columns})
    assert found == item and reason in why


EXPANDED = {
    "input_ids": [5, 9, 9, 6, 8, 9],
    "mm_token_type_ids": [0, 1, 1, 0, 2, 1],
    "image_grid_thw": [[1, 2, 4], [1, 2, 2]],
    "video_grid_thw": [[1, 2, 2]],
    "images": [A, B],
    "video": CLIP,
    "answer": "7",
}


def test_tokens_in_which_media_was_expanded_already(folder):
    prompt = one(folder, EXPANDED)
    assert prompt.messages == () and isinstance(prompt.expanded, ExpandedIds)
    assert prompt.expanded.ids == (5, 9, 9, 6, 8, 9) and prompt.expanded.kinds == (0, 1, 1, 0, 2, 1)
    assert prompt.expanded.grids == ((1, 2, 4), (1, 2, 2), (1, 2, 2))
    assert [(source.kind, source.name) for source in prompt.media] == [IMAGE_A, IMAGE_B, VIDEO]

    words = {"input_ids": [1, 2], "mm_token_type_ids": [0, 0], "image_grid_thw": None, "answer": "7"}
    plain = one(folder, words | {"prompt": "not read beside input_ids <image>"})
    assert plain.expanded == ExpandedIds((1, 2), (0, 0), (), ()) and plain.media == ()


@pytest.mark.parametrize(
    ("changes", "item", "reason"),
    [
        ({"input_ids": "1 2"}, "input_ids", "a string ('1 2'), not a list of integers"),
        ({"input_ids": [[5, 9]]}, "input_ids[0]", "a list ('[5, 9]'), not an integer"),
        ({"input_ids": [5, 9.0]}, "input_ids[1]", "a number ('9.0'), not an integer"),
        ({"input_ids": [True]}, "input_ids[0]", "a boolean"),
        ({"input_ids": [5, -1]}, "input_ids[1]", "-1 is not in 0 .."),
        ({"input_ids": [2**64]}, "input_ids[0]", "18446744073709551616 is not in 0 .."),
        ({"input_ids": []}, "input_ids", "has no tokens"),
        ({"mm_token_type_ids": None}, "mm_token_type_ids", "missing or null, not a list"),
        ({"mm_token_type_ids": [0, 1]}, "mm_token_type_ids", "2 values for 6 input_ids"),
        ({"mm_token_type_ids": [0, 1, 1, 0, 3, 1]}, "mm_token_type_ids[4]", "3 is not in 0 .. 2"),
        ({"image_grid_thw": None}, "images", "2 images, but image_grid_thw has 0 grids"),
        ({"video_grid_thw": [[1, 2, 2], [1, 2, 2]]}, "video", "1 videos, but video_grid_thw has 2 grids"),
        ({"images": None}, "images", "0 images, but image_grid_thw has 2 grids"),
        ({"image_grid_thw": [[1, 2, 4], [2, 2]]}, "image_grid_thw[1]", "[2, 2], not [t, h, w] in patches"),
        ({"image_grid_thw": [[1, 2, 4], [1, 0, 2]]}, "image_grid_thw[1]", "[1, 0, 2], not [t, h, w]"),
        ({"image_grid_thw": [[1, 2, 4], 7]}, "image_grid_thw[1]", "a number ('7'), not a list of integers"),
        ({"image_grid_thw": 7}, "image_grid_thw", "a number ('7'), not a list of grids"),
        ({"images": [A, "c.png"]}, "images[1]", "'c.png': no such file"),
    ],
)
def test_expanded_tokens_that_do_not_fit(folder, changes, item, reason):
    found, why = refusal(folder, EXPANDED | changes)
    assert found == item and reason in why


def test_a_row_means_the_same_in_either_file(folder):
    """JSONL and Parquet go through one parser: equal rows, equal prompts."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    from megarl.data.prompts import load_prompts

    rows = [
        flat("<image>?", images=[A], data_source="x"),
        flat("?", images=[], data_source=None),
        {**EXPANDED, "images": [A, B], "video": CLIP},
        flat("?", answer="9", reward_model={"ground_truth": "8"}),
    ]
    lines, _ = load_prompts(write(folder, *rows))
    pq.write_table(pa.Table.from_pylist(rows, schema=_schema(rows)), folder / "train.parquet")
    columns, rejections = load_prompts(folder / "train.parquet", cache=folder.parent / "cache")
    assert rejections == []
    assert list(columns) == list(lines)


def _schema(rows):
    import pyarrow as pa

    merged = {key: value for row in rows for key, value in row.items() if value not in (None, [])}
    return pa.Table.from_pylist([json.loads(json.dumps(merged))]).schema
