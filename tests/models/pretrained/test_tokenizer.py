import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer as Processor
from tokenizers import decoders, models, pre_tokenizers, processors

from ftkit.errors import UserError
from ftkit.models.pretrained.tokenizer import Tokenizer

VOCABULARY = {"<unk>": 0, "<s>": 1, "</s>": 2, "▁a": 3, "▁b": 4, "<x>": 5}


def write(directory: Path, *, adds_bos: bool = False, **settings: Any) -> Path:
    """A tokenizer in the manner of Llama's; settings go to tokenizer_config.json."""
    processor = Processor(models.WordLevel(VOCABULARY, unk_token="<unk>"))
    processor.pre_tokenizer = pre_tokenizers.Metaspace()
    processor.decoder = decoders.Metaspace()
    processor.add_special_tokens(["<s>", "</s>", "<x>"])
    if adds_bos:
        processor.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", 1)]
        )
    directory.mkdir(exist_ok=True)
    processor.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    return directory


@pytest.mark.parametrize("adds_bos", [True, False])
@pytest.mark.parametrize("name", ["Llama-3-8B", "model", "SmolLM2-135M-Instruct"])
def test_texts_begin_with_bos_if_the_tokenizer_does_so_whatever_the_directorys_name(
    adds_bos: bool, name: str, tmp_path: Path
) -> None:
    tokenizer = Tokenizer(
        write(tmp_path / name, adds_bos=adds_bos, bos_token="<s>", eos_token="</s>")
    )
    assert tokenizer.encode("a b").tolist() == ([1, 3, 4] if adds_bos else [3, 4])
    assert tokenizer.encode("a b", bos=True).tolist() == [1, 3, 4]
    assert tokenizer.encode("a b", bos=False, eos=True).tolist() == [3, 4, 2]
    assert tokenizer.encode("a b", bos=True, eos=True, max_length=2).tolist() == [1, 3]
    assert tokenizer.encode("a").dtype == torch.int


@pytest.mark.parametrize("adds_bos", [True, False])
@pytest.mark.parametrize("asked", [True, False])
def test_add_bos_token_of_the_settings_comes_first(
    adds_bos: bool, asked: bool, tmp_path: Path
) -> None:
    directory = write(
        tmp_path, adds_bos=adds_bos, bos_token="<s>", eos_token="</s>", add_bos_token=asked
    )
    assert Tokenizer(directory).encode("a").tolist() == ([1, 3] if asked else [3])


def test_special_tokens_that_the_text_itself_holds_are_kept_once(tmp_path: Path) -> None:
    tokenizer = Tokenizer(write(tmp_path, adds_bos=True, bos_token="<s>", eos_token="</s>"))
    for arguments in ({}, {"bos": False}, {"eos": True}):
        assert tokenizer.encode("<s>a</s>", **arguments).tolist() == [1, 3, 2]


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("tokenizer_config.json", {"eos_token": "</s>"}),
        ("tokenizer_config.json", {"eos_token": {"__type": "AddedToken", "content": "</s>"}}),
        ("special_tokens_map.json", {"eos_token": {"content": "</s>"}}),
        ("generation_config.json", {"eos_token_id": [2, 5]}),
        ("config.json", {"eos_token_id": 2}),
    ],
)
def test_the_end_of_text_is_found_wherever_it_is_named(
    file: str, content: dict[str, Any], tmp_path: Path
) -> None:
    write(tmp_path)
    (tmp_path / file).write_text(json.dumps(content))
    tokenizer = Tokenizer(tmp_path)
    assert (tokenizer.eos_id, tokenizer.bos_id, tokenizer.use_bos) == (2, None, False)


def test_settings_that_are_not_needed_may_be_broken(tmp_path: Path) -> None:
    write(tmp_path, eos_token="</s>", bos_token="<s>")
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 2,}')
    assert Tokenizer(tmp_path).eos_id == 2


def test_texts_are_neither_cut_nor_padded_whatever_tokenizer_json_was_last_used_for(
    tmp_path: Path,
) -> None:
    file = write(tmp_path, eos_token="</s>") / "tokenizer.json"
    processor = Processor.from_file(str(file))
    processor.enable_truncation(2)
    processor.enable_padding(length=8)
    processor.save(str(file))
    assert Tokenizer(tmp_path).encode("a b a").tolist() == [3, 4, 3]


def test_a_token_decoded_alone_keeps_its_space(tmp_path: Path) -> None:
    tokenizer = Tokenizer(write(tmp_path, eos_token="</s>"))
    alone = [tokenizer.decode(torch.tensor(token)) for token in (3, 4, 3)]
    assert "".join(alone).strip() == "a b a"


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("tokenizer.json", None, "has no tokenizer. Copy tokenizer.json"),
        ("tokenizer.json", "{}", "tokenizer.json is damaged"),
        ("tokenizer_config.json", "{", "tokenizer_config.json is damaged"),
        ("tokenizer_config.json", "[]", "tokenizer_config.json is not a JSON object"),
        ("tokenizer_config.json", None, 'no end-of-text token.*Name it as "eos_token"'),
    ],
)
def test_what_is_wrong_is_named(
    file: str, content: str | None, message: str, tmp_path: Path
) -> None:
    write(tmp_path, eos_token="</s>")
    (tmp_path / file).unlink()
    if content is not None:
        (tmp_path / file).write_text(content)
    with pytest.raises(UserError, match=message):
        Tokenizer(tmp_path)


