"""The manifest tells every kind of damage, to the checkpoint's files and to itself."""

import pytest

from tests.damage import flip
from tests.distributed import lazy

manifest = lazy("megarl.training.manifest")

pytestmark = pytest.mark.ranks(1)


def _write(folder):
    (folder / "weights").write_bytes(bytes(range(256)) * 40)
    (folder / "progress").write_bytes(b"{}")
    files = {path.name: manifest.Entry.of(path) for path in folder.iterdir()}
    manifest.Manifest(3, 0.5, files).write(folder)
    return manifest.Manifest.read(folder)


def test_whole(tmp_path):
    found = _write(tmp_path)
    assert (found.number, found.score, set(found.files)) == (3, 0.5, {"weights", "progress"})
    assert found.fault(tmp_path) is None
    (tmp_path / "weights.tmp").write_text("what is not listed does not matter")
    assert found.fault(tmp_path) is None


def test_damaged_file(tmp_path):
    """One line, with the file's name."""
    found, path = _write(tmp_path), tmp_path / "weights"
    whole = path.read_bytes()
    for damage, words in (
        (path.unlink, "is missing"),
        (lambda: path.write_bytes(whole[:-1]), "has 10239 bytes and should have 10240"),
        (lambda: path.write_bytes(whole + b"x"), "has 10241 bytes"),
        (lambda: path.write_bytes(b""), "has 0 bytes"),
        (lambda: flip(path, 0), "SHA-256 differs"),
        (lambda: flip(path, -1), "SHA-256 differs"),
    ):
        damage()
        fault = found.fault(tmp_path)
        assert str(path) in fault and words in fault and "\n" not in fault
        path.write_bytes(whole)
        assert found.fault(tmp_path) is None


def test_every_changed_byte_of_the_manifest_is_seen(tmp_path):
    _write(tmp_path)
    path = tmp_path / "manifest.json"
    content = path.read_bytes()
    for place in range(len(content)):
        path.write_bytes(content[:place] + bytes([content[place] ^ 4]) + content[place + 1 :])
        with pytest.raises(manifest.Damaged, match="manifest.json is truncated or changed"):
            manifest.Manifest.read(tmp_path)
    path.write_bytes(content)
    manifest.Manifest.read(tmp_path)


def test_every_truncation_of_the_manifest_is_seen(tmp_path):
    _write(tmp_path)
    path = tmp_path / "manifest.json"
    content = path.read_bytes()
    for size in range(len(content)):
        path.write_bytes(content[:size])
        with pytest.raises(manifest.Damaged):
            manifest.Manifest.read(tmp_path)
    path.unlink()
    with pytest.raises(manifest.Damaged, match="is missing"):
        manifest.Manifest.read(tmp_path)


def test_parts_are_all_of_it(tmp_path):
    """Ranks share the reading: whatever is damaged, one of them sees it."""
    found = _write(tmp_path)
    for name in ("weights", "progress"):
        flip(tmp_path / name, 1)
        assert sum(found.fault(tmp_path, part, 3) is not None for part in range(3)) == 1
        flip(tmp_path / name, 1)
