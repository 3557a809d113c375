"""The object storage that these tests share, and runs there."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import warm
from command import command_environment, command_line
from object_servers import (
    AZURE_KEY,
    AZURITE,
    SECRET,
    Bucket,
    Proxy,
    az_server,
    gs_server,
    has_azurite,
    s3_server,
)
from remote_runs import Attempt, Ftkit, ended
from runs import DEFAULT_SIGNALS, options

NO_ANSWERS = {"eval__interval": 0, "eval__max_new_tokens": 0, "eval__exact_match": 0}


@pytest.fixture(scope="session")
def storage() -> Iterator[Proxy]:
    """S3, which works unless a test lets it fail."""
    pytest.importorskip("moto", reason="the extra dev is not installed")
    with s3_server() as proxy:
        yield proxy


@pytest.fixture(scope="session")
def google() -> Iterator[Proxy]:
    """Google Cloud Storage, as an emulator has it."""
    pytest.importorskip("gcp_storage_emulator", reason="the extra dev is not installed")
    with gs_server() as proxy:
        yield proxy


@pytest.fixture(scope="session")
def azure() -> Iterator[Proxy]:
    """Azure Blob Storage, as its emulator has it."""
    pytest.importorskip("adlfs", reason="the extra dev is not installed")
    if not has_azurite():
        # An npm package, which pip cannot install; stand-ins still cover errors of Azure.
        pytest.skip(f"{AZURITE} is not on the PATH; see CONTRIBUTING.md")
    with az_server() as proxy:
        yield proxy


def _used(proxy: Proxy, patch: pytest.MonkeyPatch, cache: Path) -> Iterator[Proxy]:
    for name, value in proxy.environment.items():
        patch.setenv(name, value)
    patch.setenv("FTKIT_CACHE_DIR", str(cache))
    proxy.works()
    proxy.requests.clear()
    yield proxy
    proxy.works()


@pytest.fixture
def s3(storage: Proxy, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Proxy]:
    """S3 for this process and those that it starts, and a cache of its own."""
    yield from _used(storage, monkeypatch, tmp_path / "cache")


@pytest.fixture
def gs(google: Proxy, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Proxy]:
    """A proxy before a stand-in for Google's storage."""
    yield from _used(google, monkeypatch, tmp_path / "cache")


@pytest.fixture
def az(azure: Proxy, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Proxy]:
    """A proxy before an emulator of Azure's storage."""
    yield from _used(azure, monkeypatch, tmp_path / "cache")


@pytest.fixture
def bucket(s3: Proxy) -> Bucket:
    """Objects in the storage."""
    return Bucket(s3)


@pytest.fixture
def begin(common: list[str], tmp_path: Path) -> Iterator[Ftkit]:
    """Starts a command on a machine: `begin("a", url, "--devices", "2")`.

    It is a run that saves every two steps, or what `command` says, then with these words only;
    `before` has statements that its supervisor runs first. None outlives the test, and no secret is
    in what they have said or written.
    """
    begun: list[Attempt] = []

    def start(machine: str, *more: object, command: str = "finetune", before: str = "") -> Attempt:
        words = [*command.split(), *more]
        if command.startswith("finetune"):
            words = [command, *common, "--out_dir", *more]
            if "--train.save_interval" not in words:
                words += options(train__save_interval=2, **NO_ANSWERS)
        environment = command_environment() | {"FTKIT_CACHE_DIR": str(tmp_path / machine)}
        environment["DS_ACCELERATOR"] = "cpu"
        line = command_line(*words, before=f"{DEFAULT_SIGNALS}\n{before}")
        begun.append(warm.SERVER.start(line, environment, cwd=tmp_path))
        return begun[-1]

    yield start
    for attempt in begun:
        attempt.kill()
    said = [text for attempt in begun for text in attempt.communicate()]
    files = [path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()]
    for secret in (SECRET, AZURE_KEY):
        assert not any(secret in text for text in said)
        assert not any(secret.encode() in content for content in files)


@pytest.fixture
def run(begin: Ftkit) -> Callable[..., str]:
    """Runs a command to its successful end and returns its output."""

    def run(*arguments: object, **keys: str) -> str:
        code, said = ended(begin(*arguments, **keys))
        assert code == 0, said
        return said

    return run


@pytest.fixture(scope="session")
def made() -> dict[tuple[str, ...], dict[str, bytes]]:
    """Objects of runs, by the words of their command."""
    return {}


@pytest.fixture
def put(
    run: Callable[..., str], bucket: Bucket, made: dict[tuple[str, ...], dict[str, bytes]]
) -> Callable[..., None]:
    """Puts a run at a url, as its machine left it: `put("PREFIX", "--stop_after", "2")`.

    Each command runs once; further calls put copies of its objects there.
    """

    def put(prefix: str, *words: str, command: str = "finetune") -> None:
        if (command, *words) not in made:
            origin = f"made/{len(made)}"
            run("made", f"s3://bucket/{origin}", *words, command=command)
            made[command, *words] = {
                name: bucket.read(f"{origin}/{name}") for name in bucket.names(origin)
            }
        for name, content in made[command, *words].items():
            bucket.write(f"{prefix}/{name}", content)

    return put


@pytest.fixture(scope="session")
def wholes() -> dict[str, Path]:
    """Runs in directories that nothing stopped, by command."""
    return {}


@pytest.fixture
def whole(
    run: Callable[..., str], wholes: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Path]:
    """The run of a command, on one device in a directory, that nothing stopped."""

    def whole(command: str) -> Path:
        if command not in wholes:
            wholes[command] = tmp_path_factory.mktemp("whole") / "run"
            run("whole", wholes[command], command=command)
        return wholes[command]

    return whole
