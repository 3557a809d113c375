"""Plans by hub name: requests to the hub, and what is known without it."""

import dataclasses
import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from huggingface_hub import constants
from messages import message_of, says
from stand_in_hub import HubHandler, serving

from ftkit.cli.app import run
from ftkit.errors import UserError
from ftkit.models.pretrained import places
from ftkit.planning.gpus import find_gpu
from ftkit.planning.predict import plan_files
from ftkit.planning.table import plan_table
from ftkit.recipe.hubs import HUBS
from ftkit.utils import progress
from ftkit.utils.console.terminal import plain_text

COMMIT = "a" * 40
KNOWN = "EleutherAI/pythia-14m"
UNKNOWN = "some-org/TinyMistral-2x"
SETTINGS = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "vocab_size": 256,
}
BESIDE_SETTINGS = {"model.safetensors": b"weights" * 1000, "README.md": b"", "modeling_x.py": b""}


@dataclass
class Served:
    """A hub with one model."""

    files: dict[str, bytes] = field(default_factory=dict)
    repository: str = UNKNOWN
    gated: bool = False
    downloads: list[str] = field(default_factory=list)
    """Files whose content was sent for."""
    requests: int = 0


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Served]:
    found = Served({"config.json": json.dumps(SETTINGS).encode()} | BESIDE_SETTINGS)

    class Handler(HubHandler):
        def answer(self) -> None:
            path, name = self.path.partition("?")[0], self.path.rpartition("/")[2]
            found.requests += 1
            if path.startswith(f"/api/models/{found.repository}"):
                self.list_files(path, found.files, {"id": found.repository, "sha": COMMIT})
            elif not path.startswith(f"/{found.repository}/resolve/{COMMIT}/"):
                self.reply(404, b"", {"X-Error-Code": "RepoNotFound"})
            elif found.gated:
                self.reply(401, b"", {"X-Error-Code": "GatedRepo"})
            else:
                if self.command == "GET":
                    found.downloads.append(name)
                content = found.files[name]
                etag = f'"{hashlib.sha256(content).hexdigest()}"'
                self.reply(200, content, {"ETag": etag, "X-Repo-Commit": COMMIT})

    monkeypatch.chdir(tmp_path)
    places.fetch_settings.cache_clear()
    with serving(Handler, monkeypatch, tmp_path):
        yield found
    places.fetch_settings.cache_clear()


def refusal(name: str, *words: str) -> str:
    """The one message of a plan that is refused."""
    with pytest.raises(UserError) as caught:
        run(["plan", *words, "--checkpoint_dir", name])
    assert caught.value.exit_code == 2
    return str(caught.value)


@pytest.mark.extensions
def test_only_settings_and_tokenizer_are_fetched_for_a_model_that_litgpt_does_not_know(
    served: Served, capsys: pytest.CaptureFixture[str]
) -> None:
    served.files |= {"tokenizer.json": b"{}", "tokenizer_config.json": b"{}"}
    assert run(["plan", "finetune_full", UNKNOWN, "--format", "json"]) == 0
    assert sorted(served.downloads) == ["config.json", "tokenizer.json", "tokenizer_config.json"]
    found = json.loads(capsys.readouterr().out)
    assert found["known_as"] is None
    assert found["parameters"] == 2 * 256 * 64 + 5 * (4 * 64**2 + 3 * 64 * 128 + 2 * 64) + 64


