"""Files that were sent count once the storage has shown that they are there."""

from collections.abc import Callable
from pathlib import Path

import pytest
from messages import says
from object_servers import Bucket, Fault, Proxy, Request, is_write, writes
from remote_runs import Ftkit, ended

from ftkit.checkpoint.store import Store
from ftkit.extensions.object_storage.objects import Objects
from ftkit.utils.url_files import StorageError

PAGE = b"<html><body><h1>Welcome</h1>Please sign in to use this network.</body></html>"
HEADERS = (("Content-Type", "text/html"), ("Content-Length", str(len(PAGE))))
SIGN_IN = Fault(200, PAGE, headers=HEADERS)
"""What a network answers in the place of every server."""


IMPATIENT = "from ftkit.extensions.object_storage import mirror\nmirror.LAST_ATTEMPTS_S = 5.0"


def anything(_: Request) -> bool:
    return True


@pytest.mark.slow
@pytest.mark.parametrize("size", [100, 2**25 + 3], ids=["small", "in-parts"])
@pytest.mark.parametrize("when", [anything, is_write], ids=["everything", "writes"])
def test_an_object_that_is_missing_after_its_upload_is_an_error(
    s3: Proxy, tmp_path: Path, when: Callable[[Request], bool], size: int
) -> None:
    """An older one of another size is none either."""
    file, objects = tmp_path / "file", Objects("s3://bucket/page", patience_s=0.5)
    file.write_bytes(bytes(size))
    objects.write("name", b"before")
    s3.fails(SIGN_IN, when)
    for name in ("name", "new"):
        with pytest.raises(
            StorageError, match=f"s3://bucket/page: (writing|looking at|read).*{name}"
        ):
            objects.upload(file, name)
        with pytest.raises(
            StorageError, match=f"s3://bucket/page: (writing|reading) {name} failed"
        ):
            objects.write(name, b"content")
    s3.works()
    assert objects.read("name") == b"before" and objects.entry("new") is None
    assert objects.upload(file, "name") == objects.entry("name")


def test_a_file_that_grows_while_it_is_sent_is_there_with_any_length_that_it_had(
    s3: Proxy, tmp_path: Path
) -> None:
    file = tmp_path / "metrics.csv"
    file.write_bytes(b"step\n1\n")

    def grow() -> None:
        file.write_bytes(b"step\n1\n2\n")

    s3.fails(Fault(when_whole=grow), is_write)
    assert Objects("s3://bucket/grows").upload(file, "metrics.csv").size_bytes == 7


def test_a_run_does_not_begin_where_a_page_answers_for_the_storage(begin: Ftkit, s3: Proxy) -> None:
    s3.fails(SIGN_IN, anything)
    code, said = ended(begin("a", "s3://bucket/page/none", "--stop_after", "2"))
    assert code == 2, said
    assert "s3://bucket/page/none: writing .run/claim" in said and "Check the url" in said
    assert "Traceback" not in said


@pytest.mark.matrix
def test_a_run_reports_checkpoints_that_a_captive_portal_has_swallowed(
    begin: Ftkit, run: Callable[..., str], s3: Proxy, bucket: Bucket, tmp_path: Path
) -> None:
    """Nothing is lost here, and the next start sends it."""
    url, here = "s3://bucket/accepted", tmp_path / "a/runs/s3/bucket/accepted"
    s3.fails(SIGN_IN, writes("accepted/checkpoints/"))
    code, said = ended(begin("a", url, "--stop_after", "2", before=IMPATIENT))
    assert code == 1, said
    assert says(said, f"{url} ... this run") and "Traceback" not in said
    assert "instead of" in (here / "run.log").read_text()
    assert bucket.steps("accepted") == [] and Store(here / "checkpoints").verify(2) == []
    s3.works()
    run("a", url, "--resume", "auto")
    assert bucket.steps("accepted") == [2, 4, 5]
