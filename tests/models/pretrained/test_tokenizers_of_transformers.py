"""Tokenizers of every kind: ids, texts and vocabulary are those that transformers makes."""

import json
import pickle
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
import torch
from messages import says
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as Processor
from transformers import AutoTokenizer

from ftkit.errors import UserError
from ftkit.models.pretrained.tokenizer import Tokenizer

CORPUS = ["Hello there, don't you know the red cat ?", "the cat and the dog; two dogs  run."] * 20
TEXTS = (
    "<|im_start|>user\nthe red cat<|im_end|>\n",
    "Hello <|im_end|>  there<|im_end|>dogs [CALL] don't !",
    " a<s>b</s> <x>\u00e9e\u0301<|im_start|>",
    "",
)
NEW = ("<|im_start|>", "<|im_end|>", "[CALL]")
SPECIAL = ["<unk>", "<s>", "</s>", "<x>"]


def byte_level(directory: Path) -> None:
    processor = Processor(models.BPE())
    processor.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    processor.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trained(processor, trainers.BpeTrainer, directory, initial_alphabet=alphabet)


def metaspace(directory: Path) -> None:
    processor = Processor(models.BPE(unk_token="<unk>", byte_fallback=True))
    processor.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    processor.decoder = decoders.Metaspace()
    trained(processor, trainers.BpeTrainer, directory)


def word_piece(directory: Path) -> None:
    processor = Processor(models.WordPiece(unk_token="<unk>"))
    processor.normalizer = normalizers.BertNormalizer()
    processor.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    processor.decoder = decoders.WordPiece(cleanup=False)
    trained(processor, trainers.WordPieceTrainer, directory)


def unigram(directory: Path) -> None:
    processor = Processor(models.Unigram())
    processor.normalizer = normalizers.NFKC()
    processor.pre_tokenizer = pre_tokenizers.Metaspace()
    processor.decoder = decoders.Metaspace()
    trained(processor, trainers.UnigramTrainer, directory, unk_token="<unk>")


def trained(processor: Processor, trainer: Any, directory: Path, **options: Any) -> None:
    processor.train_from_iterator(
        CORPUS, trainer(vocab_size=300, special_tokens=SPECIAL, show_progress=False, **options)
    )
    processor.save(str(directory / "tokenizer.json"))


def pieces(kind: str) -> Callable[[Path], None]:
    def make(directory: Path) -> None:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(CORPUS),
            model_prefix=str(directory / "tokenizer"),
            vocab_size=80,
            model_type=kind,
            byte_fallback=False,
            hard_vocab_limit=False,
            user_defined_symbols=["<x>"],
            minloglevel=2,
        )

    return make


KINDS: dict[str, Callable[[Path], None]] = {
    "byte level": byte_level,
    "metaspace": metaspace,
    "word piece": word_piece,
    "unigram": unigram,
    "sentencepiece bpe": pieces("bpe"),
    "sentencepiece unigram": pieces("unigram"),
}
CLASSES = (
    *("PreTrainedTokenizerFast", "LlamaTokenizerFast", "GPT2Tokenizer", "Qwen2TokenizerFast"),
    *("GemmaTokenizer", "T5Tokenizer", "BertTokenizerFast", "NoSuchTokenizer"),
)

OF_ONE_KIND = ("T5Tokenizer", "BertTokenizerFast")
"""Classes that transformers makes of one kind of vocabulary alone; it fails with the others."""


def decoder(**flags: bool) -> dict[str, Any]:
    named = {str(5000 + n): {"content": text, **flags} for n, text in enumerate(NEW)}
    return {"added_tokens_decoder": named}


NAMED: dict[str, dict[str, Any]] = {
    "nowhere": {},
    "decoder": decoder(special=True),
    "decoder, not special": decoder(special=False, normalized=True),
    "decoder, with spaces": decoder(special=True, lstrip=True, rstrip=True),
    "decoder, single words": decoder(special=False, single_word=True),
    "additional": {"additional_special_tokens": list(NEW)},
    "extra": {"extra_special_tokens": list(NEW)},
    "extra by name": {"extra_special_tokens": {"call_token": NEW[2], "end_token": NEW[1]}},
    "as end": {"eos_token": NEW[1]},
    "split": {"split_special_tokens": True, "extra_special_tokens": list(NEW)},
    "prefix": {"add_prefix_space": True},
    "no prefix": {"add_prefix_space": False, "legacy": False},
    "legacy": {"legacy": True},
    "cleaned": {"clean_up_tokenization_spaces": True},
    "bos and eos": {"add_bos_token": True, "add_eos_token": True},
}


def cases() -> Iterator[Any]:
    """Every kind with every way of naming tokens, and with every class."""
    for kind, (name, settings) in product(KINDS, NAMED.items()):
        given = {"tokenizer_class": CLASSES[0], **settings}
        yield pytest.param(kind, given, id=f"{kind}-{name}")
    for kind, class_name in product(KINDS, CLASSES):
        given = {"tokenizer_class": class_name, **NAMED["decoder"]}
        yield pytest.param(kind, given, id=f"{kind}-{class_name}")


