"""Google Cloud Storage: what its interface does otherwise than that of S3."""

from collections.abc import Callable
from pathlib import Path

import pytest
from messages import key_words, says
from object_servers import Bucket, Fault, Proxy, gs_error, is_write
from remote_runs import assert_another_machine_goes_on

from ftkit.extensions.object_storage.objects import Objects
from ftkit.utils.url_files import StorageError

CONDITION = "ifGenerationMatch=0"


@pytest.mark.slow
def test_another_machine_continues_and_reads_a_run_at_google(
    run: Callable[..., str], whole: Callable[[str], Path], gs: Proxy, tmp_path: Path
) -> None:
    """Its claim is written on the condition that there is none, which the emulator ignores."""
    bucket = Bucket(gs)
    said = run("a", "gs://bucket/on/run", "--stop_after", "2")
    assert says(said, "gs://bucket/on/run ... conditional writes")
    created = [request for request in gs.requests if CONDITION in request.query]
    assert created and all(is_write(request) for request in created)
    assert_another_machine_goes_on(run, bucket, "gs", whole("finetune"), tmp_path)


def test_of_two_that_create_an_object_google_refuses_the_second(gs: Proxy) -> None:
    """As the real one does; see https://cloud.google.com/storage/docs/request-preconditions."""
    objects = Objects("gs://bucket/claims")
    assert objects.create("claim", b"first")
    gs.fails(Fault(412, gs_error(412, "conditionNotMet")), lambda r: CONDITION in r.query)
    assert objects.create("claim", b"first")  # its own, whose answer was lost
    assert not objects.create("claim", b"second")
    assert objects.read("claim") == b"first"


def test_objects_of_google_are_as_those_of_s3(gs: Proxy, tmp_path: Path) -> None:
    """Also one that is sent in parts, and one that is not there."""
    objects = Objects("gs://bucket/kinds")
    large = tmp_path / "large"
    large.write_bytes(bytes(range(256)) * 2**17)
    objects.upload(large, "a/large")
    before = objects.entry("a/large")
    assert before is not None and before.size_bytes == 2**25
    assert objects.listing() == {"a/large": before}
    assert objects.read_range("a/large", 2**24 - 5, 2**25) == large.read_bytes()[2**24 - 5 :]
    objects.download("a/large", tmp_path / "b/copy")
    assert (tmp_path / "b/copy").read_bytes() == large.read_bytes()
    objects.copy("a/large", "b")
    objects.write("a/large", b"small")
    after = objects.entry("a/large")
    assert after is not None and after.version != before.version
    objects.delete(["a/large", "never"])
    assert list(objects.listing()) == ["b"] and objects.entry("a/large") is None
    with pytest.raises(StorageError) as found:
        objects.read("a/large")
    assert isinstance(found.value.__cause__, FileNotFoundError)
    with pytest.raises(StorageError, match=key_words("no such bucket")):
        Objects("gs://elsewhere/run").write("name", b"")
