"""Azure Blob Storage: what its interface does otherwise than that of S3.

Tests that need its emulator are skipped where that is not installed; of the others what Azure
answers is played back.
"""

import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from command import command_environment, command_line
from messages import key_words, says
from object_servers import (
    AZURE_KEY,
    BROKEN,
    CUT,
    Bucket,
    Fault,
    Proxy,
    Request,
    az_fault,
    behind_proxy,
    is_write,
)
from remote_runs import Ftkit, assert_another_machine_goes_on, ended

from ftkit.extensions.object_storage import objects as objects_module
from ftkit.extensions.object_storage.claim import RemoteClaim
from ftkit.extensions.object_storage.objects import Objects
from ftkit.utils.url_files import StorageError

pytest.importorskip("adlfs", reason="the extra dev is not installed")
CONDITION = ("If-None-Match", "*")
WRITTEN = Fault(
    201, headers=(("ETag", '"0x1"'), ("Last-Modified", "Mon, 23 Nov 2026 10:00:00 GMT"))
)
PASSING = {
    "InternalError": az_fault(500, "InternalError"),
    "ServerBusy": az_fault(503, "ServerBusy"),
    "a broken connection": BROKEN,
}
FINAL = {
    "AuthenticationFailed": (
        403,
        r"AuthenticationFailed happened \(|AuthenticationFailed happened$",
    ),
    "AuthorizationPermissionMismatch": (403, "AuthorizationPermissionMismatch happened"),
    "ContainerNotFound": (404, "there is no such container"),
}


class Waits:
    """Time that passes only by waiting for another attempt of ours."""

    def __init__(self) -> None:
        self.all_s: list[float] = []

    def monotonic(self) -> float:
        return sum(self.all_s)

    def sleep(self, seconds: float) -> None:
        self.all_s.append(seconds)


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> Waits:
    waits = Waits()
    monkeypatch.setattr(objects_module, "time", waits)
    return waits


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Proxy]:
    """Azure, of which the test gives every answer; there is no server behind it."""
    with behind_proxy(9, "az") as proxy:
        for name, value in proxy.environment.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("FTKIT_CACHE_DIR", str(tmp_path / "cache"))
        yield proxy


def commits_blocks(request: Request) -> bool:
    return "comp=blocklist" in request.query


def has_condition(request: Request) -> bool:
    return CONDITION in request.headers.items()


@pytest.mark.slow
def test_another_machine_continues_and_reads_a_run_at_azure(
    run: Callable[..., str], whole: Callable[[str], Path], az: Proxy, tmp_path: Path
) -> None:
    """Its claim is written on the condition that there is none, which the emulator enforces."""
    bucket = Bucket(az)
    said = run("a", "az://bucket/on/run", "--stop_after", "2")
    assert "warning" not in said
    claims = [r for r in az.requests if is_write(r) and r.path.endswith("claim-000001.json")]
    assert has_condition(claims[0])
    assert_another_machine_goes_on(run, bucket, "az", whole("finetune"), tmp_path)


def test_a_second_run_at_an_az_url_is_refused_by_the_storage(begin: Ftkit, az: Proxy) -> None:
    url = "az://bucket/twice"
    claim = RemoteClaim(Objects(url))
    claim.take(lambda _: None)
    try:
        assert claim.is_certain
        code, said = ended(begin("a", url))
        assert code == 2 and says(said, f"out_dir {url} belongs to a run")
        name, *more = Objects(url).listing()
        az.requests.clear()
        assert not more and not Objects(url).create(name, b"another's")
        assert [r.method for r in az.requests if has_condition(r)] == ["PUT"]
        assert Objects(url).read(name) != b"another's"
    finally:
        claim.release()
    assert Objects(url).listing() == {}


