"""Runs at a url on the live page, on a machine that has nothing of them."""

from pathlib import Path

import pytest
from compared_runs import make_run
from messages import says
from object_servers import Bucket, Fault, Proxy, s3_error

from ftkit.utils.urls import local_path

RunSnapshots = pytest.importorskip("ftkit.extensions.watch.live_page").RunSnapshots


@pytest.fixture(autouse=True)
def looks_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """However often a page asks."""
    monkeypatch.setattr("ftkit.extensions.watch.live_page._LOOK_INTERVAL_S", 0.0)
    monkeypatch.setattr("ftkit.extensions.object_storage.download._LOOKS_EVERY_S", 0.0)


def send(bucket: Bucket, run: Path, prefix: str) -> None:
    """Put the files of a run at a url."""
    for file in run.rglob("*"):
        if file.is_file():
            bucket.write(f"{prefix}/{file.relative_to(run)}", file.read_bytes())


def test_a_run_at_a_url_is_shown_from_a_copy_of_its_small_files(
    bucket: Bucket, tmp_path: Path
) -> None:
    make_run(tmp_path / "a")
    send(bucket, tmp_path / "a", "page/a")
    snapshots = RunSnapshots(local_path("s3://bucket/page/a"), copy_at=tmp_path / "copy")
    (found,) = snapshots.all_runs()["runs"]
    assert (found["name"], found["state"], found["steps"]) == ("a", "completed", 40)
    shown = snapshots.run("a")
    assert shown is not None and "s3://bucket/page/a" in shown["status"]
    assert str(tmp_path) not in shown["status"] + shown["report"]
    assert len(shown["charts"][0]["series"][0]["points"]) == 40


def test_runs_below_a_url_are_listed_as_they_come_and_go(bucket: Bucket, tmp_path: Path) -> None:
    snapshots = RunSnapshots(local_path("s3://bucket/many"), copy_at=tmp_path / "copies")
    assert snapshots.all_runs() == {"runs": [], "left_out": [], "comparison": "", "losses": []}
    make_run(tmp_path / "a", final_loss=0.5)
    make_run(tmp_path / "b", "failed", steps=5)
    (tmp_path / "a/checkpoints/step-00000010").mkdir(parents=True)
    (tmp_path / "a/checkpoints/step-00000010/recipe.yaml").write_text("seed: 1")
    send(bucket, tmp_path / "a", "many/x/a")
    send(bucket, tmp_path / "b", "many/x/b")
    bucket.write("many/x/notes.txt", b"of no run")
    bucket.write("many/x/new/.run/job.json", b"{}")
    shown = snapshots.all_runs()
    assert [(one["name"], one["state"], one["steps"]) for one in shown["runs"]] == [
        ("a", "completed", 40),
        ("b", "failed", 5),
    ]
    assert shown["left_out"] == [
        "s3://bucket/many/x/new holds no run. Name the out_dir of a run, such as out/finetune/lora"
    ]
    assert [(one["name"], len(one["points"])) for one in shown["losses"]] == [("a", 40), ("b", 5)]
    assert shown["comparison"].count("<tr") == 3
    one = snapshots.run("b")
    assert one is not None and "s3://bucket/many/x/b" in one["status"]
    assert str(tmp_path) not in str(shown) + str(one)
    bucket.delete("many/x/new/.run/job.json")
    for name in bucket.names("many/x/a"):
        bucket.delete(f"many/x/a/{name}")
    assert [one["name"] for one in snapshots.all_runs()["runs"]] == ["b"]
    assert snapshots.run("a") is None


def test_an_unreachable_url_is_reported_and_its_runs_stay_on_the_page(
    bucket: Bucket, s3: Proxy, tmp_path: Path
) -> None:
    make_run(tmp_path / "a")
    send(bucket, tmp_path / "a", "shut/a")
    snapshots = RunSnapshots(local_path("s3://bucket/shut"), copy_at=tmp_path / "copies")
    s3.fails(Fault(403, s3_error("AccessDenied")), lambda _: True)
    (reason,) = snapshots.all_runs()["left_out"]
    assert says(reason, "s3://bucket/shut ... AccessDenied ... Check")
    s3.works()
    assert len(snapshots.all_runs()["runs"]) == 1
    s3.fails(Fault(403, s3_error("AccessDenied")), lambda _: True)
    assert len(snapshots.all_runs()["runs"]) == 1
