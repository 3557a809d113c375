"""Published data sets of instructions by name, downloaded when they are read.

Names, options, addresses and splits are those of LitGPT's data modules, so that a recipe of LitGPT
trains on the same samples.
"""

import contextlib
import dataclasses
import json
import os
import shutil
import urllib.request
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

from filelock import FileLock

from ftkit.data.records.record import Record
from ftkit.data.records.shapes import RecordReader
from ftkit.data.spec import (
    OWN_DATA,
    DataSource,
    Part,
    PartSource,
    Rules,
    check_init_args,
    check_shared_values,
)
from ftkit.errors import UserError
from ftkit.models.chat_templates import TrainOn
from ftkit.models.chat_templates.prompt_styles import AnyStyle, resolve_prompt_style
from ftkit.recipe.recipe import Component

if TYPE_CHECKING:
    from datasets import Dataset

_TIMEOUT_S = 30.0
"""Longest time without a byte of a download."""

Rows = Sequence[Mapping[str, Any]]


@dataclass(kw_only=True)
class PublicSet(ABC):
    """A published data set and the options that recipes may set of it."""

    prompt_style: Any = "alpaca"
    """Template that turns instruction and input into a prompt: a name, a class of litgpt.prompts,
    or a text such as "Q: {instruction}\\nA: "."""
    mask_prompt: bool = False
    """Train only on the answers."""
    seed: int = 42
    """Seed of the split into training and validation records."""
    ignore_index: int = -100
    """Only LitGPT's default is accepted."""
    num_workers: int = 4
    """Accepted for compatibility with LitGPT and not used."""

    @abstractmethod
    def rows(self) -> tuple[Rows, Rows]:
        """Records to train and to validate on, with LitGPT's names of keys; downloads them."""

    def place(self) -> Path | None:
        """The directory that the data set is downloaded to; None: a library's own cache."""
        return None

    def how_to_supply(self, _: Exception) -> str:
        """Beginning of a sentence with the remedy for a failed download."""
        place = self.place() or "~/.cache/huggingface"
        return f"Run this once on a machine with internet access and copy {place} to this one"


@dataclass(kw_only=True)
class Alpaca(PublicSet):
    """52,000 instructions, cleaned (tloen/alpaca-lora)."""

    val_split_fraction: float = 0.03865
    """Share of the records used for validation; the default gives 2,000."""
    download_dir: Path = Path("data/alpaca")
    """Directory of the downloaded file."""
    file_url: str = (
        "https://raw.githubusercontent.com/tloen/alpaca-lora/main/alpaca_data_cleaned_archive.json"
    )
    """URL of the file."""
    file_name: str = "alpaca_data_cleaned_archive.json"
    """Name of the file in download_dir."""

    def place(self) -> Path | None:
        return self.download_dir

    def rows(self) -> tuple[Rows, Rows]:
        file = self.download_dir / self.file_name
        _download(self.file_url, file)
        return _split(json.loads(file.read_text("utf-8")), self.val_split_fraction, self.seed)

    def how_to_supply(self, error: Exception) -> str:
        if isinstance(error, json.JSONDecodeError):
            return f"Delete {self.download_dir}, so that it is downloaded again"
        return f"Download {self.file_url} elsewhere to {self.download_dir / self.file_name}"


@dataclass(kw_only=True)
class AlpacaGPT4(Alpaca):
    """The instructions of Alpaca with answers of GPT-4."""

    val_split_fraction: float = 0.03847
    download_dir: Path = Path("data/alpacagpt4")
    file_url: str = (
        "https://raw.githubusercontent.com/Instruction-Tuning-with-GPT-4/GPT-4-LLM/main/data/"
        "alpaca_gpt4_data.json"
    )
    file_name: str = "alpacagpt4_data_cleaned_archive.json"


