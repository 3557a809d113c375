"""Columns of a comparison."""

import re
from pathlib import Path

from compared_runs import make_run, with_terms

from ftkit.extensions.comparison.columns import setting_columns
from ftkit.extensions.comparison.compare import compare


def test_a_setting_and_a_result_of_one_name_have_different_labels(tmp_path: Path) -> None:
    make_run(tmp_path / "a", eval__exact_match=10)
    make_run(tmp_path / "b", eval__exact_match=20)
    labels = [column.label for column in setting_columns(compare([tmp_path]).runs)]
    assert labels == ["eval.exact_match"]


def test_on_a_page_results_stand_before_many_settings(tmp_path: Path) -> None:
    for n, name in enumerate("ab", 1):
        varied = {f"train__{key}": n for key in ("epochs", "max_seq_length", "max_norm", "min_lr")}
        make_run(tmp_path / name, **varied)
    labels = re.findall(r"<th[^>]*>([^<]*)", compare([tmp_path])._repr_html_())
    assert labels.index("loss") < labels.index("epochs")


def test_on_a_page_time_speed_and_memory_stand_before_single_terms(tmp_path: Path) -> None:
    for name in "ab":
        with_terms(make_run(tmp_path / name), tmp_path / name)
    labels = re.findall(r"<th[^>]*>([^<]*)", compare([tmp_path])._repr_html_())
    terms = [
        i for i, label in enumerate(labels) if label.startswith("val ") and label != "val loss"
    ]
    assert len(terms) == 6
    assert terms[0] > max(map(labels.index, ("time", "tokens/s", "peak memory")))
