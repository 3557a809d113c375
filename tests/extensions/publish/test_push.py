"""ftkit push, to a stand-in for the Hugging Face hub, and model cards."""

import base64
import dataclasses
import hashlib
import json
import os
import re
import shutil
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

import huggingface_hub
import pytest
from compared_runs import make_run
from huggingface_hub import ModelCard, constants
from messages import says
from results import Ended
from stand_in_hub import HubHandler, serving

import ftkit
from ftkit.cli.app import run
from ftkit.errors import UserError
from ftkit.extensions.publish.model_card import BaseOrigin, DataOrigin, card_metadata, card_text
from ftkit.extensions.publish.push import upload
from ftkit.runs.report.answers import AnsweredExample
from ftkit.runs.report.report import ChosenResult
from ftkit.utils import progress
from ftkit.utils.console.formatting import number_text

TOKEN = "hf_secretsecretsecret"
NAME, BASE = "me/my-adapter", "org/tiny"
LARGE = (".safetensors", ".gguf")
"""Files that the hub wants to have sent as objects of their own."""


@dataclass
class Hub:
    """Files that the stand-in holds, and what it was sent."""

    url: str = ""
    private: bool | None = None
    """None: there is no repository."""
    files: dict[str, bytes] = field(default_factory=dict)
    objects: dict[str, bytes] = field(default_factory=dict)
    """Large files by SHA-256, also of commits that never came."""
    sent: list[str] = field(default_factory=list)
    """SHA-256 of each object that was sent whole."""
    commits: list[str] = field(default_factory=list)
    """Their messages."""
    break_off: bool = False
    """Drop the connection in the middle of the next object."""
    room: int | None = None
    """For so many more objects; None: for any number."""
    status: int | None = None
    """Answer everything with it."""
    lock: threading.Lock = field(default_factory=threading.Lock)