@dataclass(kw_only=True)
class Alpaca2k(PublicSet):
    """2,000 instructions of Alpaca."""

    val_split_fraction: float = 0.05
    """Share of the records used for validation; the default gives 100."""
    download_dir: Path = Path("data/alpaca2k")
    """Cache directory of the datasets library."""
    repo_id: str = "mhenrichsen/alpaca_2k_test"
    """Repository of the data set on the hub."""

    def place(self) -> Path | None:
        return self.download_dir

    def rows(self) -> tuple[Rows, Rows]:
        from datasets import load_dataset

        train: Dataset = load_dataset(self.repo_id, cache_dir=self.download_dir)["train"]
        # As LitGPT splits it, with the generator of the datasets library.
        split = train.train_test_split(test_size=self.val_split_fraction, seed=self.seed)
        return list(split["train"]), list(split["test"])


@dataclass(kw_only=True)
class Deita(PublicSet):
    """10,000 conversations, chosen for complexity and quality."""

    include_multiturn_conversations: bool = False
    """Train on every question of a conversation, each on its own, instead of only the first."""
    download_dir: Path = Path("data/deita")
    """Cache directory of the datasets library."""
    repo_id: str = "HuggingFaceH4/deita-10k-v0-sft"
    """Repository of the data set on the hub."""

    def place(self) -> Path | None:
        return self.download_dir

    def rows(self) -> tuple[Rows, Rows]:
        from datasets import load_dataset

        train, test = load_dataset(
            self.repo_id, split=["train_sft", "test_sft"], cache_dir=self.download_dir
        )
        every = self.include_multiturn_conversations
        return _answered(_said(train), every=every), _answered(_said(test), every=every)


@dataclass(kw_only=True)
class FLAN(PublicSet):
    """Tasks of many kinds, written as instructions by ten templates each."""

    prompt_style: Any = "flan"
    download_dir: Path = Path("data/flan")
    """Directory of the downloaded files."""
    url: str = "https://huggingface.co/datasets/Muennighoff/flan/resolve/main"
    """URL of the files."""
    subsets: str | None = None
    """Comma-separated list of subsets, such as cola_10templates; null: all 66."""

    def __post_init__(self) -> None:
        if self.subsets is not None and (unknown := set(self._chosen) - set(_SUBSETS_OF_FLAN)):
            raise ValueError(f"{', '.join(sorted(unknown))} not in {', '.join(_SUBSETS_OF_FLAN)}")

    @property
    def _chosen(self) -> Sequence[str]:
        return _SUBSETS_OF_FLAN if self.subsets is None else self.subsets.split(",")

    def place(self) -> Path | None:
        return self.download_dir

    def rows(self) -> tuple[Rows, Rows]:
        return self._rows_of("train"), self._rows_of("test")

    def _rows_of(self, split: str) -> Rows:
        found = []
        for subset in self._chosen:
            file = self.download_dir / f"{subset}_{split}.jsonl"
            _download(f"{self.url}/{split}/{subset}_{split}.jsonl", file)
            with file.open(encoding="utf-8") as lines:
                found += [_renamed(json.loads(line), **_KEYS_OF_FLAN) for line in lines]
        return found


@dataclass(kw_only=True)
class LIMA(PublicSet):
    """1,000 conversations, written and chosen with care."""

    val_split_fraction: float = 0.1
    """Share of the records used for validation."""
    include_multiturn_conversations: bool = False
    """Train on every question of a conversation, each on its own, instead of only the first."""
    repo_id: str = "GAIR/lima"
    """Repository of the data set on the hub."""
    access_token: str | None = None
    """Token of an account that has accepted the terms of the data set. Default: $HF_TOKEN. Never
    stored."""

    def __post_init__(self) -> None:
        # Refused before anything is loaded: the hub would refuse it only when the data are read.
        if not (self.access_token or os.environ.get("HF_TOKEN")):
            raise UserError(
                "data is LIMA, which needs a Hugging Face token.\nTry setting HF_TOKEN, after "
                "accepting its terms at https://huggingface.co/datasets/GAIR/lima."
            )

    def rows(self) -> tuple[Rows, Rows]:
        from datasets import load_dataset

        token = self.access_token or os.environ["HF_TOKEN"]
        train = load_dataset(self.repo_id, token=token)["train"]
        conversations = [row["conversations"] for row in train]
        answered = _answered(conversations, every=self.include_multiturn_conversations)
        return _split(answered, self.val_split_fraction, self.seed)


