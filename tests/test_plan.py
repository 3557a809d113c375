"""What a recipe needs is predicted without weights, downloads or a GPU."""

import json
import shlex
from collections.abc import Sequence
from pathlib import Path

import pytest
from tiny import make_records

from ftkit import plans
from ftkit.base.blueprint import read_blueprint
from ftkit.cli import run
from ftkit.errors import UserError
from ftkit.fit import changes_that_fit
from ftkit.memory.gpus import GPUS, find_gpu
from ftkit.memory.simulate import largest_micro_batch, simulate, with_layers
from ftkit.parsing import Override
from ftkit.plan_table import side_by_side
from ftkit.prediction import Planned, plan
from ftkit.report.display import plain_text

MODEL = "random:pythia-14m"
ROOT = Path(__file__).parents[1]


def planned(model: str = MODEL, gpu: str | None = None, **keys: object) -> Planned:
    values = {"checkpoint_dir": model, "train.max_seq_length": 64} | {
        key.replace("__", "."): value for key, value in keys.items()
    }
    overrides = [(key, json.dumps(value)) for key, value in values.items()]
    return plan((), overrides, gpu=None if gpu is None else find_gpu(gpu))


@pytest.mark.parametrize(
    "keys",
    [
        {"precision": "bf16-mixed", "memory__activation_checkpointing": True},
        pytest.param(
            {"devices": 4, "strategy": "fsdp", "precision": "bf16-true"}, marks=pytest.mark.slow
        ),
        pytest.param({"quantize": "bnb.nf4-dq", "lora_mlp": True}, marks=pytest.mark.slow),
    ],
)
def test_memory_grows_by_the_same_amount_with_every_layer(
    keys: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    base = with_layers(read_blueprint(MODEL), 9)
    batch = largest_micro_batch(2, 64)
    made = planned(**keys).plan
    extended = simulate(base, made, batch, accumulates=False)
    monkeypatch.setattr("ftkit.memory.simulate.DEPTHS", (9, 9))
    whole = simulate(base, made, batch, accumulates=False)
    highest = max(whole.peaks.values(), key=lambda peak: peak.total_bytes)
    found = max(extended.peaks.values(), key=lambda peak: peak.total_bytes)
    assert extended.sizes == whole.sizes
    assert found.bytes == highest.bytes


def test_a_hub_name_is_planned_without_a_download() -> None:
    base = read_blueprint("openlm-research/open_llama_7b")
    assert base.config.n_layer == 32 and not base.has_weights and not base.tied
    assert read_blueprint("meta-llama/Llama-3.2-1B").tied


def test_settings_are_enough_of_a_directory(tmp_path: Path) -> None:
    from transformers import LlamaConfig

    LlamaConfig(hidden_size=64, num_hidden_layers=3, num_attention_heads=4).save_pretrained(
        tmp_path
    )
    assert read_blueprint(str(tmp_path)).config.n_layer == 3
    assert read_blueprint("embedded:quickstart").name == "quickstart"


def test_an_unknown_model_is_an_error_that_names_similar_ones() -> None:
    with pytest.raises(UserError, match=r"Did you mean openlm-research/open_llama_7b"):
        read_blueprint("openlm-research/open_lama_7b")


def test_any_lora_key_means_lora() -> None:
    assert planned().plan.recipe.method == "full"
    assert planned(lora_r=4).plan.recipe.method == "lora"


def test_a_device_is_large_enough_too_small_or_too_close_to_say() -> None:
    memory = planned().memory
    assert memory.fits(memory.high_bytes) is True
    assert memory.fits(memory.low_bytes - 1) is False
    assert memory.fits((memory.low_bytes + memory.high_bytes) // 2) is None
    assert planned(gpu="t4").fits is True and planned().fits is None


@pytest.mark.parametrize(
    ("changes", "part", "factor"),
    [
        ({"optimizer": "bitsandbytes.optim.AdamW8bit"}, "optimizer_state", 0.52),
        ({"memory__activation_checkpointing": True}, "activations", 0.95),
        ({"train__micro_batch_size": 1}, "activations", 0.6),
        ({"devices": 2, "strategy": "fsdp"}, "parameters", 0.55),
        ({"devices": 2, "strategy": "deepspeed"}, "optimizer_state", 0.0),
    ],
)
def test_what_saves_memory_saves_it_where_it_says(
    changes: dict[str, object], part: str, factor: float
) -> None:
    usual = {"precision": "bf16-true", "train__micro_batch_size": 2}
    before = planned(**usual).memory.breakdown_bytes
    after = planned(**usual | changes).memory.breakdown_bytes
    assert after[part] <= factor * before[part]  # type: ignore[index]


def test_what_is_offloaded_is_in_host_memory() -> None:
    device = planned(devices=2, strategy="fsdp").memory
    host = planned(devices=2, strategy="fsdp", strategy__cpu_offload=True).memory
    assert host.peak_bytes < device.peak_bytes
    assert host.host_bytes - device.host_bytes == sum(host.offloaded_bytes.values()) > 0


def test_steps_are_known_where_the_data_is(tmp_path: Path) -> None:
    file = tmp_path / "records.json"
    file.write_text(json.dumps(make_records(60)))
    found = planned(
        data="JSON", data__json_path=str(file), data__val_split_fraction=0.2, train__epochs=2
    )
    assert (found.samples, found.steps) == (48, 6)
    assert planned().steps is None
    assert planned(train__max_steps=7).steps == 7


def test_gpus_are_named_or_given_by_size(monkeypatch: pytest.MonkeyPatch) -> None:
    assert find_gpu("A100-80GB") is GPUS["a100-80gb"]
    assert find_gpu("24GiB").memory_bytes == 24 * 2**30
    with pytest.raises(UserError, match=r"--gpu 24GiB"):
        find_gpu("a1000")


def test_json_is_all_that_is_written_and_the_exit_code_says_whether_it_fits(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ["plan", "--checkpoint_dir", MODEL, "--train.max_seq_length", "64", "--format", "json"]
    assert run([*words, "--gpu", "t4"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["fits"] is True and found["gpu"] == "t4"
    assert sum(found["breakdown_bytes"].values()) == found["peak_bytes"]
    assert run([*words, "--gpu", "100MiB"]) == 3
    assert json.loads(capsys.readouterr().out)["fits"] is False
    assert run(words) == 0
    assert json.loads(capsys.readouterr().out)["fits"] is None


def test_several_plans_are_one_table(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "--checkpoint_dir", MODEL, "--train.max_seq_length", "64"]
    assert run([*words, "--sweep", "train.micro_batch_size=1,2", "--gpu", "t4"]) == 0
    table = capsys.readouterr().out
    assert "micro_batch_size 1" in table and "micro_batch_size 2" in table
    assert table.count(" fits") == 2


def test_the_runs_of_a_sweep_are_planned_with_what_is_asked_of_all(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "recipe.yaml").write_text(f"checkpoint_dir: {MODEL}\nseed: 2")
    sweep = tmp_path / "sweep.yaml"
    sweep.write_text(
        "runs:\n"
        "  - {name: all, command: finetune_full, config: recipe.yaml, train.micro_batch_size: 2}\n"
        "  - {name: few, command: finetune, config: recipe.yaml, train.max_seq_length: 32}\n"
    )
    words = [str(sweep), "--train.max_seq_length", "64", "--format", "json"]
    assert run(["plan", *words]) == 0
    full, lora = json.loads(capsys.readouterr().out)
    assert (full["name"], full["method"], full["micro_batch_size"]) == ("all", "full", 2)
    assert (lora["name"], lora["method"], lora["max_seq_length"]) == ("few", "lora", 64)


@pytest.mark.parametrize(
    ("width", "there", "left_out"),
    [(140, "host", None), (114, "gradients", "host"), (70, "precision", "gradients")],
)
def test_a_table_shows_what_a_terminal_has_room_for(
    width: int, there: str, left_out: str | None
) -> None:
    text = plain_text(side_by_side([planned(gpu="t4"), planned(gpu="v100-32gb")], width), width)
    head, first, second, *rest = text.splitlines()
    assert there in head and first.endswith(" fits") and second.endswith(" fits")
    assert max(map(len, (head, first, second))) <= width
    assert left_out is None or (left_out not in head and left_out in " ".join(rest))


@pytest.mark.slow
def test_fit_lists_changes_that_fit_with_command_lines_that_plan_the_same(
    capsys: pytest.CaptureFixture[str],
) -> None:
    keys = ["--checkpoint_dir", MODEL, "--train.max_seq_length", "64", "--precision", "32-true"]
    keys += ["--train.micro_batch_size", "8"]
    usual = planned(precision="32-true", train__micro_batch_size=8).memory
    size = f"{usual.low_bytes * 0.95 / 2**20:.0f}MiB"
    assert run(["plan", *keys, "--gpu", size, "--fit", "--format", "json"]) == 3
    changes = json.loads(capsys.readouterr().out)["changes"]
    assert [change["title"] for change in changes][:2] == [
        "smaller micro-batch, same global batch",
        "16-bit numbers",
    ]
    assert all(change["plan"]["fits"] is not False for change in changes)
    for change in changes[:2]:
        program, _, *words = shlex.split(change["command"])
        assert program == "ftkit"
        assert run(["plan", *words, "--gpu", size, "--format", "json"]) == 0
        again = json.loads(capsys.readouterr().out)
        assert again["peak_bytes"] == change["plan"]["peak_bytes"]


@pytest.mark.slow
def test_where_one_change_is_not_enough_several_are_tried() -> None:
    base = {"precision": "32-true", "train__micro_batch_size": 1}
    least = planned(**base, memory__activation_checkpointing=True, lora_r=8, quantize="bnb.nf4-dq")
    gpu = find_gpu(f"{least.memory.high_bytes / 2**20 + 20:.0f}MiB")
    found = planned(gpu=gpu.name, **base)
    assert found.fits is False

    def attempt(changed: Sequence[Override]) -> Planned:
        return plan(
            (),
            [
                ("checkpoint_dir", MODEL),
                ("train.max_seq_length", "64"),
                ("precision", "32-true"),
                ("train.micro_batch_size", "1"),
                *changed,
            ],
            gpu=gpu,
        )

    changes = changes_that_fit(found, attempt)
    assert changes and changes[-1].planned.fits is not False


def test_fit_needs_one_plan_and_a_gpu() -> None:
    with pytest.raises(UserError, match="--gpu a100-80gb --fit"):
        run(["plan", "--checkpoint_dir", MODEL, "--fit"])


def test_in_a_notebook_a_plan_shows_itself_alone_and_among_others() -> None:
    keys = {"checkpoint_dir": MODEL, "train.max_seq_length": 64}
    found = plans.plan(gpu="t4", name="<b2>", **keys)
    assert found.fits
    alone, together = (shown._repr_html_() for shown in (found, plans.Plans([found, found])))
    assert f"plan: full on {MODEL}" in alone and "fits" in alone
    assert together.count("&lt;b2&gt;") == 2 and "<b2>" not in together
    with pytest.raises(UserError, match=r"train\.max_stepz is not a key"):
        plans.plan(**keys, **{"train.max_stepz": 1})
