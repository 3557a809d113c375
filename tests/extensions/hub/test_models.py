"""Downloads from a stand-in for the Hugging Face hub on the loopback interface."""

import errno
import hashlib
import json
import os
import re
import shutil
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from command import ROOT
from huggingface_hub import close_session, constants
from huggingface_hub.errors import OfflineModeIsEnabled
from messages import says
from stand_in_hub import HubHandler, serving

from ftkit.errors import UserError
from ftkit.extensions.hub import models
from ftkit.extensions.hub.errors import explained, http_library
from ftkit.extensions.hub.models import download
from ftkit.models.pretrained import places
from ftkit.models.pretrained.model_files import missing_files
from ftkit.models.pretrained.places import find_or_download
from ftkit.utils import progress
from ftkit.utils.console.formatting import bytes_text

REPOSITORY = "org/tiny-model"
COMMIT = "a" * 40
TOKEN = "hf_secretsecretsecret"
WEIGHTS = bytes(range(256)) * 4096
"""1 MiB."""
SAFE = {
    "config.json": b"{}",
    "generation_config.json": b"{}",
    "tokenizer.json": b"{}",
    "model.safetensors": WEIGHTS,
    "README.md": b"---\nlicense: mit\n---\n",
    "pictures.md": b"not needed",
}
SHARDED = {
    "config.json": b"{}",
    "model.safetensors.index.json": json.dumps(
        {
            "weight_map": {
                "a": "model-00001-of-00002.safetensors",
                "b": "model-00002-of-00002.safetensors",
            }
        }
    ).encode(),
    "model-00001-of-00002.safetensors": WEIGHTS[:1000],
    "model-00002-of-00002.safetensors": WEIGHTS,
}


@dataclass(frozen=True)
class Request:
    method: str
    path: str
    range: str | None
    authorization: str | None


@dataclass
class Hub:
    """What the stand-in serves, and what it was asked."""

    url: str = ""
    downloads: Path = Path()
    files: dict[str, bytes] = field(default_factory=lambda: dict(SAFE))
    gated: bool = False
    """Only the owner of TOKEN may read the files; everyone may list them, as on the real hub."""
    status: int | None = None
    """Answer everything with this status."""
    error_code: str | None = None
    cut_after_bytes: int | None = None
    """Break off the next transfer that is longer."""
    stalls: bool = False
    """Answer nothing until `stalled` is set."""
    stalled: threading.Event = field(default_factory=threading.Event)
    requests: list[Request] = field(default_factory=list)

    def arrived_bytes(self) -> int:
        """Bytes that the client has written of files that are not complete."""
        total = 0
        for file in self.downloads.rglob("*.incomplete"):
            with suppress(FileNotFoundError):  # complete by now
                total += file.stat().st_size
        return total

    def transfers(self) -> list[Request]:
        return [
            request
            for request in self.requests
            if request.method == "GET" and ("/resolve/" in request.path)
        ]


