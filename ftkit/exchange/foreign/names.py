"""Names of parameters in states of other programs, beside those of the model's own files."""

from collections.abc import Collection, Iterable

from ftkit.exchange.foreign.parameter_order import in_files


def plain_names(given: Iterable[str], known: Collection[str]) -> dict[str, str]:
    """The names that a program gives parameters, with those in the model's own files.

    Programs wrap models, which puts a word before every name: `module.`, `model.`.

    Args:
        given: the program's.
        known: in files.

    Returns:
        For each of the program's names the one in files; names of other tensors without the prefix.
    """
    names = {name: in_files(name) for name in given}
    wanted = max(known, key=len)
    prefixes = {
        found.removesuffix(wanted) for found in names.values() if f".{found}".endswith(f".{wanted}")
    }
    prefix = min(prefixes, key=len, default="")
    return {name: found.removeprefix(prefix) for name, found in names.items()}
