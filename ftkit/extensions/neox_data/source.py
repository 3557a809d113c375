"""The kind of data NeoX: its options, which have the names of GPT-NeoX's configuration."""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from ftkit.data.spec import DataSource, Part, PartSource, Rules, check_init_args, check_value
from ftkit.errors import UserError
from ftkit.extensions.neox_data.files import check_corpus
from ftkit.models.chat_templates.prompt_styles import AnyStyle, resolve_prompt_style
from ftkit.recipe.recipe import Component

if TYPE_CHECKING:
    from ftkit.data.dataset import LoadedPart, OnSplitProgress
    from ftkit.models.pretrained.tokenizer import Tokenizer

NAME = "NeoX"


@dataclass(frozen=True, kw_only=True)
class NeoxOptions:
    """The init_args of NeoX data; they have the names and defaults of GPT-NeoX."""

    data_path: str | Path | None = None
    """A corpus: the path of its .bin and .idx without these endings. split divides it."""
    train_data_paths: list[str] | None = None
    """Corpora to train on, in place of data_path; they are mixed by train_data_weights."""
    train_data_weights: list[float] | None = None
    """Weight of each of train_data_paths. Default: 1 each."""
    valid_data_paths: list[str] | None = None
    """Corpora to validate on, beside train_data_paths. Without, validation measures training
    samples."""
    valid_data_weights: list[float] | None = None
    """Weight of each of valid_data_paths. Default: 1 each."""
    split: str = "969, 30, 1"
    """Shares of the documents of data_path to train on, to validate on, and that are left out."""
    seq_length: int | None = None
    """Tokens of a sample that the model is given. Required."""
    seed: int = 1234
    """Seed of the order."""
    train_iters: int | None = None
    """Steps for which GPT-NeoX's run was begun: with train_batch_size they say how many epochs of
    documents are shuffled together, whatever train.max_steps is. Default: one epoch, as with
    train_epochs there."""
    train_batch_size: int | None = None
    """Samples of a step of GPT-NeoX, over all its ranks. Required."""
    gradient_accumulation_steps: int = 1
    """Micro-batches of a step of GPT-NeoX: a last one that is not full is left out."""
    eod_mask_loss: bool = False
    """Give no loss to the token behind the end of a document, which is the tokenizer's EOS."""
    pack_impl: str = "packed"
    """Only packed: documents are joined and cut."""

    @property
    def samples(self) -> int | None:
        """Samples that the index was made for; None: one epoch."""
        return None if self.train_iters is None else self.train_iters * self.batch_size

    @property
    def batch_size(self) -> int:
        """train_batch_size, which is there once it is checked."""
        assert self.train_batch_size is not None
        return self.train_batch_size

    @property
    def micro_batch(self) -> int:
        """Samples of a micro-batch of GPT-NeoX, over all its ranks."""
        return self.batch_size // self.gradient_accumulation_steps

    @property
    def shares(self) -> list[float]:
        """The numbers of split."""
        return _shares(self.split)


_REFUSED = {
    **dict.fromkeys(
        (
            *("train_label_data_paths", "valid_label_data_paths", "test_label_data_paths"),
            *("train_reward_data_paths", "valid_reward_data_paths", "test_reward_data_paths"),
            *("pos_train_data_paths", "neg_train_data_paths", "precompute_model_name"),
        ),
        "labels, rewards and pairs of GPT-NeoX are not read, only tokens that all carry loss.\n"
        "Remove it, or write the records as JSON data",
    ),
    "weight_by_num_documents": "weights by numbers of documents are not computed here.\nRemove it, "
    "and give the weights that GPT-NeoX has computed as data.train_data_weights",
    "dataset_impl": "only gpt2 is read.\nRemove it, or write the records as JSON data",
}
"""Keys of GPT-NeoX's configuration that mean other data."""
_AS_HERE = {"dataset_impl": "gpt2"}
"""Values of these that mean the data that are read."""


def foreign_keys(settings: Mapping[str, Any]) -> dict[str, Any]:
    """What of a configuration means data that are refused."""
    return {
        key: settings[key]
        for key in _REFUSED
        if settings.get(key) and settings[key] != _AS_HERE.get(key)
    }