@dataclass(kw_only=True)
class LongForm(PublicSet):
    """Instructions with long texts as their answers (akoksal/LongForm)."""

    prompt_style: Any = "longform"
    download_dir: Path = Path("data/longform")
    """Directory of the downloaded files."""

    _URL: ClassVar[str] = "https://raw.githubusercontent.com/akoksal/LongForm/main/dataset"

    def place(self) -> Path | None:
        return self.download_dir

    def rows(self) -> tuple[Rows, Rows]:
        return self._rows_of("train"), self._rows_of("val")

    def _rows_of(self, split: str) -> Rows:
        file = self.download_dir / f"{split}.json"
        _download(f"{self._URL}/{split}.json", file)
        return [_renamed(row, input="instruction") for row in json.loads(file.read_text("utf-8"))]


PUBLIC_SETS: Mapping[str, type[PublicSet]] = {
    kind.__name__: kind for kind in (Alpaca, Alpaca2k, AlpacaGPT4, Deita, FLAN, LIMA, LongForm)
}
"""Every published data set by its name."""

_KEYS_OF_FLAN = {"inputs": "instruction", "targets": "output"}
_NAMES_OF_FLAN = """
    aeslc ag_news_subset anli_r1 anli_r2 anli_r3 arc_challenge arc_easy bool_q cb
    cnn_dailymail cola common_gen copa coqa cosmos_qa dart definite_pronoun_resolution drop
    e2e_nlg fix_punct gigaword glue_mrpc glue_qqp hellaswag imdb_reviews math_dataset
    mnli_matched mnli_mismatched multi_news multirc natural_questions openbookqa
    opinion_abstracts_idebate opinion_abstracts_rotten_tomatoes para_crawl_enes paws_wiki
    piqa qnli quac record rte samsum sentiment140 snli squad_v1 squad_v2 sst2 story_cloze
    stsb trec trivia_qa true_case web_nlg_en wic wiki_lingua_english_en wmt14_enfr
    wmt16_translate_csen wmt16_translate_deen wmt16_translate_fien wmt16_translate_roen
    wmt16_translate_ruen wmt16_translate_tren wnli word_segment wsc yelp_polarity_reviews
"""
_SUBSETS_OF_FLAN = tuple(f"{name}_10templates" for name in _NAMES_OF_FLAN.split())


class PublicSource(DataSource):
    """A published data set as a data source."""

    def __init__(self, name: str, init_args: Mapping[str, Any]) -> None:
        """Take options; nothing is downloaded yet.

        Args:
            name: a key of `PUBLIC_SETS`.
            init_args: its options; they are checked when it is read.
        """
        self._name = name
        self._init_args = init_args

    @classmethod
    def documented(cls, name: str) -> type:
        return PUBLIC_SETS[name]

    @classmethod
    def of(cls, data: Component) -> Self:
        # Options themselves are checked in `_build`, when the set is read.
        check_shared_values(data["init_args"])
        return cls(data["class_path"].rpartition(".")[2], data["init_args"])

    def files(self) -> None:
        """Not known: missing files are downloaded."""

    def prompt_style(self) -> AnyStyle:
        return resolve_prompt_style(self.rendering()["prompt_style"])

    def rendering(self) -> dict[str, Any]:
        style = self._init_args.get("prompt_style") or PUBLIC_SETS[self._name].prompt_style
        return {"prompt_style": style, "mask_prompt": self._init_args.get("mask_prompt", False)}

    def parts(self) -> tuple[PartSource, ...]:
        return (PartSource(name=self._name, where=self._name, read=self._read),)

    def _read(self) -> Part:
        name, data = self._name, _build(self._name, self._init_args)
        try:
            # Ranks read their data at the same time.
            with _one_process_at_a_time(data.place()):
                rows = data.rows()
        # Downloads and files of others fail in many ways; the cause is kept.
        except Exception as error:
            raise UserError(_explain_failure(name, data, error)) from error
        train, val = (
            _records(rows_of_use, f"{name}, {use}")
            for rows_of_use, use in zip(rows, ("training", "validation"), strict=True)
        )
        train_on: TrainOn = "last" if data.mask_prompt else "all"
        return Part(
            name=name,
            description=f"{len(train):,} instructions, {len(val):,} more to validate on",
            shape="instruction",
            rules=Rules(prompt_style=data.prompt_style, train_on=train_on),
            train=train,
            val=val,
        )


