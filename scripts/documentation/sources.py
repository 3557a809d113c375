"""Sources of the site: documents at their paths in the repository, and what is made from code.

Documents keep their paths, so that links between them work here as they do on GitHub. The table of
contents is docs/README.md: each list of links below one of its headings becomes a part of it.
"""

import posixpath
import re
import shutil
from pathlib import Path

from documentation.reference import reference_pages

ROOT = Path(__file__).resolve().parents[2]
CONTENTS = "docs/README.md"
"""The document that links to all others."""
_LINK = re.compile(r"(?<=\]\()(?!https?:|#)([^)\s#]+)")
_PATH_AS_TEXT = re.compile(r"\[[\w/.-]+\.md\](?=\()")
"""The text of a link that is only the path of a document; the site shows the title instead."""
_TO_PAGE = re.compile(r"\]\(([^)#]+\.md)(?:#[^)]*)?\)")
"""A link to a page, perhaps to a part of it."""
_CODE = re.compile(r"^ *```.*?^ *```", re.MULTILINE | re.DOTALL)
_PART = re.compile(r"^##+ (.*)$", re.MULTILINE)
_ENTRY = re.compile(r"^- \[([^]]+)\]\(([^)]+)\.md\)", re.MULTILINE)
_MADE = {
    "Reference": "- [Keys of a recipe](reference/recipe/index.md): each with values and default\n"
    "- [Commands](reference/commands/index.md): each with its options and examples\n"
}
"""Parts of the contents with links to pages that are made from code."""


def write_sources(place: Path) -> None:
    """Write the sources of the whole site into a directory.

    Raises:
        ValueError: docs/README.md leaves out a document, or a link leads to no file.
    """
    text = _LINK.sub(lambda link: _joined(CONTENTS, link[0]), (ROOT / CONTENTS).read_text())
    _write(place / "index.md", _with_contents(text))
    listed = {f"{path}.md" for _, path in _ENTRY.findall(text)}
    documents = {path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").glob("*.md")}
    if missing := documents - listed - {CONTENTS}:
        raise ValueError(f"{CONTENTS} has no link to {', '.join(sorted(missing))}")
    for document in sorted(listed):
        written = _to_index(document, (ROOT / document).read_text())
        _write(place / document, _PATH_AS_TEXT.sub("[]", written))
        for link in _LINK.findall(_CODE.sub("", written)):
            target = _joined(document, link)
            if target not in listed and target != "index.md":
                if not (ROOT / target).is_file():
                    raise ValueError(f"{document} links to {link}, which is no file")
                (place / target).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(ROOT / target, place / target)
    for path, made in reference_pages().items():
        _write(place / path, made)


def llms_text() -> str:
    """The contents for language models (llmstxt.org), with links to the Markdown of each page."""
    text = _LINK.sub(lambda link: _joined(CONTENTS, link[0]), (ROOT / CONTENTS).read_text())
    title, _, rest = text.partition("\n")
    summary, _, parts = rest.strip().partition("\n\n")
    pieces = _PART.split(parts)
    written = [title, f"> {' '.join(summary.split())}"]
    for name, body in zip(pieces[1::2], pieces[2::2], strict=True):
        # An entry is a line; what else is said between the headings is for readers of the page.
        entries = re.findall(r"^- .*(?:\n  .*)*", f"{_MADE.get(name, '')}{body}", re.MULTILINE)
        listed = "\n".join(" ".join(entry.split()) for entry in entries)
        written.append(f"## {name}\n\n" + _TO_PAGE.sub(r"](_sources/\1.txt)", listed))
    return "\n\n".join(written) + "\n"


def _to_index(document: str, text: str) -> str:
    """Text of a document whose links to the contents lead to the page of the site that has them."""
    index = posixpath.relpath("index.md", posixpath.dirname(document) or ".")

    def changed(link: re.Match[str]) -> str:
        return index if _joined(document, link[0]) == CONTENTS else link[0]

    return _LINK.sub(changed, text)


def _joined(document: str, link: str) -> str:
    """Path of a link, seen from the root of the repository."""
    return posixpath.normpath(posixpath.join(posixpath.dirname(document), link))


def _with_contents(text: str) -> str:
    """The contents with a list for the side bar after each list of links."""
    pieces = _PART.split(text)
    written = [pieces[0]]
    for name, body in zip(pieces[1::2], pieces[2::2], strict=True):
        listed = body.replace("- [", f"{_MADE.get(name, '')}- [", 1)
        written.append(f"## {name}{listed}")
        if entries := [f"{title} <{path}>" for title, path in _ENTRY.findall(listed)]:
            listing = "\n".join(entries)
            written.append(f"```{{toctree}}\n:hidden:\n:caption: {name}\n\n{listing}\n```\n\n")
    return "".join(written)


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
