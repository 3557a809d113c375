"""Data sources by name: the table of the kinds of data that a recipe may name.

Another kind is a module with a `DataSource` (`ftkit/data/spec.py`), and a name here.
"""

from ftkit.config.recipe import Component
from ftkit.data.litgpt_modules import MAP_STYLE, STREAMING, LitgptModule
from ftkit.data.own_data import OwnData
from ftkit.data.spec import OWN_DATA, DataSource
from ftkit.errors import UserError
from ftkit.utils.nearest import nearest

_OWN: dict[str, type[DataSource]] = {"JSON": OwnData}
"""Kinds of ours; JSON replaces LitGPT's module of that name."""
KINDS = {name: _OWN.get(name, LitgptModule) for name in sorted({*_OWN, *MAP_STYLE})}
"""Every kind by the name of its class in recipes; nothing outside this table is ever imported."""


def data_source(data: Component) -> DataSource:
    """The data source of a recipe, its options checked.

    The keys of LitGPT's modules are checked when they are read.

    Raises:
        UserError: unknown class or key, or a value out of range.
    """
    class_path = data["class_path"]
    package, _, name = class_path.rpartition(".")
    if package in ("", "litgpt.data"):
        if name in KINDS:
            return KINDS[name].of(data)
        if name in STREAMING:
            raise UserError(
                f"data is {class_path}, which streams unlabelled text for pretraining; "
                f"fine-tuning needs records of instruction and output.\nTry {OWN_DATA}."
            )
    if package == "ftkit.data" and name in _OWN:
        return _OWN[name].of(data)
    near = nearest(name, KINDS) or OWN_DATA.removeprefix("--data ")
    raise UserError(
        f"data is {class_path}, but it has to be one of {', '.join(KINDS)}.\nTry --data {near}."
    )


def check_data(data: Component) -> None:
    """Refuse data that cannot be loaded, as far as names, values and files tell.

    Raises:
        UserError: unknown class or key, value out of range, or a missing file.
    """
    data_source(data).files()
