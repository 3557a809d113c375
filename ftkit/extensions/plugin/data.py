"""Data of a plugin: a map-style data set whose items are records."""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any, Self

from ftkit.data.own_data import OPTIONS_WITHOUT_FILES, OwnData
from ftkit.data.records.paths import DataFiles
from ftkit.data.records.read import RecordSet, Rows, record_set
from ftkit.data.records.shapes import reader_of
from ftkit.data.spec import PartSource
from ftkit.errors import UserError
from ftkit.extensions.plugin.definitions import Defined, definitions_of, make
from ftkit.recipe.plugin import PACKAGE, Plugin, plugin_in_use
from ftkit.recipe.recipe import Component
from ftkit.utils.own_code import description


class PluginData(OwnData):
    """A data set of the plugin in use, split and rendered as JSON data are.

    A class with an option `split` is made twice, with train and with val; of any other a share is
    split off for validation.
    """

    _plugin: Plugin
    _defined: Defined
    _options_of_class: dict[str, Any]

    @classmethod
    def documented(cls, name: str) -> type:
        return _own(name)[1].options_class

    @classmethod
    def of(cls, data: Component) -> Self:
        plugin, defined = _own(data["class_path"])
        init_args = data["init_args"]
        defined.check_options(init_args, beside=OPTIONS_WITHOUT_FILES)
        names = frozenset(option.name for option in defined.options)
        others = {key: value for key, value in init_args.items() if key not in names}
        source = cls.without_files(defined.name, others)
        source._plugin, source._defined = plugin, defined
        source._options_of_class = {k: v for k, v in init_args.items() if k in names}
        source._taken_whole = names  # other options are other data, as another path is
        return source

    def parts(self) -> tuple[PartSource, ...]:
        (part,) = super().parts()
        # Only its records say what is in it.
        return (dataclasses.replace(part, name=self._defined.name, content=None),)

    # No files: nothing to look for before the start, and to hash for the cache.
    def _found(self, source: Any) -> DataFiles:
        return DataFiles(train=(), val=())

    def _read(self, source: Any) -> RecordSet:
        where = f"{self._plugin.option}: {self._defined.name}"
        reader = reader_of(
            source.columns, preference=self._preference, takes_tokens=True, keeps_bad=True
        )

        def rows(**options: Any) -> Rows:
            return self._rows(**options), lambda number: f"{where}[{number}]"

        if self._has_splits and not self._whole:
            splits = {"train": rows(split="train"), "val": rows(split="val")}
        else:
            splits = {"train": rows()}
        return record_set(reader, splits, where, skips_bad=self._options.skip_bad_records)

    @property
    def _has_splits(self) -> bool:
        is_option = any(option.name == "split" for option in self._defined.options)
        return is_option and "split" not in self._options_of_class

    def _rows(self, **options: Any) -> Iterator[tuple[int, Any]]:
        """Items of the data set by their number.

        Raises:
            UserError: an item cannot be read.
        """
        made = make(self._plugin, self._defined, **self._options_of_class, **options)
        number = 0
        try:
            if not len(made):
                raise UserError(
                    f"{self._plugin.option}: {self._defined.name} has no items. Return their "
                    "number from __len__."
                )
            for number in range(len(made)):
                yield number, _plain(made[number])
        except UserError:
            raise
        except Exception as error:
            raise UserError(
                f"{self._plugin.option}: {self._defined.name}[{number}] fails: "
                f"{description(error, self._plugin.file)}.\nCorrect it."
            ) from error


def _own(class_path: str) -> tuple[Plugin, Defined]:
    """The plugin in use, and its class of a path."""
    plugin = plugin_in_use()
    assert plugin is not None
    name = class_path.removeprefix(f"{PACKAGE}.")
    return plugin, next(one for one in definitions_of(plugin, "data") if one.name == name)


def _plain(item: Any) -> Any:
    """An item with lists instead of its tensors and numpy arrays."""
    # Not by their types: neither library has to be imported for it.
    if not isinstance(item, Mapping):
        return item
    return {
        key: value.tolist() if hasattr(value, "tolist") else value for key, value in item.items()
    }