@pytest.mark.slow
def test_a_model_that_litgpt_knows_is_planned_where_no_hub_answers(
    served: Served, monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    data = tmp_path / "data.json"
    data.write_text(json.dumps([{"instruction": "add", "output": "x" * 90}] * 20))
    words = ["plan", "--checkpoint_dir", KNOWN, "--data", "JSON", "--data.path", str(data)]
    assert run(words) == 0
    assert served.requests and not served.downloads
    text = " ".join(capsys.readouterr().out.split())
    assert says(text, f"LitGPT's {KNOWN} ... config.json")
    assert "no tokenizer found" in text

    places.fetch_settings.cache_clear()
    served.requests = 0
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert run(words) == 0
    assert " ".join(capsys.readouterr().out.split()) == text
    assert not served.requests and not (tmp_path / "checkpoints").exists()


@pytest.mark.slow
def test_a_plan_of_lora_asks_for_the_settings_of_a_model_whose_names_litgpt_lacks(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    message = refusal("microsoft/phi-2", "finetune")
    assert "config.json" in message and "ftkit download microsoft/phi-2" in message
    with monkeypatch.context() as without:
        without.setitem(vars(HUBS), "_of_extensions", {})  # the extension hub is missing
        message = refusal("microsoft/phi-2", "finetune")
        assert "config.json" in message and "ftkit download" not in message
    assert run(["plan", "finetune_full", "microsoft/phi-2", "--gpu", "h200"]) == 0


@pytest.mark.slow
def test_its_own_settings_win_over_those_that_litgpt_knows(
    served: Served, capsys: pytest.CaptureFixture[str]
) -> None:
    served.repository = KNOWN
    assert run(["plan", "--checkpoint_dir", KNOWN, "--gpu", "h200"]) == 0
    assert served.downloads == ["config.json"]
    assert "those of LitGPT's" not in capsys.readouterr().out


@pytest.mark.extensions
def test_an_unknown_name_is_one_error_with_near_names_of_both_kinds(served: Served) -> None:
    message = refusal("Qwen/Qwen3-Mo")
    assert says(message, "Qwen/Qwen3-Mo at")
    assert "Did you mean Qwen/Qwen3-" in message and "random:qwen3_moe" in message


@pytest.mark.extensions
def test_a_gated_model_that_litgpt_does_not_know_says_how_to_get_access(
    served: Served,
) -> None:
    served.gated = True
    message = refusal(UNKNOWN)
    assert "is gated" in message and "--access_token" in message


@pytest.mark.extensions
def test_an_unknown_name_says_so_where_downloads_are_forbidden(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert "HF_HUB_OFFLINE forbids" in refusal(UNKNOWN)


@pytest.mark.extensions
def test_data_of_a_model_that_litgpt_knows_need_the_hub_for_its_tokenizer(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ("data", "--checkpoint_dir", KNOWN, "--data", "JSON")
    data = ("--data.path", "embedded:quickstart")
    assert says(message_of(run, [*words, *data]), "tokenizer ... not on this machine", "download")
    places.fetch_settings.cache_clear()
    monkeypatch.setattr(HUBS, "_of_extensions", {})
    assert says(message_of(run, [*words, *data]), KNOWN, "extension hub, which is missing")


@pytest.mark.slow
def test_a_slow_plan_is_announced_on_stderr(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress, "LATE_S", 0.0)
    words = ["plan", "--checkpoint_dir", "random:pythia-14m", "--train.max_seq_length", "64"]
    assert run([*words, "--format", "json"]) == 0
    shown = capsys.readouterr()
    assert json.loads(shown.out)["base_model"] == "random:pythia-14m"
    assert says(shown.err, "random:pythia-14m")


@pytest.mark.slow
def test_the_moment_of_the_peak_is_described() -> None:
    overrides = [("checkpoint_dir", "random:pythia-14m"), ("train.max_seq_length", "64")]
    planned = plan_files([], overrides, command="finetune_full", gpu=find_gpu("t4"))

    def described(moment: str) -> str:
        memory = dataclasses.replace(planned.memory, moment=moment)
        shown = plain_text(plan_table(dataclasses.replace(planned, memory=memory)), 200)
        (line,) = [line for line in shown.splitlines() if line.startswith("peak ")]
        return line.partition(" in tensors of each rank ")[2]

    assert described("loss, backward") == "(loss, backward)"
    assert described("block 0, forward") == "(first block, forward)"
    assert described("block 1, forward") == "(block 2, forward)"
    assert described("block -2, backward") == "(block 2 from the end, backward)"
    assert described("block -1, backward") == "(last block, backward)"
