"""`ftkit data`: a look at the data of a recipe, as text, as a page or as JSON."""

import dataclasses
import json
import sys
from pathlib import Path

from ftkit.errors import UserError
from ftkit.recipe.options import DataOptions
from ftkit.recipe.parsing import sorted_words
from ftkit.utils.console.display import Display
from ftkit.utils.console.terminal import plain_text
from ftkit.utils.imports import silence_libraries

silence_libraries()  # before they are imported

from ftkit.data.inspection.collect import inspect_data  # noqa: E402
from ftkit.data.inspection.display import InspectionText, inspection_page  # noqa: E402
from ftkit.data.inspection.inspection import Inspection  # noqa: E402
from ftkit.utils.progress import print_notice  # noqa: E402


def show_data(options: DataOptions) -> int:
    """Inspect the data of a recipe, show the result and return the exit code.

    Raises:
        UserError: as a run would, or it cannot be written.
    """
    files, overrides = sorted_words(options.words, options.config, options.keys)
    with (
        Display(None, stream=sys.stderr) as display,
        display.phase("reading data", brief=True) as phase,
    ):
        found = inspect_data(
            files,
            overrides,
            show=options.show,
            progress=lambda _, done, total: phase.advance(done, total),
        )
    if options.out is not None:
        _write(options.out, _as_text(found, options.format))
    elif options.format == "text":
        with Display(None) as display:
            display.show(InspectionText(found))
    else:
        print(_as_text(found, options.format))
    return 0


def _as_text(found: Inspection, form: str) -> str:
    if form == "json":
        return json.dumps(dataclasses.asdict(found), indent=2)
    return inspection_page(found) if form == "html" else plain_text(InspectionText(found))


def _write(file: Path, text: str) -> None:
    try:
        file.write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise UserError(
            f"--out {file} cannot be written: {error.strerror}. Name a file in an existing "
            "directory."
        ) from None
    print_notice(f"ftkit: written to {file}", sys.stderr)