def test_bos_cannot_be_asked_of_a_tokenizer_without_one(tmp_path: Path) -> None:
    tokenizer = Tokenizer(write(tmp_path, eos_token="</s>"))
    with pytest.raises(UserError, match="no begin-of-text token"):
        tokenizer.encode("a", bos=True)


@pytest.fixture(scope="module")
def sentencepiece_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from sentencepiece import SentencePieceTrainer

    directory = tmp_path_factory.mktemp("sentencepiece")
    SentencePieceTrainer.train(
        sentence_iterator=iter(["a cat sat on a mat", "the cat and the mat"] * 10),
        model_prefix=str(directory / "tokenizer"),
        vocab_size=40,
        model_type="bpe",
        minloglevel=2,
    )
    return directory


def test_a_sentencepiece_model_alone_is_enough(sentencepiece_model: Path) -> None:
    tokenizer = Tokenizer(sentencepiece_model)
    tokens = tokenizer.encode("the cat sat", eos=True)
    assert (tokens[0], tokens[-1]) == (tokenizer.bos_id, tokenizer.eos_id) == (1, 2)  # type: ignore[comparison-overlap]
    assert tokenizer.decode(tokens) == "the cat sat"
    assert tokenizer.token_id("<s>") == 1 and tokenizer.token_id("no such token") is None
    assert tokenizer.encode("the cat", bos=False)[0] != 1


class TestRendered:
    """What a chat template made is encoded as it is."""

    def test_special_tokens_are_those_of_the_text(self, tmp_path: Path) -> None:
        directory = write(tmp_path, adds_bos=True, bos_token="<s>", eos_token="</s>")
        tokenizer = Tokenizer(directory)
        assert tokenizer.encode_rendered("<s>a</s>").ids == [1, 3, 2]
        assert tokenizer.encode_rendered("a").ids == [3]
        (encoded,) = tokenizer.encode_all_rendered(["<s>a b</s>"])
        assert [("<s>a b</s>")[first:end] for first, end in encoded.offsets[1:]] == [
            "a",
            " b",
            "</s>",
        ]
        assert tokenizer.added_tokens == {"<s>": 1, "</s>": 2, "<x>": 5}

    def test_their_texts_are_told_by_name(self, tmp_path: Path) -> None:
        write(
            tmp_path,
            bos_token={"__type": "AddedToken", "content": "<s>"},
            eos_token="</s>",
            pad_token=None,
            add_bos_token=True,
            extra_special_tokens={"image_token": "<x>"},
        )
        (tmp_path / "special_tokens_map.json").write_text('{"unk_token": {"content": "<unk>"}}')
        assert Tokenizer(tmp_path).special_tokens == {
            "bos_token": "<s>",
            "eos_token": "</s>",
            "unk_token": "<unk>",
            "image_token": "<x>",
        }

    def test_an_end_that_only_an_id_names_has_a_text(self, tmp_path: Path) -> None:
        write(tmp_path)
        (tmp_path / "config.json").write_text('{"eos_token_id": 2}')
        assert Tokenizer(tmp_path).special_tokens == {"eos_token": "</s>"}

    def test_control_pieces_of_sentencepiece_are_cut_out(self, tmp_path: Path) -> None:
        from sentencepiece import SentencePieceTrainer

        with (tmp_path / "tokenizer.model").open("wb") as file:
            SentencePieceTrainer.train(
                sentence_iterator=iter(["the answer to a question"] * 20),
                model_writer=file,
                vocab_size=40,
                model_type="bpe",
                hard_vocab_limit=False,
                minloglevel=2,
            )
        tokenizer = Tokenizer(tmp_path)
        bos, eos = tokenizer.bos_id, tokenizer.eos_id
        text = "<s>the question</s>an answer</s>"
        ids, offsets = tokenizer.encode_rendered(text)
        inner = [tokenizer.encode(part, bos=False) for part in ("the question", "an answer")]
        assert ids == [bos, *inner[0].tolist(), eos, *inner[1].tolist(), eos]
        assert [text[first:end] for first, end in offsets].count("</s>") == 2
        assert offsets[-2][1] == len(text) - len("</s>")
        assert tokenizer.special_tokens == {
            "bos_token": "<s>",
            "eos_token": "</s>",
            "unk_token": "<unk>",
        }
        assert tokenizer.encode_rendered("").ids == []