def test_of_two_that_create_an_object_azure_refuses_the_second(played: Proxy) -> None:
    """See https://learn.microsoft.com/rest/api/storageservices/put-blob."""
    is_there = False

    def answer(request: Request) -> Fault:
        nonlocal is_there
        if request.method == "GET":
            return Fault(206, b"first", (*WRITTEN.headers, ("Content-Range", "bytes 0-4/5")))
        assert has_condition(request)
        if is_there:
            return az_fault(409, "BlobAlreadyExists")
        is_there = True
        return WRITTEN

    played.decide = answer
    objects = Objects("az://bucket/claims")
    assert objects.create("claim", b"first")
    assert objects.create("claim", b"first")  # its own, whose answer was lost
    assert not objects.create("claim", b"second")


@pytest.mark.parametrize("code", FINAL)
def test_final_errors_of_azure_are_reported_at_once(played: Proxy, waits: Waits, code: str) -> None:
    status, said = FINAL[code]
    met = played.fails(az_fault(status, code), lambda _: True)
    with pytest.raises(StorageError, match=said) as found:
        Objects("az://bucket/never").write("name", b"content")
    assert len(met) == 1 and waits.all_s == []
    assert "RequestId" not in str(found.value) and str(found.value).count(code) <= 2


def test_azures_library_tries_once_more_between_our_attempts_and_no_longer(
    played: Proxy, waits: Waits
) -> None:
    """By itself it would wait a minute for each of ours."""
    met = played.fails(PASSING["ServerBusy"], lambda _: True)
    begun_s = time.monotonic()
    with pytest.raises(StorageError, match="ServerBusy happened"):
        Objects("az://bucket/busy", patience_s=1.0).write("name", b"content")
    assert waits.all_s == [0.5] and len(met) == 4
    assert time.monotonic() - begun_s < 10


def test_a_copy_exists_once_azure_has_completed_it(played: Proxy) -> None:
    """It answers before; a source that was deleted meanwhile would be lost."""
    states = iter(["pending", "pending", "success", "failed"])

    def answer(request: Request) -> Fault:
        if request.method == "HEAD":
            state = ("x-ms-copy-status", next(states))
            return Fault(200, headers=(*WRITTEN.headers, state, ("x-ms-blob-type", "BlockBlob")))
        assert request.headers["x-ms-copy-source"].endswith("/bucket/move/a")
        return Fault(202, headers=(*WRITTEN.headers, ("x-ms-copy-status", "pending")))

    played.decide = answer
    objects = Objects("az://bucket/move", patience_s=0)
    objects.copy("a", "b")
    assert [request.method for request in played.requests] == ["PUT", "HEAD", "HEAD", "HEAD"]
    with pytest.raises(StorageError, match=key_words("copying a ... failed")):
        objects.copy("a", "b")