def _build(name: str, init_args: Mapping[str, Any]) -> PublicSet:
    """Create the data set with its options; texts become paths."""
    kind = PUBLIC_SETS[name]
    known = {field.name: field.type for field in dataclasses.fields(kind)}
    check_init_args(init_args, known, name)
    arguments = dict(init_args)
    try:
        # Values from YAML are plain: paths are text.
        for key, value in init_args.items():
            if key == "prompt_style":
                arguments[key] = resolve_prompt_style(value)
            elif known[key] is Path:
                arguments[key] = Path(value).expanduser()
        # The default style is a name too, which has to be resolved like one of the recipe.
        return kind(**{"prompt_style": resolve_prompt_style(kind.prompt_style), **arguments})
    except (TypeError, ValueError) as error:
        raise UserError(
            f"data is {name}, and its options are refused: {error}.\nRemove the option to take "
            "its default."
        ) from None


def _records(rows: Rows, where: str) -> list[Record]:
    numbered = ((n, dict(row)) for n, row in enumerate(rows, 1))
    return RecordReader().records(numbered, partial("{} record {}".format, where))


def _split(rows: Rows, val_share: float, seed: int) -> tuple[Rows, Rows]:
    """Split records for training and validation with the random numbers that LitGPT draws."""
    import torch
    from torch.utils.data import random_split

    generator = torch.Generator().manual_seed(seed)
    # random_split draws as LitGPT does: another way to split would train on other records.
    parts = random_split(range(len(rows)), [1.0 - val_share, val_share], generator=generator)  # type: ignore[arg-type,var-annotated]
    train, val = ([rows[i] for i in part.indices] for part in parts)
    return train, val


def _said(rows: Rows) -> Iterator[list[str]]:
    """Yield the texts of each conversation, turn by turn."""
    for row in rows:
        yield [message["content"] for message in row["messages"]]


def _answered(conversations: Iterator[list[str]] | list[list[str]], *, every: bool) -> Rows:
    """The first question of each conversation and its answer, or every one."""
    rows = []
    for said in conversations:
        # Questions and answers alternate.
        for i in range(0, len(said) - 1, 2) if every else (0,):
            # Each question stands alone, without the turns before it, as in LitGPT.
            rows.append({"instruction": said[i], "input": "", "output": said[i + 1]})
    return rows


def _renamed(row: Mapping[str, Any], **names: str) -> dict[str, Any]:
    return {names.get(key, key): value for key, value in row.items()}


def _download(url: str, file: Path) -> None:
    """Download a file if it is missing or empty."""
    # Files that LitGPT downloaded are used too; if its download failed, it leaves an empty file.
    if file.is_file() and file.stat().st_size > 0:
        return
    file.parent.mkdir(parents=True, exist_ok=True)
    partial_file = file.with_name(f"{file.name}.partial")
    with (
        urllib.request.urlopen(url, timeout=_TIMEOUT_S) as answer,
        partial_file.open("wb") as written,
    ):
        shutil.copyfileobj(answer, written)
    # Renamed once it is whole, so that half a download is never taken for the data.
    partial_file.replace(file)


@contextlib.contextmanager
def _one_process_at_a_time(directory: Path | None) -> Iterator[None]:
    """Lock a directory: one rank downloads while the others wait and then find the files."""
    with contextlib.ExitStack() as stack:
        # Nothing is downloaded to a directory that cannot be written.
        with contextlib.suppress(OSError):
            if directory is not None:
                directory.mkdir(parents=True, exist_ok=True)
                stack.enter_context(FileLock(directory / ".lock"))
        yield


def _explain_failure(name: str, data: PublicSet, error: Exception) -> str:
    reason = str(error).partition("\n")[0] or "no reason given"
    return (
        f"data is {name}, which could not be loaded: {type(error).__name__}: {reason}.\n"
        f"{data.how_to_supply(error)}, or use records of your own: {OWN_DATA}."
    )
