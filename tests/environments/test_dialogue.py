import io

import pytest
from PIL import Image

from megarl.data.prompt import Prompt
from megarl.environments.dialogue import Media, Reply, as_prompt
from megarl.media.image import load_image

PROMPT = Prompt(4, 7, (), "right", "charts")


def test_a_reply_becomes_messages():
    """Pictures come back as they were, whatever their mode; the answer stays with the reward."""
    red, grey = Image.new("RGB", (5, 3), (255, 0, 0)), Image.new("L", (2, 2), 9)
    prompt = as_prompt(Reply(("look", red, grey, Media("video", b"bytes"), "?"), "tool"), PROMPT, 2)
    (message,) = prompt.messages
    assert message["role"] == "tool"
    assert [part["type"] for part in message["content"]] == ["text", "image", "image", "video", "text"]
    assert [source.name for source in prompt.media] == [f"row 7, reply to turn 2, part {n}" for n in (1, 2, 3)]
    first, second, video = prompt.media
    assert load_image(first).tobytes() == red.tobytes()
    assert load_image(second).getpixel((0, 0)) == (9, 9, 9)
    assert video.data == b"bytes" and video.path is None
    assert (prompt.index, prompt.row, prompt.source, prompt.answer) == (4, 7, "charts", "")


def test_bytes_of_a_file_stay():
    stream = io.BytesIO()
    Image.new("RGB", (4, 4)).save(stream, "JPEG")
    prompt = as_prompt(Reply((Media("image", stream.getvalue()),)), PROMPT, 1)
    assert prompt.media[0].data == stream.getvalue()


@pytest.mark.parametrize(
    "reply, complaint",
    [
        ("go on", "row 7, reply to turn 1: of type str, not a Reply"),
        (Reply(("x",), "system"), "row 7, reply to turn 1: role 'system'; accepted: user, tool"),
        (Reply(()), "row 7, reply to turn 1: has no content"),
        (Reply(("x", 3)), "row 7, reply to turn 1, part 1: of type int, not a text, a Pillow image or Media"),
    ],
)
def test_what_is_no_reply(reply, complaint):
    with pytest.raises((TypeError, ValueError)) as error:
        as_prompt(reply, PROMPT, 1)
    assert str(error.value) == complaint