@pytest.fixture(scope="module")
def vocabularies(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made = {}
    for kind, make in KINDS.items():
        make(directory := tmp_path_factory.mktemp("vocabulary"))
        made[kind] = directory
    return made


def write(directory: Path, vocabulary: Path, **settings: Any) -> Path:
    for file in vocabulary.glob("tokenizer.*"):
        if file.suffix != ".vocab":
            (directory / file.name).write_bytes(file.read_bytes())
    settings = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"} | settings
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    return directory


def assert_ids_of_transformers(directory: Path, *, may_fail: bool = False) -> None:
    """Compare with transformers' tokenizer; where transformers may fail, ftkit refuses."""
    try:
        theirs: Any = AutoTokenizer.from_pretrained(directory)
    except Exception:
        if not may_fail:
            raise
        with pytest.raises(UserError):
            Tokenizer(directory)
        return
    ours = Tokenizer(directory)
    elsewhere: Tokenizer = pickle.loads(pickle.dumps(ours))  # noqa: S301
    assert ours.vocabulary == theirs.get_vocab()
    for text in TEXTS:
        expected = theirs(text, add_special_tokens=False)["input_ids"]
        assert ours.encode(text, bos=False).tolist() == expected
        assert ours.encode_rendered(text).ids == elsewhere.encode_rendered(text).ids == expected
        assert ours.text_of(expected) == theirs.decode(expected, skip_special_tokens=True)
        if len(expected) > 1:
            assert ours.decode(torch.tensor(expected)) == ours.text_of(expected)
    assert ours.eos_id == theirs.eos_token_id and ours.bos_id == theirs.bos_token_id


@pytest.mark.parametrize(("kind", "settings"), list(cases()))
def test_ids_are_those_of_transformers(
    kind: str, settings: dict[str, Any], vocabularies: dict[str, Path], tmp_path: Path
) -> None:
    may_fail = settings["tokenizer_class"] in OF_ONE_KIND
    assert_ids_of_transformers(write(tmp_path, vocabularies[kind], **settings), may_fail=may_fail)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("added_tokens.json", {text: 5000 + n for n, text in enumerate(NEW)}),
        ("special_tokens_map.json", {"additional_special_tokens": list(NEW)}),
        ("special_tokens_map.json", {"eos_token": {"content": NEW[0], "rstrip": True}}),
        ("config.json", {"model_type": "qwen2"}),
        ("config.json", {"model_type": "gemma"}),
        ("config.json", {"model_type": "llama"}),
    ],
)
def test_files_beside_the_vocabulary_count_too(
    kind: str, file: str, content: Any, vocabularies: dict[str, Path], tmp_path: Path
) -> None:
    write(tmp_path, vocabularies[kind])
    (tmp_path / file).write_text(json.dumps(content))
    assert_ids_of_transformers(tmp_path)


@pytest.mark.parametrize("settings", [{}, NAMED["decoder"], {"tokenizer_class": "GPT2Tokenizer"}])
def test_tokens_that_ftkit_adds_are_there_for_transformers(
    settings: dict[str, Any], vocabularies: dict[str, Path], tmp_path: Path
) -> None:
    base = write(tmp_path, vocabularies["byte level"], **settings)
    grown = Tokenizer(base).with_tokens(["<new>"])
    for name, content in grown.changed_files().items():
        (tmp_path / name).write_bytes(content)
    theirs: Any = AutoTokenizer.from_pretrained(tmp_path)
    assert theirs.get_vocab() == grown.vocabulary == Tokenizer(tmp_path).vocabulary
    assert theirs.encode("a<new> b") == grown.encode("a<new> b", bos=False).tolist()


def test_code_of_a_directory_is_not_run(vocabularies: dict[str, Path], tmp_path: Path) -> None:
    own = {"AutoTokenizer": ["own.Own", None]}
    write(tmp_path, vocabularies["byte level"], auto_map=own, tokenizer_class="Own")
    (tmp_path / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    with pytest.raises(UserError) as error:
        Tokenizer(tmp_path)
    assert says(str(error.value), "code of its own") and not (tmp_path / "ran").exists()


def test_a_tokenizer_by_version_is_refused(vocabularies: dict[str, Path], tmp_path: Path) -> None:
    """It would pass by the checks of tokenizer.json."""
    own = {"fast_tokenizer_files": ["tokenizer.json", "tokenizer.4.0.0.json"]}
    write(tmp_path, vocabularies["byte level"], **own)
    with pytest.raises(UserError, match=r"tokenizer\.4\.0\.0\.json"):
        Tokenizer(tmp_path)


def test_an_added_token_keeps_its_flags(vocabularies: dict[str, Path], tmp_path: Path) -> None:
    write(tmp_path, vocabularies["byte level"], **NAMED["decoder, with spaces"])
    added = Tokenizer(tmp_path).processor.get_added_tokens_decoder().values()
    (found,) = [token for token in added if token.content == NEW[0]]
    assert found == AddedToken(NEW[0], special=True, lstrip=True, rstrip=True)