def checked_options(init_args: Mapping[str, Any]) -> NeoxOptions:
    """Check the options; empty ones count as not given.

    Raises:
        UserError: an unknown key, a missing one, or a value out of range.
    """
    for key, value in foreign_keys(init_args).items():
        raise UserError(f"data.{key} is {value!r}, but {_REFUSED[key]}.")
    given = {
        key: value
        for key, value in init_args.items()
        if value not in (None, []) and key not in _REFUSED
    }
    check_init_args(given, [field.name for field in dataclasses.fields(NeoxOptions)], NAME)
    for key, value in given.items():
        _check(f"data.{key}", key, value)
    if ("data_path" in given) == ("train_data_paths" in given):
        what = "both are given" if "data_path" in given else "neither is given"
        raise UserError(
            f"data.data_path and data.train_data_paths: {what}, but {NAME} data are one corpus "
            "that is split, or corpora to train on.\nTry --data.data_path PREFIX."
        )
    for key in ("seq_length", "train_batch_size"):
        if key not in given:
            raise UserError(
                f"data.{key} is missing: it decides the order of GPT-NeoX's samples.\n"
                f"Try --data.{key} N, as in the configuration of its run."
            )
    for key in ("train", "valid"):
        paths, weights = given.get(f"{key}_data_paths", ()), given.get(f"{key}_data_weights")
        if weights is not None and len(weights) != len(paths):
            raise UserError(
                f"data.{key}_data_weights has {len(weights)} weights, but data.{key}_data_paths "
                f"has {len(paths)} paths.\nGive one for each."
            )
    options = NeoxOptions(**given)
    if options.batch_size % options.gradient_accumulation_steps:
        raise UserError(
            f"data.train_batch_size is {options.batch_size}, which is no multiple of "
            f"data.gradient_accumulation_steps, {options.gradient_accumulation_steps}.\n"
            "Give both as in the configuration of GPT-NeoX's run."
        )
    return options


def _check(name: str, key: str, value: Any) -> None:
    whole = isinstance(value, int) and not isinstance(value, bool)
    if key == "data_path":
        rule = "the path of a corpus without .bin and .idx"
        check_value(name, value, isinstance(value, str | Path), rule, "PREFIX")
    elif key.endswith("_paths"):
        accepted = isinstance(value, list) and all(isinstance(one, str) for one in value)
        # GPT-NeoX numbers corpora in 8 bits.
        accepted = accepted and len(value) < 255
        check_value(name, value, accepted, "a list of at most 254 paths", "'[a, b]'")
    elif key.endswith("_weights"):
        accepted = isinstance(value, list) and all(map(_is_share, value)) and sum(value) > 0
        check_value(name, value, accepted, "a list of numbers from 0 on", "'[0.7, 0.3]'")
    elif key == "split":
        accepted = isinstance(value, str) and bool(_shares(value))
        check_value(name, value, accepted, "up to three numbers with commas", "'\"969, 30, 1\"'")
    elif key == "seed":
        accepted = whole and 0 <= value < 2**32
        check_value(name, value, accepted, "a whole number from 0 to 4294967295", "1234")
    elif key == "eod_mask_loss":
        check_value(name, value, isinstance(value, bool), "true or false", "true")
    elif key == "pack_impl":
        check_value(name, value, value == "packed", "packed: others are not read", "packed")
    else:
        check_value(name, value, whole and value > 0, "a whole number above 0", "1024")


def _is_share(value: Any) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and 0 <= value < float("inf")


def _shares(split: str) -> list[float]:
    """The numbers of a split; none if it is not one."""
    try:
        shares = [float(share) for share in split.split("," if "," in split else "/")][:3]
    except ValueError:
        return []
    return shares if all(map(_is_share, shares)) and shares[0] > 0 else []


class NeoxData(DataSource):
    """Corpora of GPT-NeoX in its own order."""

    def __init__(self, options: NeoxOptions) -> None:
        """Take options; nothing is read yet."""
        self.options = options
        """As they were checked."""

    @classmethod
    def documented(cls, name: str) -> type:
        return NeoxOptions

    @classmethod
    def of(cls, data: Component) -> Self:
        return cls(checked_options(data["init_args"]))

    def files(self) -> tuple[Path, ...]:
        options = self.options
        named: list[tuple[str, Sequence[str | Path]]] = [
            ("data.data_path", [options.data_path] if options.data_path else []),
            ("data.train_data_paths", options.train_data_paths or []),
            ("data.valid_data_paths", options.valid_data_paths or []),
        ]
        return tuple(
            file
            for key, paths in named
            for path in paths
            for file in check_corpus(Path(path).expanduser(), key)
        )

    def prompt_style(self) -> AnyStyle:
        return resolve_prompt_style("default")

    def rendering(self) -> dict[str, Any]:
        return {}

    def parts(self) -> tuple[PartSource, ...]:
        paths = [self.options.data_path, *(self.options.train_data_paths or ())]
        where = ", ".join(str(path) for path in paths if path)
        source = PartSource(name=NAME, where=where, read=_part, in_order=True)
        return (dataclasses.replace(source, load=partial(_load, self.options, source)),)


def _part(description: str = "") -> Part:
    """What is known of the samples, of which there are no records."""
    rules = Rules(train_on="all")
    return Part(name=NAME, shape="tokens", rules=rules, train=(), val=(), description=description)


def _load(
    options: NeoxOptions,
    source: PartSource,
    tokenizer: "Tokenizer",
    max_seq_length: int,
    progress: "OnSplitProgress",
) -> "LoadedPart":
    # Samples are torch's data sets; whoever only checks a recipe does without.
    from ftkit.data.dataset import LoadedPart
    from ftkit.data.prepare import make_renderer
    from ftkit.extensions.neox_data.samples import load_splits

    splits, description = load_splits(options, tokenizer, max_seq_length, progress)
    part = _part(description)
    return LoadedPart(
        source=dataclasses.replace(source, load=partial(_load, options, source)),
        part=part,
        renderer=make_renderer(part, tokenizer),
        splits=splits,
        notices=(),
    )
