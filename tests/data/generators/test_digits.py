import hashlib
import json

import numpy as np
import pytest
from PIL import Image
from sklearn.datasets import load_digits

from megarl.data.folder import whole_folder
from megarl.data.generators.digits import write_digits
from megarl.data.prompts import load_prompts
from megarl.errors import UserError


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data") / "digits"
    write_digits(folder)
    return folder


def test_rows(folder):
    train = [json.loads(line) for line in (folder / "train.jsonl").read_text().splitlines()]
    test = [json.loads(line) for line in (folder / "test.jsonl").read_text().splitlines()]
    assert (len(train), len(test)) == (1437, 360)
    assert [row["answer"] for row in train + test] == [str(digit) for digit in load_digits().target]
    assert train[0] == {
        "messages": [
            {
                "role": "user",
                "content": [{"type": "image", "image": "images/0000.png"}, {"type": "text", "text": "?"}],
            }
        ],
        "answer": "0",
        "source": "digits",
    }
    assert test[-1]["messages"][0]["content"][0]["image"] == "images/1796.png"


def test_pictures(folder):
    assert len(list((folder / "images").iterdir())) == 1797
    scan = load_digits().images[0]
    with Image.open(folder / "images" / "0000.png") as image:
        assert (image.format, image.mode, image.size) == ("PNG", "RGB", (16, 16))
        pixels = np.asarray(image, dtype=float)
    assert (pixels[..., 0] == pixels[..., 1]).all()
    blocks = pixels[..., 0].reshape(8, 2, 8, 2).mean((1, 3))
    assert np.corrcoef(blocks.ravel(), scan.ravel())[0, 1] > 0.98
    assert pixels.min() == 0 and pixels.max() > 240


def test_is_accepted_in_full(folder):
    for name, count in (("train.jsonl", 1437), ("test.jsonl", 360)):
        prompts, rejections = load_prompts(folder / name)
        assert (len(prompts), rejections) == (count, [])


def test_the_bytes_are_the_same_every_time(folder, tmp_path):
    def digest(root):
        files = sorted(path for path in root.rglob("*") if path.is_file())
        content = b"".join(str(path.relative_to(root)).encode() + path.read_bytes() for path in files)
        return hashlib.sha256(content).hexdigest()

    write_digits(tmp_path)  # an empty folder that is there already
    assert digest(tmp_path) == digest(folder)


def test_nothing_is_overwritten(folder):
    before = (folder / "train.jsonl").stat().st_mtime_ns
    with pytest.raises(UserError, match=f"{folder} is there already"):
        write_digits(folder)
    assert (folder / "train.jsonl").stat().st_mtime_ns == before


def test_a_failure_leaves_nothing(tmp_path):
    with pytest.raises(RuntimeError), whole_folder(tmp_path / "made") as temporary:
        (temporary / "half").touch()
        assert not (tmp_path / "made").exists()
        raise RuntimeError
    assert list(tmp_path.iterdir()) == []


def test_of_two_writers_one_wins(tmp_path):
    with pytest.raises(UserError, match="is there already"), whole_folder(tmp_path / "made") as slow:
        (slow / "slow").touch()
        with whole_folder(tmp_path / "made") as fast:
            (fast / "fast").touch()
    assert [path.name for path in tmp_path.iterdir()] == ["made"]
    assert [path.name for path in (tmp_path / "made").iterdir()] == ["fast"]


def test_a_file_in_the_way_is_named(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="file is there already"), whole_folder(tmp_path / "file"):
        pass