def test_no_key_and_no_part_of_a_token_is_in_a_message(
    played: Proxy, waits: Waits, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever a server repeats of them."""
    monkeypatch.setenv("AZURE_STORAGE_SAS_TOKEN", "?sv=2026-01-01&sig=0123456789abc%3D")
    for part in (AZURE_KEY, "0123456789abc=", "0123456789abc%3D"):
        played.fails(az_fault(403, "AuthenticationFailed", f"{part} is odd"), lambda _: True)
        with pytest.raises(StorageError, match=r"\$AZURE_STORAGE_\w+ is odd") as found:
            Objects("az://bucket/secret").write("name", b"content")
        assert part not in str(found.value)


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({}, "AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_CONNECTION_STRING are both unset"),
        ({"AZURE_STORAGE_CONNECTION_STRING": "text"}, "blank or malformed"),
        (
            {"AZURE_STORAGE_ACCOUNT_NAME": "account", "AZURE_STORAGE_ACCOUNT_KEY": "abc"},
            "base64 ... network",
        ),
        (
            {
                "AZURE_STORAGE_ACCOUNT_NAME": "account",
                "AZURE_TOKEN_CREDENTIALS": "AzureCliCredential",
            },
            "AZURE_STORAGE_SAS_TOKEN or az login",
        ),
    ],
    ids=["no account", "not a connection string", "no key", "no sign-in"],
)
def test_missing_credentials_are_reported_in_one_line(
    variables: dict[str, str], said: str, tmp_path: Path
) -> None:
    """Azure's libraries print nothing beside it, and wait for no input."""
    environment = {k: v for k, v in command_environment().items() if not k.startswith("AZURE_")}
    environment |= variables | {"FTKIT_CACHE_DIR": str(tmp_path), "PATH": str(tmp_path)}
    words = command_line("checkpoints", "list", "az://container/run")
    result = subprocess.run(words, capture_output=True, text=True, env=environment, cwd=tmp_path)
    assert result.returncode == 2 and result.stdout == ""
    assert says(result.stderr, said) and "abc" not in result.stderr
    assert result.stderr.startswith("ftkit: az://") and result.stderr.count("\n") == 1


def test_objects_of_azure_are_as_those_of_s3(az: Proxy, tmp_path: Path) -> None:
    """Also one that is sent in parts, one without content, and one that is not there."""
    objects = Objects("az://bucket/kinds")
    large = tmp_path / "large"
    large.write_bytes(bytes(range(256)) * 2**17)
    objects.upload(large, "a/large")
    assert [r.query.partition("&")[0] for r in az.requests] == ["comp=block"] * 2 + [
        "comp=blocklist"
    ]
    before = objects.entry("a/large")
    assert before is not None and before.size_bytes == 2**25
    assert objects.listing() == {"a/large": before}
    assert objects.read_range("a/large", 2**24 - 5, 2**25) == large.read_bytes()[2**24 - 5 :]
    objects.download("a/large", tmp_path / "b/copy")
    assert (tmp_path / "b/copy").read_bytes() == large.read_bytes()
    objects.copy("a/large", "b")
    objects.write("a/large", b"")
    after = objects.entry("a/large")
    assert after is not None and after.version != before.version
    assert objects.read("a/large") == b"" and objects.read("b") == large.read_bytes()
    objects.delete(["a/large", "never"])
    assert list(objects.listing()) == ["b"] and objects.entry("a/large") is None
    with pytest.raises(StorageError) as found:
        objects.read("a/large")
    assert isinstance(found.value.__cause__, FileNotFoundError)
    elsewhere = Objects("az://elsewhere/run")
    for ask in (
        elsewhere.listing,
        lambda: elsewhere.write("name", b""),
        lambda: elsewhere.upload(large, "a"),
    ):
        with pytest.raises(StorageError, match=key_words("no such container")):
            ask()


@pytest.mark.parametrize("fault", PASSING.values(), ids=PASSING)
def test_a_passing_fault_of_azure_does_not_show(
    az: Proxy, waits: Waits, tmp_path: Path, fault: Fault
) -> None:
    """Also in the middle of a file that is sent in parts."""
    objects = Objects("az://bucket/passes")
    large = tmp_path / "large"
    large.write_bytes(bytes(range(256)) * 2**17)
    met = az.fails(fault, is_write, times=3)
    objects.upload(large, "large")
    objects.write("small", b"content")
    assert len(met) == 3
    assert objects.read("large") == large.read_bytes() and objects.read("small") == b"content"


def test_a_file_exists_once_its_blocks_are_committed_and_a_cut_answer_is_an_error(
    az: Proxy, waits: Waits, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """What fails meanwhile is said once, and not by Azure's library."""
    objects = Objects("az://bucket/half", patience_s=1.0)
    large, target = tmp_path / "large", tmp_path / "target"
    large.write_bytes(bytes(range(256)) * 2**18)
    for when in (commits_blocks, is_write):
        met = az.fails(az_fault(500, "InternalError"), when)
        with pytest.raises(StorageError, match="InternalError"):
            objects.upload(large, "large")
        assert met and objects.listing() == {} and objects.entry("large") is None
    az.works()
    objects.upload(large, "large")
    target.write_bytes(b"before")
    az.fails(CUT, lambda request: request.method == "GET")
    with pytest.raises(StorageError, match="reading large failed"):
        objects.download("large", target)
    assert target.read_bytes() == b"before" and list(tmp_path.glob(".*")) == []
    assert capfd.readouterr() == ("", "")
