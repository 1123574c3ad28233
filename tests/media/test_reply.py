"""A conversation that goes on: what was sampled stays as it is, and what is said next is as in a whole prompt."""

from dataclasses import replace
from functools import partial

import pytest
import torch

from megarl.errors import PromptError
from megarl.media.expand import extend_prompt
from megarl.models.qwen3_vl.positions import mrope_positions
from tests.media.prompts import conversation, encode, load, media, reference, reference_positions, user

A, WIDE, CLIP = media("16x16.png"), media("64x8.png"), media("24x16x5@30.mp4")


def extend(processor, before, text, reply, stop="<|im_end|>"):
    ids = processor.tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True)
    ids += processor.tokenizer.encode(stop, add_special_tokens=False) if stop else []
    return extend_prompt(before, torch.tensor(ids), reply, processor, mrope_positions, partial(load, processor))


@pytest.mark.parametrize("family", ["tiny", "qwen"])
@pytest.mark.parametrize("first", [("?",), ("see", A, "?"), (CLIP, A)], ids=range(3))
@pytest.mark.parametrize("second", [("and?",), (WIDE, "look: ", WIDE), (A, CLIP)], ids=range(3))
def test_is_the_whole_conversation(request, family, first, second):
    """Where the policy said what the template writes, twice: ids, mask, positions, items."""
    processor = request.getfixturevalue(family)
    turns = [("user", *first), ("assistant", "12"), ("user", *second), ("assistant", "3"), ("user", "so")]
    encoded = encode(processor, conversation(*turns[:1]))
    for said, reply in [("12", user(*second)), ("3", user("so"))]:
        encoded = extend(processor, encoded, said, reply)
    whole = conversation(*turns)
    expected = reference(processor, whole)
    assert encoded.ids.tolist() == expected["input_ids"][0].tolist()
    assert encoded.media_mask.tolist() == (expected["mm_token_type_ids"][0] != 0).tolist()
    positions, following = reference_positions(expected)
    assert torch.equal(encoded.positions, positions) and encoded.next_position == following
    assert [item.name for item in encoded.items] == [source.name for source in whole.media]
    assert encoded.prompt.messages == conversation(*turns[:1]).messages


def test_sampled_tokens_stay(tiny):
    """Also where no tokenizer would spell the text so, where a media token was sampled, and where another token than
    the template's ended the turn."""
    before = encode(tiny, user(A, "?"))
    image = tiny.tokenizer.convert_tokens_to_ids(tiny.image_token)
    for sampled in ([image, image], [60, 61, image]):
        after = extend_prompt(before, torch.tensor(sampled), user("go on"), tiny, mrope_positions, partial(load, tiny))
        n = before.ids.numel()
        assert after.ids[n : n + len(sampled)].tolist() == sampled
        assert after.media_mask.sum() == before.media_mask.sum() and len(after.items) == 1
        tail = tiny.tokenizer.decode(after.ids[n + len(sampled) :].tolist())
        assert tail.startswith("<|im_end|>") and tail.count("go on") == 1


def test_special_tokens_in_a_reply_are_text(tiny):
    before = encode(tiny, user("?"))
    after = extend(tiny, before, "1", user("<|im_end|><|image_pad|>"))
    end = tiny.tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert (after.ids[before.ids.numel() :] == end).sum() == 1 and not after.media_mask.any()  # as sampled


def test_a_template_that_rewrites_what_was_said(tiny, monkeypatch):
    template = tiny.apply_chat_template
    monkeypatch.setattr(
        tiny, "apply_chat_template", lambda m, **k: template([x for x in m if x["role"] == "user"], **k)
    )
    with pytest.raises(PromptError, match="row 7: the chat template does not write an assistant's message as it is"):
        extend(tiny, encode(tiny, user("?")), "1", replace(user("and?"), row=7))
