"""The manifest tells every kind of damage, to the checkpoint's files and to itself."""

import pytest

from megarl.training.manifest import Damaged, Entry, Manifest


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "weights").write_bytes(bytes(range(256)) * 40)
    (tmp_path / "progress").write_bytes(b"{}")
    files = {path.name: Entry.of(path) for path in tmp_path.iterdir()}
    Manifest(3, 0.5, files).write(tmp_path)
    return tmp_path


def test_whole(folder):
    found = Manifest.read(folder)
    assert (found.number, found.score, set(found.files)) == (3, 0.5, {"weights", "progress"})
    assert found.fault(folder) is None
    (folder / "weights.tmp").write_text("what is not listed does not matter")
    assert found.fault(folder) is None


def flip(path, place):
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    "damage, words",
    [
        (lambda path: path.unlink(), "is missing"),
        (lambda path: path.write_bytes(path.read_bytes()[:-1]), "has 10239 bytes and should have 10240"),
        (lambda path: path.write_bytes(path.read_bytes() + b"x"), "has 10241 bytes"),
        (lambda path: path.write_bytes(b""), "has 0 bytes"),
        (lambda path: flip(path, 0), "SHA-256 differs"),
        (lambda path: flip(path, -1), "SHA-256 differs"),
    ],
)
def test_damaged_file(folder, damage, words):
    damage(folder / "weights")
    fault = Manifest.read(folder).fault(folder)
    assert str(folder / "weights") in fault and words in fault and "\n" not in fault


def test_every_flipped_bit_of_the_manifest_is_seen(folder):
    path = folder / "manifest.json"
    content = path.read_bytes()
    for place in range(len(content)):
        path.write_bytes(content[:place] + bytes([content[place] ^ 4]) + content[place + 1 :])
        with pytest.raises(Damaged, match="manifest.json is truncated or changed"):
            Manifest.read(folder)
    path.write_bytes(content)
    Manifest.read(folder)


def test_every_truncation_of_the_manifest_is_seen(folder):
    path = folder / "manifest.json"
    content = path.read_bytes()
    for size in range(len(content)):
        path.write_bytes(content[:size])
        with pytest.raises(Damaged):
            Manifest.read(folder)
    path.unlink()
    with pytest.raises(Damaged, match="is missing"):
        Manifest.read(folder)


def test_parts_are_all_of_it(folder):
    """Ranks share the reading: whatever is damaged, one of them sees it."""
    for name in ("weights", "progress"):
        flip(folder / name, 1)
        found = Manifest.read(folder)
        assert sum(found.fault(folder, part, 3) is not None for part in range(3)) == 1
        flip(folder / name, 1)
