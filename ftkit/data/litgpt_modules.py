"""LitGPT's data modules as data sources: those that hold records of instruction and output."""

import contextlib
import dataclasses
import json
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from filelock import FileLock

from ftkit.chat_templates.options import TrainOn
from ftkit.config.changes import default_prompt_style
from ftkit.config.recipe import Component
from ftkit.data.prompt_styles import resolve_prompt_style
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
from ftkit.records.record import Record
from ftkit.records.shapes import RecordReader
from ftkit.utils.imports import quick_imports

if TYPE_CHECKING:
    from litgpt.data import SFTDataset
    from litgpt.prompts import PromptStyle


MAP_STYLE = ("Alpaca", "Alpaca2k", "AlpacaGPT4", "Deita", "FLAN", "LIMA", "LongForm")
"""Data modules of LitGPT that hold records of instruction and output."""
STREAMING = ("LitData", "MicroLlama", "OpenWebText", "TextFiles", "TinyLlama", "TinyStories")
"""Data modules of LitGPT for pretraining."""


class LitgptModule(DataSource):
    """A data module of LitGPT, which downloads its records and knows how to split them."""

    def __init__(self, name: str, init_args: Mapping[str, Any]) -> None:
        """Describe the data; nothing is imported.

        Args:
            name: one of MAP_STYLE.
            init_args: of the module; its keys are checked when it is read.
        """
        self._name = name
        self._init_args = init_args

    @classmethod
    def documented(cls, name: str) -> type:
        with quick_imports():
            import litgpt.data
        found: type = getattr(litgpt.data, name)
        return found

    @classmethod
    def of(cls, data: Component) -> Self:
        check_shared_values(data["init_args"])
        return cls(data["class_path"].rpartition(".")[2], data["init_args"])

    def files(self) -> None:
        """Unknown: the module downloads what it does not find."""

    def prompt_style(self) -> "PromptStyle":
        fields = dataclasses.fields(self._class())
        defaults = {field.name: field.default for field in fields}
        return resolve_prompt_style(self._init_args.get("prompt_style", defaults["prompt_style"]))

    def rendering(self) -> dict[str, Any]:
        style = self._init_args.get("prompt_style") or default_prompt_style(self._name)
        return {"prompt_style": style, "mask_prompt": self._init_args.get("mask_prompt", False)}

    def parts(self) -> tuple[PartSource, ...]:
        return (PartSource(name=self._name, where=self._name, read=self._read),)

    def _read(self) -> Part:
        name, module = self._name, _build(self._class(), self._init_args)
        module.num_workers = 0  # its own loaders are asked for their data set only
        module.connect()
        try:
            with _one_process_at_a_time(getattr(module, "download_dir", None)):
                module.prepare_data()
                module.setup()
                # FLAN and LongForm make their data sets only here.
                datasets = [module.train_dataloader().dataset, module.val_dataloader().dataset]
        except Exception as error:
            raise UserError(_explain_failure(name, module, error)) from error
        train, val = (
            _records(dataset, f"{name}, {use}")
            for dataset, use in zip(datasets, ("training", "validation"), strict=True)
        )
        masked: TrainOn = "last" if datasets[0].mask_prompt else "all"
        return Part(
            name=name,
            description=f"{len(train):,} instructions, {len(val):,} more to validate on",
            shape="instruction",
            rules=Rules(prompt_style=datasets[0].prompt_style, train_on=masked),
            train=train,
            val=val,
        )

    def _class(self) -> type:
        import litgpt.data

        found: type = getattr(litgpt.data, self._name)
        return found


def _build(module_class: type, init_args: Mapping[str, Any]) -> Any:
    """The data module of LitGPT, its arguments converted as LitGPT's parser would."""
    name = module_class.__name__
    known = {field.name: field.type for field in dataclasses.fields(module_class) if field.init}
    check_init_args(init_args, known, name)
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
    rows = ((n, transform(dict(row))) for n, row in enumerate(dataset.data, 1))
    return RecordReader().records(rows, partial("{} record {}".format, where))


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
        f"{works}, or use records of your own: {OWN_DATA}."
    )
