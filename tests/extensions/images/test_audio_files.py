"""Audio of records: its forms, what is read of files, and what is refused by name."""

import base64
import importlib
import io
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import soxr
from hearing_models import RATE, SECONDS, PlainLoop, save_model, tone, write_chats
from messages import says
from PIL import Image

from ftkit.data.dataset import DataSets, load_data
from ftkit.data.records.record import Misfit
from ftkit.errors import UserError
from ftkit.extensions.images.audio_files import check_header, decode, reference
from ftkit.extensions.images.found_files import BrokenMedium
from ftkit.models.pretrained.tokenizer import Tokenizer
from ftkit.recipe.recipe import Component

Samples = np.ndarray[Any, Any]
Load = Callable[..., DataSets]


def _encoded(
    samples: Samples, rate: int = RATE, kind: str = "WAV", subtype: str = "PCM_16"
) -> bytes:
    stream = io.BytesIO()
    soundfile.write(stream, samples, rate, format=kind, subtype=subtype)
    return stream.getvalue()


WAV, FLAC = (_encoded(tone(0)[0], kind=kind) for kind in ("WAV", "FLAC"))


@pytest.mark.parametrize(
    ("kind", "subtype"),
    [("WAV", "PCM_U8"), ("WAV", "PCM_24"), ("WAV", "FLOAT"), ("WAV", "ULAW"), ("FLAC", "PCM_24")],
)
@pytest.mark.parametrize("number", range(3))
def test_audio_is_the_mean_of_its_channels_at_the_rate_of_the_model(
    kind: str, subtype: str, number: int
) -> None:
    samples, rate = tone(number)
    content = _encoded(samples, rate, kind, subtype)
    read, _ = soundfile.read(io.BytesIO(content), dtype="float32", always_2d=True)
    expected = soxr.resample(read.mean(axis=1), rate, RATE)
    found = decode(content, RATE)
    assert len(found) == check_header(content).resampled(RATE) == round(len(read) * RATE / rate)
    assert found == pytest.approx(expected)


def _with_bytes(content: bytes, place: int, value: bytes) -> bytes:
    return content[:place] + value + content[place + len(value) :]


