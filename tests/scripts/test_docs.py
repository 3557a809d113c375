"""The site of the documents is built without a warning, is complete, and needs no network."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import browser
import pytest
import snowballstemmer
from command import ROOT


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site; building it fails with a warning, a dead link, or something from elsewhere."""
    out = tmp_path_factory.mktemp("docs")
    build = subprocess.run(
        [sys.executable, "-m", "documentation.build", "--out", out],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT / "scripts")},
    )
    assert (build.returncode, build.stderr) == (0, ""), build.stdout + build.stderr
    return out / "html"


def index_of(site: Path) -> Any:
    text = (site / "searchindex.js").read_text()
    return json.loads(text.removeprefix("Search.setIndex(").rstrip().removesuffix(")"))


@pytest.mark.slow
def test_every_document_is_a_page_in_the_contents(site: Path) -> None:
    documents = [
        *(ROOT / "docs").glob("*.md"),
        *(ROOT / name for name in ("README.md", "CHANGELOG.md")),
    ]
    pages = {site / file.relative_to(ROOT).with_suffix(".html") for file in documents}
    pages -= {site / "docs/README.html"}  # which is the start page itself
    start = (site / "index.html").read_text()
    assert [page for page in pages if f'href="{page.relative_to(site)}"' not in start] == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("word", "pages"),
    [
        ("packing", {"docs/coming-from", "docs/data"}),
        ("global_batch_tokens", {"docs/training", "reference/recipe/train"}),
        ("save_every", {"reference/recipe/checkpoint"}),
    ],
)
def test_a_word_is_found(site: Path, word: str, pages: set[str]) -> None:
    index, stem = index_of(site), snowballstemmer.stemmer("english").stemWord(word)
    found = index["terms"].get(stem, []), index["titleterms"].get(stem, [])
    numbers = {n for one in found for n in (one if isinstance(one, list) else [one])}
    assert pages <= {index["docnames"][number] for number in numbers}


@pytest.mark.slow
def test_keys_and_commands_are_documented_from_their_own_texts(site: Path) -> None:
    train = (site / "reference/recipe/train.html").read_text()
    assert 'id="train-micro-batch-size"' in train and "Passes over the training data." in train
    assert "--fit" in (site / "reference/commands/plan.html").read_text()


@pytest.mark.slow
def test_language_models_find_the_markdown_of_every_document(site: Path) -> None:
    text = (site / "llms.txt").read_text()
    assert text.startswith("# Documents of ftkit\n\n> ftkit fine-tunes ")
    links = re.findall(r"\]\(([^)]+)\)", text)
    assert [link for link in links if not (site / link).is_file()] == []
    documents = {file.stem for file in (ROOT / "docs").glob("*.md")} - {"README"}
    assert documents <= {Path(link).name.partition(".")[0] for link in links}
    assert "_sources/reference/commands/index.md.txt" in links
    assert all(line.startswith(("#", ">", "- [")) for line in text.splitlines() if line)


@pytest.mark.slow
def test_no_page_names_the_place_where_it_was_built(site: Path) -> None:
    texts = [f for f in site.rglob("*") if f.suffix in (".html", ".js", ".css", ".svg", ".txt")]
    place = re.compile("|".join(re.escape(str(path)) for path in (ROOT, site)))
    assert [file for file in texts if place.search(file.read_text())] == []


@pytest.mark.slow
@pytest.mark.skipif(browser.CHROMIUM is None, reason="no Chromium")
def test_the_search_works_in_pages_opened_as_files(site: Path, tmp_path: Path) -> None:
    with browser.browser(tmp_path / "profile") as page:
        page.open(f"file://{site}/search.html?q=packing")
        found = page.wait_for("document.querySelector('ul.search li a')?.innerText")
        assert "axolotl" in found


@pytest.mark.parametrize(
    ("element", "fault"),
    [
        ('<a href="gone.html">x</a>', "gone.html is not there"),
        ('<a href="other.html#gone">x</a>', "other.html#gone names no anchor"),
        ('<img src="gone.png">', "gone.png is not there"),
        ('<script src="https://cdn.example/a.js"></script>', "loads https://cdn.example/a.js"),
        ('<link rel="stylesheet" href="//cdn.example/a.css">', "loads //cdn.example/a.css"),
        ('<img src="https://img.example/a.png">', "loads https://img.example/a.png"),
        ('<a href="https://example.org">x</a> <a href="other.html#here">y</a>', ""),
    ],
)
def test_what_is_wrong_with_a_page_is_said(
    element: str, fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(ROOT / "scripts")
    from documentation.checks import faults

    (tmp_path / "page.html").write_text(element)
    (tmp_path / "other.html").write_text('<p id="here">')
    assert [fault in found for found in faults(tmp_path)] == [True] * bool(fault)


def test_a_font_from_elsewhere_is_found_in_a_style_sheet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(ROOT / "scripts")
    from documentation.checks import faults

    (tmp_path / "site.css").write_text("@font-face { src: url(https://fonts.example/a.woff2) }")
    assert faults(tmp_path) == ["site.css: loads from elsewhere"]
