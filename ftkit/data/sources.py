"""Data sources: JSON files, or a data module of LitGPT, split into training and validation."""

import contextlib
import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import yaml
from filelock import FileLock
from torch.utils.data import Subset, random_split

from ftkit.config.recipe import Component
from ftkit.data.json_records import Record, as_record, read_records
from ftkit.data.prompt_styles import resolve_prompt_style
from ftkit.data.spec import check_keys, data_class, json_options
from ftkit.errors import UserError

if TYPE_CHECKING:
    from litgpt.data import SFTDataset
    from litgpt.prompts import PromptStyle
    from litgpt.tokenizer import Tokenizer


PROMPT_STYLE = "prompt_style.yaml"
"""Where LitGPT and ftkit look for the prompt style of a model, beside its weights."""
_DEFAULT_VAL_SPLIT_FRACTION = 0.05  # of litgpt.data.JSON


@dataclass(frozen=True, kw_only=True)
class Source:
    """The records of a data set, and how they become text."""

    train: Sequence[Record]
    val: Sequence[Record]
    prompt_style: "PromptStyle"
    mask_prompt: bool


def load_source(
    data: Component, tokenizer: "Tokenizer", max_seq_length: int, *, split: bool = True
) -> Source:
    """Read, and if necessary download, the records of the data set.

    Args:
        data: checked by ftkit.data.spec.check_data.
        tokenizer: passed on to LitGPT's modules.
        max_seq_length: passed on to LitGPT's modules.
        split: split validation records off a single JSON file; else all of them are that.

    Raises:
        UserError: the data cannot be had, or are not what they should be.
    """
    name = data_class(data)
    if name == "JSON":
        return load_json(data, split=split)
    return _load_litgpt(name, data["init_args"], tokenizer, max_seq_length)


def prompt_style_file(style: "PromptStyle") -> dict[str, bytes]:
    """A prompt style as a file: its name and content."""
    name = f"{type(style).__module__}.{type(style).__name__}"
    return {PROMPT_STYLE: yaml.safe_dump({"class_path": name}).encode()}


def load_json(data: Component, *, split: bool = True) -> Source:
    """Read the records of JSON files.

    Args:
        data: checked by ftkit.data.spec.check_data.
        split: split validation records off a single file; else all of them are that.

    Raises:
        UserError: the files cannot be read, or are not what they should be.
    """
    options = json_options(data)
    prompt_style = resolve_prompt_style(options.prompt_style)
    train_file, val_file = options.files()
    train: Sequence[Record] = read_records(train_file)
    if val_file is not None:
        val: Sequence[Record] = read_records(val_file)
    elif not split:
        train, val = [], train
    else:
        fraction = options.val_split_fraction or _DEFAULT_VAL_SPLIT_FRACTION
        train, val = _split(train, fraction, options.seed, train_file)
    return Source(train=train, val=val, prompt_style=prompt_style, mask_prompt=options.mask_prompt)


def _split(
    records: Sequence[Record], val_split_fraction: float, seed: int, file: Path
) -> tuple[list[Record], list[Record]]:
    """Split off validation records, exactly as litgpt.data.JSON does with the same seed."""
    size = len(records)
    if size < 2:
        raise UserError(
            f"{file} holds one record, but training and validation need one each.\n"
            "Add records, or set data.json_path to a directory with train.json and val.json."
        )
    if not 0 < int(size * val_split_fraction) < size:
        raise UserError(
            f"data.val_split_fraction is {val_split_fraction}, which leaves nothing to train or "
            f"to validate on: {file} holds {size} records.\nTry --data.val_split_fraction "
            f"{0.1 if size >= 10 else 0.5}."
        )
    splits: list[Subset[int]] = random_split(
        range(size),  # type: ignore[arg-type]  # any sequence will do
        [1.0 - val_split_fraction, val_split_fraction],
        generator=torch.Generator().manual_seed(seed),
    )
    train, val = ([records[i] for i in split.indices] for split in splits)
    return train, val


def _load_litgpt(
    name: str, init_args: Mapping[str, Any], tokenizer: "Tokenizer", max_seq_length: int
) -> Source:
    import litgpt.data

    module_class = getattr(litgpt.data, name)
    module = _build(module_class, init_args)
    module.num_workers = 0  # its own loaders are asked for their data set only
    module.connect(tokenizer=tokenizer, batch_size=1, max_seq_length=max_seq_length)
    try:
        with _one_process_at_a_time(getattr(module, "download_dir", None)):
            module.prepare_data()
            module.setup()
            # FLAN and LongForm make their data sets only here.
            datasets = [module.train_dataloader().dataset, module.val_dataloader().dataset]
    except Exception as error:
        raise UserError(_explain_failure(name, module, error)) from error
    return Source(
        train=_records(datasets[0], f"{name}, training"),
        val=_records(datasets[1], f"{name}, validation"),
        prompt_style=datasets[0].prompt_style,
        mask_prompt=datasets[0].mask_prompt,
    )


def _build(module_class: type, init_args: Mapping[str, Any]) -> Any:
    """The data module of LitGPT, its arguments converted as LitGPT's parser would."""
    name = module_class.__name__
    known = {field.name: field.type for field in dataclasses.fields(module_class) if field.init}
    check_keys(init_args, known, name)
    arguments = dict(init_args)
    try:
        for key, value in init_args.items():
            if key == "prompt_style":
                arguments[key] = resolve_prompt_style(value)
            elif known[key] is Path:
                arguments[key] = Path(value).expanduser()
        return module_class(**arguments)
    except (TypeError, ValueError) as error:
        if name == "LIMA" and not arguments.get("access_token"):
            raise UserError(
                "data is LIMA, which needs a Hugging Face token.\nTry setting HF_TOKEN, after "
                "accepting its terms at https://huggingface.co/datasets/GAIR/lima."
            ) from None
        raise UserError(
            f"data is {name}, and its options are refused: {error}.\nRemove the option to take "
            "its default."
        ) from None


def _records(dataset: "SFTDataset", where: str) -> list[Record]:
    """The records of LitGPT's data set, before tokenisation."""
    transform = dataset.transform or (lambda row: row)
    return [
        as_record(transform(dict(row)), f"{where} record {n}")
        for n, row in enumerate(dataset.data, 1)
    ]


@contextlib.contextmanager
def _one_process_at_a_time(directory: Path | None) -> Iterator[None]:
    """Let one rank download while the others wait and then find the files there."""
    with contextlib.ExitStack() as stack:
        # Nothing is downloaded to a directory that cannot be written.
        with contextlib.suppress(OSError):
            if directory is not None:
                directory.mkdir(parents=True, exist_ok=True)
                stack.enter_context(FileLock(directory / ".lock"))
        yield


def _explain_failure(name: str, module: Any, error: Exception) -> str:
    reason = str(error).partition("\n")[0] or "no reason given"
    directory = getattr(module, "download_dir", None)
    if isinstance(error, json.JSONDecodeError) and directory is not None:
        works = f"Delete {directory}, so that it is downloaded again"
    elif name in ("Alpaca", "AlpacaGPT4"):
        works = f"Download {module.file_url} elsewhere to {directory / module.file_name}"
    elif directory is not None:
        works = f"Run this once where there is internet and copy {directory} here"
    else:
        works = "Run this once where there is internet and copy ~/.cache/huggingface here"
    return (
        f"data is {name}, which could not be loaded: {type(error).__name__}: {reason}.\n"
        f"{works}, or use records of your own: --data JSON --data.json_path FILE."
    )
