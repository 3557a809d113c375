"""Texts of tokens: joined, they are the text of the sample."""

from pathlib import Path

import pytest
from tiny import make_tokenizer
from tokenizers import Tokenizer as Processor
from tokenizers import decoders, models, normalizers

from ftkit.data.inspection.command import token_texts
from ftkit.models.pretrained.tokenizer import Tokenizer

TEXTS = ["Below is an instruction.\n\n### Input: red", "Grüße — 早上好 🎉!", "a  b\tc ", "🎉🎉"]


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    directory = tmp_path_factory.mktemp("tokenizer")
    make_tokenizer(directory)
    return Tokenizer(directory)


@pytest.fixture(scope="module")
def with_spaces_as_marks(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """As Llama 2's: a space is part of the word behind it, unknown characters are bytes."""
    directory = tmp_path_factory.mktemp("llama")
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), "▁", "a", "▁a", "b"]
    vocabulary = {piece: i for i, piece in enumerate(pieces)}
    merges = [("▁", "a")]
    processor = Processor(
        models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    processor.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    processor.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    processor.add_special_tokens(["<s>", "</s>"])
    processor.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text('{"bos_token": "<s>", "eos_token": "</s>"}')
    return Tokenizer(directory)


@pytest.mark.parametrize("text", TEXTS)
def test_joined_they_are_the_text(text: str, byte_level: Tokenizer) -> None:
    ids = byte_level.encode(text, bos=False).tolist()
    texts, special = token_texts(byte_level, ids)
    assert "".join(texts) == text
    assert len(texts) == len(ids) and not any(special)


@pytest.mark.parametrize("text", ["a b a", "ab  ab", "早上 a🎉b"])
def test_a_space_belongs_to_the_word_behind_it(text: str, with_spaces_as_marks: Tokenizer) -> None:
    ids = with_spaces_as_marks.encode(text, bos=False).tolist()
    assert "".join(token_texts(with_spaces_as_marks, ids)[0]) == text


def test_a_character_of_several_tokens_is_the_text_of_the_last(byte_level: Tokenizer) -> None:
    ids = byte_level.encode("🎉 red", bos=False).tolist()
    texts, _ = token_texts(byte_level, ids)
    assert texts[:4] == ["", "", "", "🎉"]


def test_a_character_that_is_cut_off_shows_that_it_is(byte_level: Tokenizer) -> None:
    ids = byte_level.encode("red 🎉", bos=False).tolist()[:-1]
    texts, _ = token_texts(byte_level, ids)
    assert "".join(texts) == "red \ufffd"


def test_marks_have_their_names(byte_level: Tokenizer) -> None:
    ids = byte_level.encode("red", bos=True, eos=True).tolist()
    texts, special = token_texts(byte_level, ids)
    assert (texts[0], texts[-1]) == ("<s>", "</s>")
    assert "".join(texts) == "<s>red</s>"
    assert special == [True, *[False] * (len(ids) - 2), True]


def test_marks_within_a_text_hide_no_space(with_spaces_as_marks: Tokenizer) -> None:
    tokenizer = with_spaces_as_marks
    ids = [1, *tokenizer.encode("a a", bos=False).tolist(), 2]
    assert "".join(token_texts(tokenizer, ids)[0]) in ("<s>a a</s>", "<s> a a</s>")


def test_a_sentencepiece_file_has_marks_and_texts_too(tmp_path: Path) -> None:
    spm = pytest.importorskip("sentencepiece")
    spm.SentencePieceTrainer.train(
        sentence_iterator=iter(["the cat and the dog", "a red sun"] * 50),
        model_prefix=str(tmp_path / "tokenizer"),
        vocab_size=300,
        byte_fallback=True,
        hard_vocab_limit=False,
        minloglevel=2,
    )
    tokenizer = Tokenizer(tmp_path)
    ids = tokenizer.encode("the 🎉 cat", bos=True, eos=True).tolist()
    texts, special = token_texts(tokenizer, ids)
    assert "".join(texts) in ("<s>the 🎉 cat</s>", "<s> the 🎉 cat</s>")
    assert [text for text, mark in zip(texts, special, strict=True) if mark] == ["<s>", "</s>"]
