"""Damaged files of images: read, or refused with a reason; nothing else comes out."""

import random
import warnings
from collections import Counter
from pathlib import Path

import pytest
from command import ROOT
from PIL import Image

from ftkit.data.records.record import Misfit
from ftkit.extensions.images.files import MOST_PIXELS, checked_size, decode, reference
from ftkit.extensions.images.found_files import BrokenMedium, read_file

TRIES = 250
NAMES = ("a.png", "a.jpg", "a.webp", "a.gif")


@pytest.mark.parametrize("name", NAMES)
def test_damage_is_refused_by_name(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(ROOT / "scripts")
    from fuzzing.mutations import mutate

    file, ended = tmp_path / name, Counter[str]()
    picture = Image.frombytes("RGB", (40, 30), random.Random(0).randbytes(40 * 30 * 3))
    for number in range(TRIES):
        if file.is_dir():
            file.rmdir()
        file.unlink(missing_ok=True)
        picture.save(file)
        what = mutate(file, random.Random(f"{name} {number}"))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the decoder, about what it repairs
            try:
                reference(name, tmp_path)
            except Misfit:
                ended["refused"] += 1
                continue
            content = read_file(file)
            try:
                image = decode(content)
            except BrokenMedium:
                ended["refused"] += 1
                with pytest.raises(BrokenMedium):
                    checked_size(content)
                continue
            assert checked_size(content) == image.size, what
        assert image.mode == "RGB", what
        assert image.width * image.height <= MOST_PIXELS, what
        ended["read"] += 1
    assert ended["refused"] > TRIES / 10 and ended["read"]