HALF = np.full((800, 1), np.nan)
BROKEN = {
    "empty": (b"", "is empty"),
    "another format": (b"OggS" + WAV, "is neither WAV nor FLAC"),
    "a text": (b"hello", "is neither WAV nor FLAC"),
    "WAV that is cut off": (WAV[:-100], "is cut off"),
    "WAV of its first bytes": (WAV[:16], "is cut off"),
    "WAV without a header": (WAV[:4] + bytes(4) + WAV[8:12] + b"x" * 90, "is damaged"),
    "WAV without samples": (_encoded(np.zeros((0, 1))), "has no samples"),
    "WAV of another coding": (_encoded(tone(0)[0], subtype="IMA_ADPCM"), "is coded as IMA_ADPCM"),
    "WAV of numbers that are none": (_encoded(HALF, subtype="FLOAT"), "are no numbers"),
    "WAV of many channels": (_encoded(np.zeros((800, 17))), "has 17 channels"),
    "WAV of another rate": (_encoded(np.zeros(800), 500), "has 500 samples per second"),
    "FLAC that is cut off": (FLAC[: len(FLAC) // 2], "is damaged"),
    "FLAC of its first bytes": (FLAC[:20], "is damaged"),
    "FLAC of unknown length": (_with_bytes(FLAC, 22, bytes(4)), "does not say how long it is"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_audio_is_refused_by_name(name: str) -> None:
    content, why = BROKEN[name]
    with pytest.raises(BrokenMedium, match=why):
        decode(content, RATE)


def _directory(path: Path) -> None:
    path.mkdir()


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda path: None, "is not there"),
        (_directory, "is not a file"),
        (os.mkfifo, "is not a file"),
        (lambda path: path.write_bytes(b""), "is empty"),
        (lambda path: path.write_bytes(b"RIFF"), "is neither WAV nor FLAC"),
    ],
)
def test_a_file_that_is_no_audio_is_refused_by_name(
    make: Callable[[Path], object], why: str, tmp_path: Path
) -> None:
    make(tmp_path / "a.wav")
    with pytest.raises(Misfit) as refused:
        reference("a.wav", tmp_path)
    assert says(str(refused.value), tmp_path / "a.wav", why)


@pytest.mark.parametrize("url", ["https://a.b/c.wav", "s3://a/b.wav"])
def test_nothing_is_fetched(url: str, tmp_path: Path) -> None:
    with pytest.raises(Misfit) as refused:
        reference(url, tmp_path)
    assert says(str(refused.value), url, "Download")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("hears") / "model"
    save_model(directory)
    return directory


@pytest.fixture
def load(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> Load:
    """Gives the samples of records."""
    monkeypatch.setenv("FTKIT_CACHE_DIR", str(tmp_path / "cache"))

    def loaded(*rows: dict[str, Any], **options: Any) -> DataSets:
        file = tmp_path / "chats.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        args = {"path": str(file), "val_split_fraction": 0, **options}
        return load_data(Component(class_path="JSON", init_args=args), Tokenizer(model), 512)

    return loaded


ANSWER = {"role": "assistant", "content": "it is low"}
QUESTION = {"type": "text", "text": "what is it"}
DATA_URL = f"data:audio/wav;base64,{base64.b64encode(WAV).decode()}"


def _parts(part: dict[str, Any], **columns: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": [part, QUESTION]}, ANSWER], **columns}


def _marked(text: str = "<audio>what is it", **columns: Any) -> dict[str, Any]:
    said = {"role": "user", "content": text}
    return {"messages": [said, ANSWER], **columns}


@pytest.mark.parametrize(
    "row",
    [
        *(_parts({"type": "audio", key: "a.wav"}) for key in ("audio", "audio_url", "path", "url")),
        _parts({"type": "audio_url", "audio_url": {"url": "a.wav"}}),
        _parts({"type": "audio_url", "audio_url": {"url": DATA_URL}}),
        _parts({"type": "audio", "audio": {"bytes": base64.b64encode(WAV).decode()}}),
        _parts({"type": "audio"}, audios=["a.wav"]),
        _marked(audios=["a.wav"]),
        _marked(audio="a.wav"),
        {"instruction": "<audio>what is it", "output": "it is low", "audios": ["a.wav"]},
    ],
)
def test_every_form_makes_the_sample_that_transformers_makes(
    row: dict[str, Any], load: Load, model: Path, tmp_path: Path
) -> None:
    (tmp_path / "a.wav").write_bytes(WAV)
    data = load(row, row, chat_template="tokenizer")
    sample = data.train[0]
    loop = PlainLoop(model, tmp_path)
    inputs, labels = loop.sample(_marked(audios=["a.wav"]))
    assert sample.ids.tolist() == inputs["input_ids"][0].tolist()
    trained = [place for span in sample.trained.tolist() for place in range(*span)]
    assert trained == (labels[0] != -100).nonzero()[:, 0].tolist()
    assert data.train.media_reader is not None
    read = data.train.media_reader.read([sample.media], [sample.ids], None)
    (heard,) = read["inputs"]
    assert (heard["input_features"] == inputs["input_features"]).all()
    is_audio = inputs["input_ids"][0] == loop.model.config.audio_token_index
    assert read["places"].tolist() == is_audio.nonzero()[:, 0].tolist()


@pytest.mark.parametrize("count", [1, 160, 161, 319, 320, 321, 640, 5_000, RATE * SECONDS])
def test_audio_of_any_length_has_the_tokens_that_transformers_gives_it(
    count: int, load: Load, model: Path, tmp_path: Path
) -> None:
    (tmp_path / "a.wav").write_bytes(_encoded(tone(0)[0][:1].repeat(count, axis=0)))
    row = _marked(audios=["a.wav"])
    inputs, _ = PlainLoop(model, tmp_path).sample(row)
    token = Tokenizer(model).token_id("<|AUDIO|>")
    expected = inputs["input_ids"][0].tolist()
    if token not in expected:
        with pytest.raises(UserError) as refused:
            load(row, row)
        assert says(str(refused.value), "too short for one token")
    else:
        assert load(row, row).train[0].ids.tolist() == expected


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (_encoded(np.zeros((RATE * SECONDS + 1, 1))), f"takes {SECONDS} s at most"),
        (_encoded(np.zeros((44_100 * 3, 1)), 44_100), "lasts 3.0 s"),
        (FLAC[:-50], "is damaged"),
    ],
)
def test_audio_that_the_model_does_not_take_makes_a_bad_record(
    content: bytes, why: str, load: Load, tmp_path: Path
) -> None:
    (tmp_path / "a.wav").write_bytes(content)
    (tmp_path / "b.wav").write_bytes(WAV)
    rows = [_marked(audios=[name]) for name in ("a.wav", "b.wav", "b.wav")]
    with pytest.raises(UserError) as refused:
        load(*rows)
    assert says(str(refused.value), tmp_path / "a.wav", why, "--data.skip_bad_records true")
    assert load(*rows, skip_bad_records=True).counts["train"].used == 2


@pytest.mark.parametrize(
    ("row", "phrases"),
    [
        (_marked(audios=["a.wav", "a.wav"]), ("audios has 2", "1 place")),
        (_parts({"type": "audio"}), ("is an audio without a file",)),
        (_marked(audios=["a.wav"], images=["a.png"]), ("images has 1", "0 places")),
        (
            _marked(audios=["a.wav"], text="<audio><|AUDIO|>"),
            ("token of audio", "<|AUDIO|>"),
        ),
    ],
)
def test_a_record_whose_audio_has_no_one_place_is_refused(
    row: dict[str, Any], phrases: tuple[str, ...], load: Load, tmp_path: Path
) -> None:
    (tmp_path / "a.wav").write_bytes(WAV)
    with pytest.raises(UserError) as refused:
        load(row, row)
    assert says(str(refused.value), *phrases)


def test_images_for_a_model_that_hears_are_refused(load: Load, tmp_path: Path) -> None:
    Image.new("RGB", (8, 8)).save(tmp_path / "a.png")
    row = _marked("<image>what is it", images=["a.png"])
    with pytest.raises(UserError) as refused:
        load(row, row)
    assert says(str(refused.value), "qwen2_audio models are not given any")


def test_sizes_of_images_say_nothing_of_audio(load: Load, tmp_path: Path) -> None:
    (tmp_path / "a.wav").write_bytes(WAV)
    row = _marked(audios=["a.wav"])
    with pytest.raises(UserError) as refused:
        load(row, row, image_max_pixels=100)
    assert says(str(refused.value), "data.image_max_pixels is 100", "holds no images")


@pytest.mark.parametrize("name", ["soundfile", "soxr"])
def test_a_missing_library_is_named_with_the_command_that_installs_it(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = importlib.import_module

    def imported(one: str) -> Any:
        if one == name:
            raise ModuleNotFoundError(f"No module named {name!r}")
        return found(one)

    monkeypatch.setattr(importlib, "import_module", imported)
    samples, rate = tone(1)
    with pytest.raises(UserError) as refused:
        decode(_encoded(samples, rate), RATE)
    assert says(str(refused.value), name, "pip install 'ftkit[audio]'")


def test_a_file_that_changed_is_refused_when_it_is_read(load: Load, tmp_path: Path) -> None:
    write_chats(tmp_path / "rows.jsonl", counts=(1, 1))
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    data = load(*rows)
    sample = data.train[0]
    Path(sample.media[0].file).write_bytes(WAV + bytes(2))
    assert data.train.media_reader is not None
    with pytest.raises(UserError) as refused:
        data.train.media_reader.read([sample.media], [sample.ids], None)
    assert says(str(refused.value), sample.media[0].file, "has changed")
