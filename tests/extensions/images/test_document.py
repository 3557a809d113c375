"""The document of images has figures of every family, within what tests allow."""

from pathlib import Path

from seeing_models import TABLED

DOCUMENT = Path(__file__).parents[3] / "docs" / "images.md"


def test_the_table_has_a_row_of_each_family_within_the_limits() -> None:
    _, _, rest = DOCUMENT.read_text().partition("<!-- made by scripts/image_families -->\n")
    table, _, _ = rest.partition("<!-- end -->")
    _, _, *rows = ([cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines())
    assert [kind for kind, *_ in rows] == [f"`{kind}`" for kind in TABLED]
    for _, *losses, plan in rows:
        assert len(losses) == 4
        assert all(float(loss) < 1e-5 for loss in losses)
        assert abs(float(plan.removesuffix("%"))) < 2
