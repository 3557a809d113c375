"""Plugins: those of the document that explains them, and others that a test writes."""

import dataclasses
import re
from pathlib import Path

import pytest
from command import ROOT

from ftkit.recipe.plugin import Plugin

DOCUMENT = ROOT / "docs/extending.md"


def documented() -> dict[str, str]:
    """Plugins in the document, as blocks of Python by the headings above them."""
    sections = re.split(r"^## (.*)$", DOCUMENT.read_text(), flags=re.MULTILINE)[1:]
    return {
        heading: "\n".join(re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL))
        for heading, text in zip(sections[::2], sections[1::2], strict=True)
        if heading != "A package"  # which is installed
    }


def write_documented(file: Path, *headings: str) -> Path:
    """Write the blocks under some headings as one plugin."""
    blocks = documented()
    file.write_text("\n\n".join(blocks[heading] for heading in headings))
    return file


def opened(file: Path) -> Plugin:
    """Open a plugin as `open_plugin` does, in this process."""
    contents = pytest.importorskip("ftkit.extensions.plugin.contents")  # a core alone lacks it
    plugin = Plugin(file=str(file.absolute()), source=file.read_text())
    found = tuple(one.to_json() for one in contents.definitions_in(plugin))
    return dataclasses.replace(plugin, definitions=found)


def plugin_of(directory: Path, source: str) -> Plugin:
    """Open a plugin with some content, as my.py."""
    file = directory / "my.py"
    file.write_text(source)
    return opened(file)
