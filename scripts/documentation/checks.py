"""Checks of a built site: links inside it, and what pages load."""

from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

_LOADED = {"script": "src", "img": "src", "iframe": "src", "source": "src", "object": "data"}
"""Elements that load what an attribute names."""
_IN_CSS = ("url(http", "url('http", 'url("http', "url(//", "@import")


class _Page(HTMLParser):
    """What a page has: anchors, links, and addresses of what it loads."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.feed(file.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        if "id" in given:
            self.anchors.add(given["id"])
        if tag == "a" and "href" in given:
            self.links.append(given["href"])
        elif tag == "link" and {"stylesheet", "preload", "icon"} & set(
            given.get("rel", "").split()
        ):
            self.loaded.append(given["href"])
        elif address := given.get(_LOADED.get(tag, ""), ""):
            self.loaded.append(address)


def faults(site: Path) -> list[str]:
    """Links that lead nowhere, and what is loaded from elsewhere, a line each."""
    pages = {file: _Page(file) for file in sorted(site.rglob("*.html"))}
    return [
        f"{file.relative_to(site)}: {fault}"
        for file, page in pages.items()
        for fault in (*_dead(file, page, pages), *_foreign(page))
    ] + [
        f"{file.relative_to(site)}: loads from elsewhere"
        for file in sorted(site.rglob("*.css"))
        if any(word in file.read_text(encoding="utf-8") for word in _IN_CSS)
    ]


def _dead(file: Path, page: _Page, pages: dict[Path, _Page]) -> Iterator[str]:
    for address in (*page.links, *page.loaded):
        parts = urlsplit(address)
        if parts.scheme or parts.netloc:
            continue
        target = (file.parent / unquote(parts.path)).resolve() if parts.path else file
        anchor = unquote(parts.fragment)
        if not target.is_file():
            yield f"{address} is not there"
        # The theme's link to the top of a page has an empty anchor.
        elif anchor and target in pages and anchor not in pages[target].anchors:
            yield f"{address} names no anchor"


def _foreign(page: _Page) -> Iterator[str]:
    for address in page.loaded:
        if urlsplit(address).netloc:
            yield f"loads {address} from elsewhere"
