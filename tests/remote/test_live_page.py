"""A run at a url on the live page, on a machine that has nothing of it."""

from pathlib import Path

from compared_runs import make_run
from object_servers import Bucket

from ftkit.live_page.sights import Sights
from ftkit.remote.urls import local_path


def test_a_run_at_a_url_is_shown_from_a_copy_of_its_small_files(
    bucket: Bucket, tmp_path: Path
) -> None:
    sights = Sights(local_path("s3://bucket/page/a"), copy_at=tmp_path / "copy")
    assert sights.all_runs()["left_out"] == [
        "s3://bucket/page/a holds no run. Name the out_dir of a run, such as out/finetune/lora."
    ]
    make_run(tmp_path / "a")
    for file in (tmp_path / "a").iterdir():
        bucket.write(f"page/a/{file.name}", file.read_bytes())
    sights = Sights(local_path("s3://bucket/page/a"), copy_at=tmp_path / "other")
    (found,) = sights.all_runs()["runs"]
    assert (found["name"], found["state"], found["steps"]) == ("a", "completed", 40)
    shown = sights.run("a")
    assert shown is not None and "s3://bucket/page/a" in shown["sight"]
    assert str(tmp_path) not in shown["sight"] + shown["report"]
    assert len(shown["charts"][0]["series"][0]["points"]) == 40
