"""The mirror of a run, by what it does at the url for what happens in the directory."""

from collections.abc import Iterator

import checkpoints
import pytest
from messages import key_words
from object_servers import Bucket, Fault, Proxy, writes

from ftkit.extensions.object_storage.claim import ClaimHolder, RemoteClaim
from ftkit.extensions.object_storage.mirror import Mirror
from ftkit.extensions.object_storage.objects import Objects
from ftkit.runs.directory import RunDirectory
from ftkit.runs.url_runs import UploadFailed
from ftkit.utils.urls import local_path

URL = "s3://bucket/mirrored"


@pytest.fixture
def run(s3: Proxy) -> RunDirectory:
    """One without any checkpoint."""
    run = RunDirectory(local_path(URL))
    run.state.mkdir(parents=True)
    run.store.directory.mkdir()
    return run


@pytest.fixture
def claim(run: RunDirectory) -> Iterator[RemoteClaim]:
    claim = RemoteClaim(Objects(URL))
    claim.take(print)
    yield claim
    claim.release()


@pytest.mark.slow
def test_an_old_checkpoint_stays_at_the_url_until_its_replacement_is_complete(
    run: RunDirectory, claim: RemoteClaim, bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if that was deleted here before it could be sent."""
    checkpoints.save(run.store, 2)
    Mirror(run, claim, {}).finish()
    assert bucket.steps("mirrored") == [2]
    run.store.delete(2)
    mirror = Mirror(run, claim, Objects(URL).listing())
    with monkeypatch.context() as patch:
        patch.setattr(type(run.store), "steps", lambda _: [4])  # which is deleted just then
        mirror.finish()
    assert bucket.steps("mirrored") == [2]
    checkpoints.save(run.store, 6)
    mirror.finish()
    assert bucket.steps("mirrored") == [6]
    assert not any("step-00000002" in name for name in bucket.names("mirrored"))


def test_a_run_that_lost_its_claim_completes_no_checkpoint(
    run: RunDirectory, claim: RemoteClaim, s3: Proxy, bucket: Bucket
) -> None:
    """It comes back while a shard is on its way, when another has tidied up there."""
    checkpoints.save(run.store, 2)
    Mirror(run, claim, {}).finish()
    checkpoints.save(run.store, 4)
    there, next_claim = "mirrored/checkpoints/step-00000004", ".run/claim-000002.json"

    def take_over() -> None:
        """Take over as another machine does, once it has watched for long enough."""
        bucket.write(f"mirrored/{next_claim}", ClaimHolder.here().to_bytes())
        for name in bucket.names(there):
            bucket.delete(f"{there}/{name}")

    met = s3.fails(Fault(when_whole=take_over), writes("/step-00000004/shard-00001"), times=1)
    with pytest.raises(UploadFailed, match=key_words("taken over by")):
        Mirror(run, claim, Objects(URL).listing()).finish()
    assert len(met) == 1 and claim.lost_to is not None
    assert 4 not in bucket.steps("mirrored")
    assert next_claim in bucket.names("mirrored")
