"""Build the site of the documents; see scripts/docs."""

import argparse
import shutil
import sys
from pathlib import Path

from sphinx.cmd.build import main as sphinx

from documentation.checks import faults
from documentation.sources import ROOT, llms_text, write_sources

HERE = Path(__file__).parent


def build(out: Path, *, external: bool = False) -> int:
    """Build the site into `out`/html and check it; returns the exit code.

    Args:
        out: directory, of which `html` and `source` are replaced.
        external: also ask the servers of external links.
    """
    source, html = out / "source", out / "html"
    for old in (source, html):
        shutil.rmtree(old, ignore_errors=True)
    write_sources(source)
    # Warnings are errors, and all of them are shown.
    options = ["--fail-on-warning", "--keep-going", "--quiet", "--conf-dir", str(HERE)]
    options += ["--doctree-dir", str(out / "doctrees")]
    if code := sphinx([*options, "--builder", "html", str(source), str(html)]):
        return int(code)
    (html / "llms.txt").write_text(llms_text())
    if found := faults(html):
        print(*found, sep="\n", file=sys.stderr)
        return 1
    if external and (
        code := sphinx([*options, "-b", "linkcheck", str(source), str(out / "links")])
    ):
        return int(code)
    shown = html.relative_to(ROOT) if html.is_relative_to(ROOT) else html
    print(f"docs: {len(list(html.rglob('*.html')))} pages, {shown}/index.html")
    return 0


def main() -> int:
    """Entry point of the script; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--external", action="store_true", help="also check external links")
    parser.add_argument(
        "--out", type=Path, default=ROOT / "build/docs", help="directory to build in"
    )
    options = parser.parse_args()
    return build(options.out.absolute(), external=options.external)


if __name__ == "__main__":
    sys.exit(main())
