"""Architectures that LitGPT's layout alone holds are trained, saved, used, and never a dead end."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from conversions import export, litgpt_logits
from preloaded import Attempt, Preloaded
from rank_jobs import layouts
from runs import options
from tiny import LITGPT_ONLY, make_litgpt_only

from ftkit.cli.app import run
from ftkit.errors import UserError
from ftkit.extensions.litgpt.architecture import LitgptArchitecture
from ftkit.extensions.litgpt.families import FAMILIES
from ftkit.models.pretrained.base_model import open_base, weights
from ftkit.models.pretrained.model_files import CARD
from ftkit.models.pretrained.save import layout_of, save_hf, save_in_own_layout
from ftkit.planning.predict import plan_files
from ftkit.recipe.implementations import layout_in
from ftkit.runs.report.report import read_report

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
SHORT = {"eval__interval": 0, "eval__max_new_tokens": 0, "eval__exact_match": 2}
ANY = "OLMo-2-1124-7B"


@pytest.fixture
def train(server: Preloaded, common: list[str], tmp_path: Path) -> Callable[..., Attempt]:
    """Trains a model of an architecture into tmp_path/NAME: `train("phi-2", name="a", key=value)`.

    Its base model is tmp_path/base.
    """

    def train(architecture: str, command: str = "finetune_full", **keys: object) -> Attempt:
        base = tmp_path / "base"
        if not base.exists():
            make_litgpt_only(base, architecture)
        name = keys.pop("name", "out")
        words = options(**SHORT | {"checkpoint_dir": base, "out_dir": tmp_path / name} | keys)  # type: ignore[operator]
        return server.run(command, *common, *words)

    return train


@pytest.mark.slow
@pytest.mark.parametrize(
    "architecture",
    layouts([(name,) for name in LITGPT_ONLY], [("phi-2",), ("Qwen3-30B-A3B",)]),
)
def test_a_full_fine_tune_ends_as_a_model_that_litgpt_loads(
    train: Callable[..., Attempt],
    architecture: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = tmp_path / "out"
    attempt = train(architecture, out_dir=out)
    assert attempt.code == 0, attempt.output
    report = read_report(out)
    assert report.outcome == "completed" and report.files.final == "final"
    assert any("will be a LitGPT directory" in warning for warning in report.warnings)
    assert layout_in(out / "final") == "litgpt"
    exported = export(out / "checkpoints", "litgpt", tmp_path / "exported")
    assert torch.equal(litgpt_logits(out / "final"), litgpt_logits(exported))
    assert not torch.equal(litgpt_logits(out / "final"), litgpt_logits(tmp_path / "base"))
    assert {path.name for path in (out / "final").iterdir()} == {
        CARD,  # made of the run, not of a checkpoint
        *(path.name for path in exported.iterdir()),
    }
    words = ["--prompt", "what is the colour of the moon", "--max_new_tokens", "4"]
    assert run(["generate", str(out), *words, "--accelerator", "cpu"]) == 0
    assert f"{out}: " in capsys.readouterr().err


@pytest.mark.slow
def test_every_command_takes_such_a_result(
    train: Callable[..., Attempt],
    tiny_data: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = tmp_path / "out"
    assert train(ANY).code == 0
    assert run(["evaluate", str(out), "--accelerator", "cpu"]) == 0
    assert run(["compare", str(out), str(out / "final"), "--format", "json"]) in (0, 2)
    with pytest.raises(UserError, match="--format litgpt"):
        run(["merge", str(out), "--out", str(tmp_path / "merged")])
    with pytest.raises(UserError, match="--format litgpt"):
        run(["export", str(out), "--format", "hf", "--out", str(tmp_path / "hf")])
    again = export(out, "litgpt", tmp_path / "lit")
    assert torch.equal(litgpt_logits(again), litgpt_logits(out / "final"))
    keys = {"name": "further", "checkpoint_dir": out / "final", "train__max_steps": 1}
    assert train(ANY, **keys).code == 0, "the result is a base model again"


@pytest.mark.slow
def test_ranks_gather_the_same_result_and_a_run_goes_on(
    train: Callable[..., Attempt], tmp_path: Path
) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    assert train(ANY, name="one").code == 0
    sharded = {"name": "two", "devices": 2, "strategy": "fsdp", "train__micro_batch_size": 1}
    attempt = train(ANY, **sharded, stop_after=3)
    assert attempt.code == 0, attempt.output
    attempt = train(ANY, **sharded, resume="auto")
    assert attempt.code == 0, attempt.output
    assert read_report(two).progress.steps == 5
    found, expected = litgpt_logits(two / "final"), litgpt_logits(one / "final")
    assert torch.allclose(found, expected, atol=1e-3)


def test_lora_is_refused_before_training_with_a_word_that_works(
    train: Callable[..., Attempt], tmp_path: Path
) -> None:
    attempt = train(ANY, "finetune", lora_r=2)
    assert attempt.code == 2 and not (tmp_path / "out").exists()
    assert "Try ftkit finetune_full, whose result is a LitGPT directory" in attempt.output
    base = str(tmp_path / "base")
    with pytest.raises(UserError, match="finetune_full, whose result is a LitGPT directory"):
        plan_files((), [("checkpoint_dir", base), ("lora_r", "2")])
    measured = plan_files(
        (), [("checkpoint_dir", base), ("lora_r", "2"), ("checkpoint.save", "false")]
    )
    assert measured.result_layout is None


@pytest.mark.slow
def test_a_plan_says_in_which_layout_the_result_will_be(
    tmp_path: Path, tiny_base: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = make_litgpt_only(tmp_path / "base", ANY)
    words = ["plan", "finetune_full", "--checkpoint_dir", str(base), "--train.max_seq_length", "32"]
    assert run([*words, "--format", "json"]) == 0
    assert json.loads(capsys.readouterr().out)["result_layout"] == "litgpt"
    assert run(words) == 0
    assert "LitGPT directory" in capsys.readouterr().out
    usual = [("checkpoint_dir", str(tiny_base))]
    assert plan_files((), usual, command="finetune_full").result_layout == "hf"
    assert plan_files((), usual).result_layout == "peft"


def test_litgpt_directories_of_families_whose_config_is_missing_stay_litgpt_directories(
    tmp_path: Path,
) -> None:
    base = open_base(str(make_litgpt_only(tmp_path / "base", "phi-2")))
    assert isinstance(base.architecture, LitgptArchitecture)
    gemma = dataclasses.replace(
        base.architecture.config, name="Gemma-2-2b", mlp_class_name="GemmaMLP"
    )

    without = dataclasses.replace(base, architecture=LitgptArchitecture(gemma, FAMILIES["gemma2"]))
    assert layout_of(without) == "litgpt"
    assert layout_of(dataclasses.replace(without, settings={"model_type": "gemma2"})) == "hf"
    with pytest.raises(UserError, match=r"export with --format litgpt"):
        save_hf(base, weights(base), tmp_path / "hf")
    save_in_own_layout(base, weights(base), tmp_path / "lit", layout="litgpt")
    assert torch.equal(litgpt_logits(tmp_path / "lit"), litgpt_logits(tmp_path / "base"))