def make_handler(served: Hub) -> type[HubHandler]:
    class Handler(HubHandler):
        def answer(self) -> None:
            path = urlsplit(self.path).path
            authorization = self.headers["Authorization"]
            served.requests.append(
                Request(self.command, path, self.headers["Range"], authorization)
            )
            if served.stalls:
                served.stalled.wait(30)
            if served.status is not None:
                error = {"X-Error-Code": served.error_code} if served.error_code else {}
                self.reply(served.status, b"", error)
            elif path.startswith(f"/api/models/{REPOSITORY}"):
                self.list_files(path, served.files, {"id": REPOSITORY, "sha": COMMIT})
            elif not path.startswith(f"/{REPOSITORY}/resolve/{COMMIT}/"):
                self.reply(404, b"", {"X-Error-Code": "RepoNotFound"})
            elif served.gated and authorization != f"Bearer {TOKEN}":
                self.reply(401, b"", {"X-Error-Code": "GatedRepo"})
            else:
                self.send_file(served.files[path.rpartition("/")[2]])

        def send_file(self, content: bytes) -> None:
            etag = hashlib.sha256(content).hexdigest()
            headers = {"ETag": f'"{etag}"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}
            if wanted := self.headers["Range"]:
                start = int(wanted.removeprefix("bytes=").rstrip("-"))
                headers["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
                self.reply(206, content[start:], headers)
            else:
                self.reply(200, content, headers)

        def send_body(self, body: bytes) -> None:
            cut = served.cut_after_bytes
            if cut is not None and len(body) > cut:
                served.cut_after_bytes = None
                body = body[:cut]
                self.close_connection = True
                super().send_body(body)
                self.reset_connection()
                return
            super().send_body(body)

        def reset_connection(self) -> None:
            """Reset it: after a mere end, version 2 of the client goes on by itself."""
            deadline = time.monotonic() + 30
            while not served.arrived_bytes():  # a reset discards what the client has not read
                assert time.monotonic() < deadline
                time.sleep(0.01)
            linger = struct.pack("ii", 1, 0)
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            self.connection.close()

    return Handler


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    """A hub that huggingface_hub takes for the real one, although it is imported already."""
    hub = Hub(downloads=tmp_path / "checkpoints")
    with serving(make_handler(hub), monkeypatch, tmp_path) as hub.url:
        yield hub


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "checkpoints"


def contents(directory: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in directory.iterdir() if file.is_file()}


def needed(files: dict[str, bytes]) -> dict[str, bytes]:
    return {name: content for name, content in files.items() if name != "pictures.md"}


# Downloading


@pytest.mark.parametrize("files", [SAFE, SHARDED])
def test_settings_tokenizer_and_weights_are_fetched_and_nothing_else(
    files: dict[str, Any], served: Hub, root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    served.files = {**files, "consolidated.safetensors": b"x", "flax_model.msgpack": b"x"}
    directory = download(REPOSITORY, root=root)
    assert directory == root / REPOSITORY
    assert contents(directory) == needed(files)
    assert missing_files(directory) == []
    size = bytes_text(sum(map(len, needed(files).values())))
    shown = capsys.readouterr()
    assert shown.out == ""
    begun, ended = shown.err.splitlines()
    assert begun == f"fetching {REPOSITORY}, {size} ..."
    assert re.fullmatch(rf"{re.escape(begun)} [\d.]+ m?s", ended)


@pytest.mark.parametrize("arrived", [0, 300_000])
def test_how_much_has_arrived_is_told_in_a_log_too(
    arrived: int,
    served: Hub,
    root: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    served.files = SHARDED
    monkeypatch.setattr("huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE", 2**16)
    if arrived:
        served.cut_after_bytes = arrived
        with pytest.raises(UserError):
            download(REPOSITORY, root=root)
        capsys.readouterr()
    monkeypatch.setattr("ftkit.utils.console.display.LINE_INTERVAL_S", 0.0)
    download(REPOSITORY, root=root)
    shares = [int(share) for share in re.findall(r"(\d+) %", capsys.readouterr().err)]
    assert len(shares) > 3 and shares == sorted(shares) and shares[-1] == 100


def test_quiet_downloads_say_nothing(
    served: Hub, root: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "_verbosity", "quiet")
    download(REPOSITORY, root=root)
    assert capfd.readouterr() == ("", "")


def test_bin_files_are_fetched_only_where_there_are_no_safetensors(served: Hub, root: Path) -> None:
    served.files = {**SAFE, "pytorch_model.bin": b"pickle"}
    assert "pytorch_model.bin" not in contents(download(REPOSITORY, root=root / "both"))
    del served.files["model.safetensors"]
    served.files["training_args.bin"] = b"pickle"
    fetched = contents(download(REPOSITORY, root=root / "bin"))
    assert fetched["pytorch_model.bin"] == b"pickle"
    assert "training_args.bin" not in fetched


def test_settings_are_fetched_without_weights_and_a_download_goes_on_from_there(
    served: Hub, root: Path
) -> None:
    served.files |= {"tokenizer_config.json": b"{}"}
    places.fetch_settings(REPOSITORY, root=root)
    small = {"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"}
    assert contents(root / REPOSITORY).keys() == small
    places.fetch_settings.cache_clear()
    asked = len(served.requests)
    places.fetch_settings(f"{root}/{REPOSITORY}", root=root)
    assert len(served.requests) == asked
    assert contents(download(REPOSITORY, root=root)) == needed(served.files)


def test_a_version_is_fetched_into_a_directory_of_its_own(served: Hub, root: Path) -> None:
    directory = download(f"{REPOSITORY}@v1.2", root=root)
    assert directory == root / f"{REPOSITORY}@v1.2"
    assert f"/api/models/{REPOSITORY}/revision/v1.2" in {r.path for r in served.requests}
    assert contents(directory) == needed(SAFE)
    assert places.find_here(f"{REPOSITORY}@v1.2", root=root) == directory
    assert places.find_here(REPOSITORY, root=root) is None
    assert places.hub_name(str(directory)) == f"{REPOSITORY}@v1.2"
    served.status, served.error_code = 404, "RevisionNotFound"
    assert says(failure(root, repository=f"{REPOSITORY}@v9"), REPOSITORY, "no version v9")


@pytest.mark.parametrize("status", [None, 401, 404, 503])
def test_settings_that_cannot_be_had_are_no_error_and_leave_nothing(
    served: Hub, root: Path, status: int | None
) -> None:
    served.gated, served.status = status is None, status
    places.fetch_settings(REPOSITORY, root=root)
    assert served.requests and not (root / REPOSITORY / "config.json").exists()
    places.fetch_settings("no-repository", root=root)
    places.fetch_settings.cache_clear()


def test_a_second_download_fetches_no_file_and_a_second_search_asks_nothing(
    served: Hub, root: Path
) -> None:
    directory = download(REPOSITORY, root=root)
    served.requests.clear()
    assert download(REPOSITORY, root=root) == directory
    assert served.requests and not served.transfers()
    served.requests.clear()
    assert find_or_download(REPOSITORY, root=root) == directory
    assert find_or_download(f"checkpoints/{REPOSITORY}", root=root) == directory
    assert not served.requests


def test_an_interrupted_download_is_completed(
    served: Hub, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 2**16)  # what is lost is less than this
    served.cut_after_bytes = 300_000
    with pytest.raises(UserError, match=r"broke off.*Run the command again"):
        download(REPOSITORY, root=root)
    is_resumed = served.arrived_bytes() > 0  # version 2 of the client begins the file again
    assert missing_files(root / REPOSITORY)
    served.requests.clear()
    directory = find_or_download(REPOSITORY, root=root)
    (transfer,) = served.transfers()
    assert "safetensors" in transfer.path
    start = int((transfer.range or "bytes=0-").removeprefix("bytes=").rstrip("-"))
    assert (start > 0) == is_resumed and start <= 300_000
    assert (directory / "model.safetensors").read_bytes() == WEIGHTS
    assert missing_files(directory) == []


@pytest.mark.parametrize("lost", ["config.json", "model-00002-of-00002.safetensors"])
def test_an_incomplete_directory_is_completed(lost: str, served: Hub, root: Path) -> None:
    served.files = dict(SHARDED)
    (download(REPOSITORY, root=root) / lost).unlink()
    served.requests.clear()
    directory = find_or_download(f"checkpoints/{REPOSITORY}", root=root)
    assert contents(directory) == SHARDED
    assert [request.path.rpartition("/")[2] for request in served.transfers()] == [lost]


@pytest.mark.parametrize("by", ["argument", "environment", "both"])
def test_the_token_is_sent_and_an_explicit_one_comes_first(
    by: str, served: Hub, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    served.gated = True
    if by != "argument":
        monkeypatch.setenv("HF_TOKEN", TOKEN if by == "environment" else "hf_another")
    download(REPOSITORY, root=root, token=None if by == "environment" else TOKEN)
    assert {request.authorization for request in served.requests} == {f"Bearer {TOKEN}"}


def test_the_command_downloads_from_the_hub_that_the_environment_names(
    served: Hub, tmp_path: Path
) -> None:
    environment = {**os.environ, "HF_ENDPOINT": served.url, "HF_HOME": str(tmp_path / "home")}
    environment["PYTHONPATH"] = os.pathsep.join((str(ROOT), os.environ.get("PYTHONPATH", "")))
    done = subprocess.run(
        [sys.executable, "-m", "ftkit", "download", REPOSITORY],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0 and f"checkpoints/{REPOSITORY}" in done.stdout, done.stderr
    assert contents(tmp_path / "checkpoints" / REPOSITORY) == needed(SAFE)


# What goes wrong


def failure(root: Path, token: str | None = None, repository: str = REPOSITORY) -> str:
    with pytest.raises(UserError) as caught:
        download(repository, root=root, token=token)
    return str(caught.value)


def test_a_gated_model_says_how_to_be_let_in_and_never_shows_the_token(
    served: Hub, root: Path
) -> None:
    served.gated = True
    for token in (None, "hf_somebodyelses"):
        text = failure(root, token)
        assert f"{served.url}/{REPOSITORY}" in text
        assert "HF_TOKEN" in text and "--access_token" in text
        assert "somebodyelses" not in text
    assert missing_files(root / REPOSITORY)


@pytest.mark.parametrize("status", [401, 403])
def test_a_refused_token_is_said_to_be_so(status: int, served: Hub, root: Path) -> None:
    served.status = status
    text = failure(root, TOKEN)
    assert f"HTTP {status}" in text and "token" in text and TOKEN not in text


def test_an_unknown_model_is_answered_with_its_nearest_names(served: Hub, root: Path) -> None:
    text = failure(root, repository="openlm-research/open_lama_3b")
    assert "There is no model openlm-research/open_lama_3b" in text
    assert "Did you mean openlm-research/open_llama_3b" in text


@pytest.mark.parametrize("status", [429, 500, 503])
def test_a_hub_in_trouble_asks_for_patience(status: int, served: Hub, root: Path) -> None:
    served.status = status
    assert f"HTTP {status}" in failure(root)


def test_a_server_that_is_down_says_what_to_do(
    served: Hub, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    text = failure(root)
    assert "http://127.0.0.1:9 cannot be reached" in text and "HF_ENDPOINT" in text


def test_a_hub_that_does_not_answer_in_time_is_given_up(
    served: Hub, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    served.stalls = True
    monkeypatch.setattr(models, "_SETTINGS_TIMEOUT_S", 0.2)
    refusal = places.fetch_settings(REPOSITORY, root=root)
    served.stalled.set()
    places.fetch_settings.cache_clear()
    assert refusal is not None and "broke off (ReadTimeout). Run the command again" in str(refusal)


def test_a_proxy_that_is_down_says_what_to_do(
    served: Hub, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NO_PROXY")
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    close_session()
    assert "cannot be reached from this machine" in failure(root)
    assert not served.requests


HTTP = http_library()


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (HTTP.ConnectError("no"), "cannot be reached Check the network"),
        (HTTP.ConnectTimeout("no"), "cannot be reached Check the network"),
        (HTTP.ProxyError("no"), "cannot be reached Check the network"),
        (HTTP.ReadTimeout("no"), "broke off ReadTimeout again"),
        (HTTP.RemoteProtocolError("no"), "broke off RemoteProtocolError again"),
        (OfflineModeIsEnabled("no"), "HF_HUB_OFFLINE Unset"),
        (OSError(errno.ENOSPC, "no"), "again"),
        (PermissionError("Xet"), "broke off PermissionError again"),
        (PermissionError(errno.EACCES, "no"), "Run the command"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)
def test_failures_of_the_connection_have_a_remedy(error: Exception, words: str) -> None:
    push = pytest.importorskip("ftkit.extensions.publish.push")
    for refusal in (
        explained(error, REPOSITORY, Path("checkpoints"), str),
        push.explained_upload(error, REPOSITORY),
    ):
        assert refusal.exit_code == 2 and isinstance(error, (HTTP.HTTPError, OSError))
        assert all(word in str(refusal) for word in words.split())


def test_offline_mode_says_what_to_do(
    served: Hub, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert "HF_HUB_OFFLINE" in failure(root)
    assert not served.requests


def test_a_disk_too_small_is_noticed_before_anything_is_fetched(
    served: Hub, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(root.parent)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
    assert "0.0 GiB are free" in failure(root)
    assert not served.transfers()


def test_what_is_there_already_needs_no_room(
    served: Hub, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    download(REPOSITORY, root=root)
    usage = shutil.disk_usage(root)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=0))
    assert download(REPOSITORY, root=root) == root / REPOSITORY


@pytest.mark.parametrize("weights", ["model.onnx", "model-q4.safetensors"])
def test_a_repository_without_weights_to_read_is_refused(
    weights: str, served: Hub, root: Path
) -> None:
    served.files = {"config.json": b"{}", weights: b""}
    assert "holds no weights that ftkit reads" in failure(root)
    assert not served.transfers()


@pytest.mark.parametrize("name", ["tiny-llama-1.1b", "../outside", "a/b/c", "a/b@", "a/b@../c"])
def test_only_names_of_the_hub_are_downloaded(name: str, served: Hub, root: Path) -> None:
    assert "is not a model on the hub" in failure(root, repository=name)
    assert not served.requests and not root.exists()


# Finding


def make_directory(directory: Path, *files: str) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    for file in files:
        (directory / file).write_text("{}")
    return directory


@pytest.mark.parametrize(
    "files",
    [
        ("config.json", "model.safetensors"),
        ("config.json", "pytorch_model.bin"),
        ("model_config.yaml", "lit_model.pth"),
    ],
)
def test_a_complete_directory_is_taken_as_it_is(
    files: tuple[str, ...], tmp_path: Path, served: Hub
) -> None:
    directory = make_directory(tmp_path / "some/model", *files)
    assert find_or_download(str(directory)) == directory
    assert find_or_download(f"{directory}/") == directory
    assert not served.requests


@pytest.mark.parametrize(
    ("files", "missing"),
    [
        ((), r"config.json, weights \(model.safetensors\)"),
        (("config.json",), r"weights \(model.safetensors\)"),
        (("model.safetensors",), "config.json"),
        (("lit_model.pth",), "config.json, weights"),
        (("config.json", "model.safetensors.index.json"), "model-00001-of-00002.safetensors"),
    ],
)
def test_an_incomplete_directory_of_ones_own_is_refused_naming_what_is_missing(
    files: tuple[Any, ...], missing: str, tmp_path: Path, served: Hub
) -> None:
    directory = make_directory(tmp_path / "model", *files)
    if (index := directory / "model.safetensors.index.json").exists():
        index.write_bytes(SHARDED[index.name])
    with pytest.raises(UserError, match=f"not a complete base model: {missing}"):
        find_or_download(str(directory))
    assert not served.requests


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("no/such/directory", "does not exist"),
        ("/no/such", "does not exist"),
        ("~/no-such-model", "does not exist"),
        ("pythia-14m", "Did you mean EleutherAI/pythia-14m"),
    ],
)
def test_a_path_that_does_not_exist_says_what_to_give(
    name: str, message: str, served: Hub, root: Path
) -> None:
    with pytest.raises(UserError, match=f"checkpoint_dir {name} .*{message}"):
        find_or_download(name, root=root)
    assert not served.requests


def test_importing_the_module_is_cheap() -> None:
    heavy = {"torch", "litgpt", "huggingface_hub"}
    code = f"import sys, ftkit.extensions.hub.models; print({heavy!r} & {{*sys.modules}})"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "set()\n"


def test_licences_are_fetched_with_the_model(served: Hub, root: Path) -> None:
    terms = {"LICENSE.txt": b"terms", "NOTICE": b"of somebody", "USE_POLICY.md": b"for good"}
    served.files |= {**terms, "docs/LICENSE": b"of the documents"}
    assert contents(download(REPOSITORY, root=root)) == needed(SAFE) | terms


def test_weights_that_cannot_be_read_are_not_downloaded(served: Hub, root: Path) -> None:
    served.files["config.json"] = b'{"quantization_config": {"quant_method": "aqlm"}}'
    assert "holds AQLM weights" in failure(root)
    assert [request.path.rpartition("/")[2] for request in served.transfers()] == ["config.json"]


def test_the_only_gguf_file_of_a_repository_is_fetched(served: Hub, root: Path) -> None:
    served.files = {"model-Q8_0.gguf": b"GGUF", "README.md": b"", "LICENSE": b"terms"}
    directory = download(REPOSITORY, root=root)
    assert contents(directory) == needed(served.files)
    with pytest.raises(UserError, match=r"model-Q8_0.gguf is not a valid GGUF file"):
        find_or_download(REPOSITORY, root=root)


def test_of_several_gguf_files_one_has_to_be_chosen(served: Hub, root: Path) -> None:
    served.files = {"a.gguf": b"GGUF", "b.gguf": b"GGUF"}
    assert f"2 GGUF files: a.gguf, b.gguf. Fetch one by hf download {REPOSITORY} a.gguf" in failure(
        root
    )