def make_handler(hub: Hub) -> type[HubHandler]:
    class Handler(HubHandler):
        def do_POST(self) -> None:
            self.answer()

        def do_PUT(self) -> None:
            self.answer()

        def answer(self) -> None:
            path = urlsplit(self.path).path
            if path.startswith("/objects/"):
                self.take_object(path.rpartition("/")[2])
                return
            body = self.rfile.read(int(self.headers["Content-Length"] or 0))
            if path == "/api/agent-harnesses":  # version 2 of the client, without a token
                self.reply(404, b"", {})
                return
            assert self.headers["Authorization"] == f"Bearer {TOKEN}"
            if hub.status is not None:
                self.reply(hub.status, b"", {})
            elif path == "/api/repos/create":
                if hub.private is None:
                    wanted = json.loads(body)  # "visibility" from version 2 of the client on
                    hub.private = wanted.get("private", wanted.get("visibility") == "private")
                self.reply_json({"url": f"{hub.url}/{NAME}"})
            elif path == "/api/validate-yaml":
                self.reply_json({"errors": [], "warnings": []})
            elif path == f"/api/models/{NAME}":
                self.list_files(path, hub.files, {"id": NAME, "private": hub.private})
            elif path == f"/api/models/{NAME}/preupload/main":
                self.reply_json({"files": [self.mode(file) for file in json.loads(body)["files"]]})
            elif path == f"/{NAME}.git/info/lfs/objects/batch":
                self.reply_json({"objects": [self.place(o) for o in json.loads(body)["objects"]]})
            elif path == f"/api/models/{NAME}/commit/main":
                self.commit([json.loads(line) for line in body.splitlines()])
            else:
                self.reply(404, b"", {"X-Error-Code": "RepoNotFound"})

        def mode(self, file: dict[str, Any]) -> dict[str, Any]:
            mode = "lfs" if file["path"].endswith(LARGE) else "regular"
            return {"path": file["path"], "uploadMode": mode, "shouldIgnore": False, "oid": None}

        def place(self, wanted: dict[str, Any]) -> dict[str, Any]:
            if wanted["oid"] in hub.objects:
                return wanted
            upload = {"href": f"{hub.url}/objects/{wanted['oid']}"}
            return wanted | {"actions": {"upload": upload}}

        def take_object(self, oid: str) -> None:
            size = int(self.headers["Content-Length"])
            if hub.break_off:
                hub.break_off = False
                self.rfile.read(size // 2)
                self.close_connection = True
                self.connection.close()
                return
            content = self.rfile.read(size)
            with hub.lock:  # several come at one time
                if hub.room is not None and hub.room <= len(hub.objects):
                    self.reply(507, b"", {})
                    return
                assert hashlib.sha256(content).hexdigest() == oid
                hub.objects[oid] = content
                hub.sent.append(oid)
            self.reply(200, b"", {})

        def commit(self, lines: list[dict[str, Any]]) -> None:
            for line in lines:
                value = line["value"]
                match line["key"]:
                    case "header":
                        hub.commits.append(value["summary"])
                    case "file":
                        hub.files[value["path"]] = base64.b64decode(value["content"])
                    case "lfsFile":
                        hub.files[value["path"]] = hub.objects[value["oid"]]
                    case "deletedFile":
                        del hub.files[value["path"]]
            commit = {"commitUrl": f"{hub.url}/{NAME}/commit/1", "commitOid": "1" * 40}
            self.reply_json(commit)

    return Handler


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    hub = Hub()
    with serving(make_handler(hub), monkeypatch, tmp_path) as hub.url:
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        yield hub


def push(*words: object) -> None:
    assert run(["push", *map(str, words)]) == 0


def mistake(*words: object) -> str:
    with pytest.raises(UserError) as error:
        run(["push", *map(str, words)])
    assert TOKEN not in str(error.value)
    return str(error.value)


# --- What is sent -------------------------------------------------------------------------------


def test_an_adapter_is_private_whole_and_names_its_base_model_as_others_find_it(
    hub: Hub, ended: dict[str, Ended], capfd: pytest.CaptureFixture[str]
) -> None:
    final = ended["lora"].out_dir / "final"
    push(ended["lora"].out_dir, NAME, "--base", BASE)
    out, err = capfd.readouterr()
    assert f"uploaded to {hub.url}/{NAME} (private)\n" in out and TOKEN not in out + err
    here = {file.name: file.read_bytes() for file in final.iterdir()}
    assert (hub.private, hub.files.keys()) == (True, here.keys())
    changed = {name for name, content in here.items() if hub.files[name] != content}
    assert changed == {"README.md", "adapter_config.json"}
    settings = json.loads(hub.files["adapter_config.json"])
    assert (settings.pop("base_model_name_or_path"), settings["revision"]) == (BASE, None)
    assert settings.items() <= json.loads(here["adapter_config.json"]).items()
    card = ModelCard(hub.files["README.md"].decode())
    assert {"base_model": BASE, "library_name": "peft"}.items() <= card.data.to_dict().items()
    assert f'name = "{NAME}"' in card.text
    everything = b"".join(hub.files.values())
    assert str(ended["lora"].out_dir.parent).encode() not in everything, (
        "a directory of this machine"
    )


@pytest.mark.parametrize("words", [("--dry_run",), ("--dry_run", "--format", "json")])
def test_a_dry_run_lists_what_would_be_sent_and_asks_nobody(
    words: tuple[str, ...],
    ended: dict[str, Ended],
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("HF_TOKEN", raising=False)
    final = ended["lora"].out_dir / "final"
    push(ended["lora"].out_dir, NAME, "--base", BASE, *words)
    out, err = capfd.readouterr()
    assert err == "" and NAME in out
    assert all(file.name in out for file in final.iterdir())
    size = (final / "adapter_model.safetensors").stat().st_size
    if "json" in words:
        found = json.loads(out)
        assert found["url"] == f"{constants.ENDPOINT}/{NAME}"
        assert found["files_bytes"]["adapter_model.safetensors"] == size
    assert "--base ORG/NAME" in mistake(ended["lora"].out_dir, NAME, *words), "as without it"


def test_a_dry_run_in_python_returns_where_the_result_would_be(ended: dict[str, Ended]) -> None:
    url = ftkit.push(ended["lora"].out_dir, NAME, base=BASE, dry_run=True)
    assert url == f"{constants.ENDPOINT}/{NAME}"


def test_a_broken_upload_resumes_and_is_committed_only_as_a_whole(
    hub: Hub, ended: dict[str, Ended], tmp_path: Path
) -> None:
    model = tmp_path / "model"
    shutil.copytree(ended["full"].out_dir / "final", model)
    shards = [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]
    weights = (model / "model.safetensors").read_bytes()
    (model / "model.safetensors").unlink()
    for number, name in enumerate(shards):
        (model / name).write_bytes(weights + bytes([number]))
    weight_map = {"weight_map": {"a": shards[0], "b": shards[1]}}
    (model / "model.safetensors.index.json").write_text(json.dumps(weight_map))
    hub.private, hub.files, hub.room = True, {"model.safetensors": b"of an earlier push"}, 1
    assert says(mistake(model, NAME), "Run the command again")
    assert hub.files.keys() == {"model.safetensors"} and not hub.commits
    assert len(hub.sent) == 1
    hub.room, hub.break_off = None, True
    words = (model, NAME, "--message", "the second time")
    with suppress(UserError):  # the library tries some lost connections again by itself
        push(*words)
    if not hub.commits:
        push(*words)
    assert len(hub.sent) == len(set(hub.sent)) == 2, "nothing is sent twice"
    assert hub.commits == ["the second time"]
    assert hub.files.keys() == {file.name for file in model.iterdir()}, "what is stale is gone"


def test_a_log_has_one_line_about_the_upload_and_with_quiet_none(
    hub: Hub,
    ended: dict[str, Ended],
    capfd: pytest.CaptureFixture[str],
) -> None:
    push(ended["full"].out_dir, NAME)
    begun, done = capfd.readouterr().err.splitlines()
    assert re.fullmatch(r"sending \d+ files, [\d.]+ MiB \.\.\.", begun)
    assert re.fullmatch(rf"{re.escape(begun)} [\d.]+ m?s", done)
    hub.files, hub.objects = {}, {}
    push(ended["full"].out_dir, NAME, "--quiet")
    assert hub.files
    assert capfd.readouterr() == (f"uploaded to {hub.url}/{NAME} (private)\n", "")


def test_gguf_files_are_pushed_as_they_are(
    hub: Hub, ended: dict[str, Ended], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "gguf"
    assert run(["export", str(ended["lora"].out_dir), "--format", "gguf", "--out", str(out)]) == 0
    push(out, NAME, "--public")
    assert says(capfd.readouterr().out, f"{hub.url}/{NAME} (public)")
    assert hub.files.keys() == {"README.md", "adapter-f32.gguf"}
    assert hub.files["adapter-f32.gguf"] == (out / "adapter-f32.gguf").read_bytes()
    card = ModelCard(hub.files["README.md"].decode())
    assert card.data.to_dict()["library_name"] == "gguf" and "--lora" in card.text


def test_computing_checksums_is_announced_while_it_takes_long(
    hub: Hub, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress, "LATE_S", 0.0)
    lines: list[str] = []

    class Addition(huggingface_hub.CommitOperationAdd):
        """One whose file takes until something is printed."""

        def __post_init__(self) -> None:
            deadline = time.monotonic() + 10
            while not lines:
                assert time.monotonic() < deadline, "nothing was printed"
                lines.extend(capfd.readouterr().err.splitlines())
            super().__post_init__()

    monkeypatch.setattr(huggingface_hub, "CommitOperationAdd", Addition)
    upload({"a.txt": b"a"}, NAME, public=False, message="one")
    assert lines == ["computing checksums ..."] and hub.files["a.txt"] == b"a"


def test_the_python_function_pushes_like_the_command_and_returns_the_url(
    hub: Hub, ended: dict[str, Ended], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", hub.url)  # it is done in a process of its own
    full = ended["full"].out_dir
    url = ftkit.push(full, NAME, public=True, message="Trained in a notebook.")
    assert url == f"{hub.url}/{NAME}"
    assert (hub.private, hub.commits) == (False, ["Trained in a notebook."])
    assert hub.files.keys() == {file.name for file in (full / "final").iterdir()}


def test_a_push_that_others_could_not_use_is_refused_with_a_remedy(
    hub: Hub, ended: dict[str, Ended], monkeypatch: pytest.MonkeyPatch
) -> None:
    lora, full = ended["lora"].out_dir, ended["full"].out_dir
    assert "ftkit merge" in mistake(lora, NAME) and "--base ORG/NAME" in mistake(lora, NAME)
    checkpoint = next((full / "checkpoints").glob("step-*"))
    assert "ftkit export" in mistake(checkpoint, NAME)
    assert "base model without training" in mistake("embedded:quickstart", NAME)
    assert "must be ORG/NAME" in mistake(full, "model")
    assert hub.private is None, "the hub got no request"
    hub.private = False
    assert "--public" in mistake(full, NAME) and not hub.files
    hub.status = 403
    assert "token" in mistake(full, NAME)
    hub.status = 500
    assert "HTTP 500" in mistake(full, NAME)
    monkeypatch.delenv("HF_TOKEN")
    assert "without a token" in mistake(full, NAME)


# --- Cards --------------------------------------------------------------------------------------


def test_a_result_has_a_card_with_what_was_measured(ended: dict[str, Ended]) -> None:
    report = json.loads((ended["full"].out_dir / "report.json").read_text())
    card = ModelCard.load(ended["full"].out_dir / "final" / "README.md")
    assert card.data.to_dict() == {
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["ftkit"],
    }
    assert f"| Trained | {report['progress']['steps']} steps," in card.text
    assert f"-> {report['loss']['last']:.4f} |" in card.text
    assert report["resolved"]["device"] in card.text and "| Peak memory |" in card.text
    assert f"torch {report['versions']['torch']}" in card.text
    (rouge, length) = ended["full"].report.scores
    assert (
        f"| ROUGE-L | {number_text(rouge.before)} -> {number_text(rouge.after)} on 4" in card.text
    )
    assert "| length | " in card.text and says(card.text, "4 validation records ... metric.py")
    assert length.file == "metric.py"
    assert str(ended["full"].out_dir.parent) not in card.text, "a directory of this machine"


def test_a_report_says_of_what_shape_the_records_are(ended: dict[str, Ended]) -> None:
    assert ended["full"].report.shape == "instruction"


def test_a_card_says_which_weights_a_result_has(ended: dict[str, Ended]) -> None:
    report = ended["full"].report
    text = card_text(report, None, "hf")
    assert "learning rate 0.003, cosine |" in text and "| Weights |" not in text
    train = report.recipe["train"] | {"ema_decay": 0.99}
    chosen = dataclasses.replace(
        report,
        recipe=report.recipe | {"train": train},
        result=ChosenResult(step=3, validation_loss=1.5),
    )
    assert says(card_text(chosen, None, "hf"), "step 3 ... lowest validation loss ... decay 0.99")


@pytest.mark.parametrize(
    ("shape", "given", "asked"),
    [
        ("messages", "", '"content": "Hello!"}]'),
        (None, "", '"content": "Hello!"}]'),
        ("instruction", "", '"content": "Name three colours."}]'),
        ("instruction", "a b", '"content": "Which of these are colours?", "input": "red, '),
        ("completion", "", '"content": "The opposite of dry is"}]'),
        ("text", "", '"content": "Once upon a time"}]'),
    ],
)
def test_a_card_asks_the_kind_of_question_that_the_data_ask(
    shape: str | None, given: str, asked: str, tmp_path: Path
) -> None:
    example = AnsweredExample(instruction="a secret", input=given)
    report = make_run(tmp_path / "run", method="lora", data__path="chats.jsonl")
    report = dataclasses.replace(report, shape=shape, examples=[example], resolved=None)
    for kind in ("adapter", "hf"):
        card = card_text(report, None, kind)
        assert asked in card and "secret" not in card
    assert (asked.split('"')[3] in card_text(report, None, "litgpt")) or given


@pytest.mark.parametrize(
    "method",
    [
        pytest.param("lora", marks=pytest.mark.slow),
        pytest.param("full", marks=pytest.mark.matrix),
    ],
)
def test_the_lines_of_a_card_run(ended: dict[str, Ended], method: str) -> None:
    final = ended[method].out_dir / "final"
    program = re.search(r"```python\n(.*?)```", (final / "README.md").read_text(), re.DOTALL)
    assert program is not None
    words = [sys.executable, "-c", program[1].replace("max_new_tokens=100", "max_new_tokens=4")]
    environment = os.environ | {"HF_HUB_OFFLINE": "1"}
    done = subprocess.run(words, capture_output=True, text=True, cwd=final, env=environment)
    assert (done.returncode, done.stdout.count("\n") >= 1) == (0, True), done.stderr


def test_origins_have_the_names_by_which_others_find_them(tmp_path: Path) -> None:
    download = tmp_path / "checkpoints" / "org" / "tiny"
    (download / ".cache" / "huggingface").mkdir(parents=True)
    (download / "README.md").write_text("---\nlicense: apache-2.0\n---\n# Tiny\n")
    (download / "LICENSE").write_text("Terms")
    base = BaseOrigin.of(str(download), download)
    assert (base.name, base.on_hub, base.licence) == ("org/tiny", "org/tiny", "apache-2.0")
    assert base.licence_files == ("LICENSE",)
    version = download.rename(download.with_name("tiny@v1"))
    assert BaseOrigin.of(str(version), version).on_hub == "org/tiny"
    own = BaseOrigin.of(str(tmp_path), tmp_path)
    assert (own.name, own.on_hub, own.licence) == (tmp_path.name, None, None)
    records = tmp_path / "records.jsonl"
    records.write_text("{}")
    sources = [{"path": str(records)}, {"path": "owner/data"}]
    data = {"class_path": "litgpt.data.JSON", "init_args": {"sources": sources}}
    found = DataOrigin.of(data)
    assert (found.names, found.on_hub) == (("records.jsonl", "owner/data"), ("owner/data",))
    assert DataOrigin.of({"class_path": "litgpt.data.Alpaca", "init_args": {}}).names == ("Alpaca",)


@pytest.mark.parametrize("text", ["", "# No head\n", "---\n- a list\n---\n", "---\n: [\n---\n"])
def test_a_card_without_metadata_gives_none(tmp_path: Path, text: str) -> None:
    (tmp_path / "README.md").write_text(text)
    assert card_metadata(tmp_path / "README.md") == {}
