import pytest
from PIL import Image


@pytest.fixture
def folder(tmp_path):
    """A data folder with `images/a.png`, `images/b.png`, `images/broken.png` and `clips/a.mp4` (not looked into)."""
    folder = tmp_path / "data"
    (folder / "images").mkdir(parents=True)
    for name in ("a", "b"):
        Image.new("RGB", (4, 4)).save(folder / "images" / f"{name}.png")
    (folder / "images" / "broken.png").write_bytes(b"no picture")
    (folder / "clips").mkdir()
    (folder / "clips" / "a.mp4").write_bytes(b"a clip")
    Image.new("RGB", (4, 4)).save(tmp_path / "outside.png")
    return folder
