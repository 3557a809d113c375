"""ftkit merge: a model of plain weights with the logits of the adapted one, or nothing at all."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from adapters import ALL, MAKERS, TOKENS, TYPES, VARIANTS, build, logits, lora_recipe, train
from adapters import export as save
from command import Command
from conversions import assert_equal, merge, own_logits, peft_in_process, transformers_logits
from messages import message_of, says
from results import Ended
from runs import DEFAULT_SIGNALS
from safetensors.torch import load_file, save_file
from tiny import make_llama
from torch import Tensor

from ftkit.cli.app import run
from ftkit.errors import UserError
from ftkit.evaluation.loading import load_result
from ftkit.evaluation.result import find_result
from ftkit.extensions.publish import peft_reading
from ftkit.extensions.publish.merge import Merged
from ftkit.models.language_model import outline
from ftkit.models.lora.layers import merged as merged_layer
from ftkit.models.pretrained.base_model import BaseModel, open_base
from ftkit.recipe.recipe import Quantization

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, BaseModel]:
    directory = tmp_path_factory.mktemp("bases")
    return {
        name: open_base(str(make(directory / name.replace(" ", "-"))))
        for name, make in (MAKERS | {"biased llama": make_biased_llama}).items()
    }


def make_biased_llama(directory: Path) -> Path:
    """With biases in attention that are not zero."""
    make_llama(directory, attention_bias=True)
    file = directory / "model.safetensors"
    tensors = load_file(file)
    for name, tensor in tensors.items():
        if name.endswith(".bias"):
            tensor.copy_(torch.arange(tensor.numel()) % 7 / 7)
    save_file(tensors, file, {"format": "pt"})
    return directory


def mistake(*words: object) -> str:
    with peft_in_process():
        return message_of(run, ["merge", *map(str, words)])


# --- The logits of the adapted model --------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "variant"),
    [
        *(("llama", variant) for variant in VARIANTS),
        ("tied llama", "dora"),
        *(("llama", name) for name in TYPES),
        ("tied llama", "vera"),
        ("biased llama", "ia3"),
        *((name, v) for name in MAKERS if name != "llama" for v in ("lora", "rslora with pissa")),
    ],
)
def test_a_merged_adapter_has_the_logits_of_the_adapted_model(
    bases: dict[str, BaseModel], name: str, variant: str, tmp_path: Path
) -> None:
    base = bases[name]
    recipe = lora_recipe(base, **ALL, **(VARIANTS | TYPES)[variant])
    model = train(build(base, recipe))
    adapter = save(model, base, recipe, tmp_path / "adapter")
    merged = merge(adapter, tmp_path / "merged")
    assert_equal(transformers_logits(merged), logits(model))
    assert (logits(model) - transformers_logits(base.directory)).abs().max() > 0.05


@pytest.mark.parametrize("name", ["llama", "tied llama"])
def test_layers_that_were_trained_whole_are_in_the_merged_model(
    bases: dict[str, BaseModel], name: str, tmp_path: Path
) -> None:
    base = bases[name]
    recipe = lora_recipe(base, lora_modules_to_save=["embed_tokens", "norm"])
    model = train(build(base, recipe))
    adapter = save(model, base, recipe, tmp_path / "adapter")
    merged = merge(adapter, tmp_path / "merged")
    assert_equal(transformers_logits(merged), logits(model))
    assert open_base(str(merged)).tied == base.tied


ENDS: dict[str, dict[str, Any]] = {
    "the embedding alone": {"modules_to_save": ["embed_tokens"]},
    "the head alone": {"modules_to_save": ["lm_head"]},
    "both, apart": {"modules_to_save": ["embed_tokens", "lm_head"]},
    "both as one": {"modules_to_save": ["embed_tokens"], "ensure_weight_tying": True},
}
"""What an adapter of PEFT trains whole of a model whose embedding is its head."""


@pytest.fixture(scope="module")
def foreign(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Adapters of a tied model that PEFT wrote, by what they train whole."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    directory = tmp_path_factory.mktemp("foreign")
    base = make_llama(directory / "base", tie_word_embeddings=True)
    for name, settings in ENDS.items():
        torch.manual_seed(1)
        model: Any = get_peft_model(
            AutoModelForCausalLM.from_pretrained(base),
            LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False, **settings),
        )
        with torch.no_grad():
            for full_name, parameter in model.named_parameters():
                if "modules_to_save" in full_name:
                    parameter += torch.randn_like(parameter) * 0.05
        model.save_pretrained(directory / name)
    return {name: directory / name for name in ENDS}


@torch.no_grad()
def peft_logits(adapter: Path) -> Tensor:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(adapter.parent / "base")
    found: Tensor = PeftModel.from_pretrained(base, adapter).eval()(TOKENS).logits
    return found


@pytest.mark.parametrize("name", ENDS)
def test_embedding_and_head_are_apart_where_peft_has_them_apart(
    foreign: dict[str, Path], name: str, tmp_path: Path
) -> None:
    adapter = foreign[name]
    merged = merge(adapter, tmp_path / "merged", "--checkpoint_dir", adapter.parent / "base")
    expected = peft_logits(adapter)
    assert_equal(transformers_logits(merged), expected)
    assert_equal(own_logits(adapter, base=str(adapter.parent / "base")), expected)
    assert open_base(str(merged)).tied == (name == "both as one")


def test_training_from_an_adapter_that_unties_is_asked_to_untie(
    foreign: dict[str, Path], tmp_path: Path
) -> None:
    from ftkit.models.lora.adapter_reading import check_shapes, read_adapter

    adapter = foreign["the embedding alone"]
    base = open_base(str(adapter.parent / "base"))
    found = read_adapter(adapter, base)
    recipes = {
        tied: lora_recipe(base, **found.changes, train__tie_embeddings=tied)
        for tied in (None, False)
    }
    with pytest.raises(UserError) as error:
        check_shapes(found, outline(base, recipes[None], torch.float32), adapter)
    assert says(str(error.value), "--train.tie_embeddings false")
    check_shapes(found, outline(base, recipes[False], torch.float32), adapter)


# --- The comparison with PEFT ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "variant"),
    [
        *(("llama", variant) for variant in VARIANTS if variant != "olora"),
        *(("llama", name) for name in TYPES),
        *((name, "lora") for name in MAKERS if name != "llama"),
    ],
)
def test_without_memory_for_the_model_peft_merges_layer_by_layer(
    bases: dict[str, BaseModel],
    name: str,
    variant: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    base = bases[name]
    recipe = lora_recipe(base, **ALL, **(VARIANTS | TYPES)[variant])
    adapter = save(train(build(base, recipe)), base, recipe, tmp_path / "adapter")
    monkeypatch.setattr(peft_reading, "available_host_bytes", lambda: 2**20)
    merge(adapter, tmp_path / "merged")
    text = " ".join(capsys.readouterr().out.split())
    assert re.search(r"weights of \d+ layers merged by PEFT .* 1\.0 MiB are free", text), text


@pytest.mark.parametrize("free_bytes", [2**40, 2**20])
def test_embedding_and_head_are_among_what_is_compared(
    foreign: dict[str, Path],
    free_bytes: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    adapter = foreign["the embedding alone"]
    monkeypatch.setattr("ftkit.models.lora.adapter_reading.unties", lambda *_: False)
    monkeypatch.setattr(peft_reading, "available_host_bytes", lambda: free_bytes)
    base = adapter.parent / "base"
    text = mistake(adapter, "--out", tmp_path / "merged", "--checkpoint_dir", base)
    assert says(text, "PEFT ... Nothing is written")
    assert list(tmp_path.iterdir()) == []


def test_a_merge_that_peft_does_not_compute_replaces_nothing(
    ended: dict[str, Ended], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = merge(ended["lora"].out_dir, tmp_path / "merged")
    before = transformers_logits(out)
    twice = "ftkit.models.lora.lora_type.merged"
    monkeypatch.setattr(twice, lambda weight, a, b, *rest: merged_layer(weight, a, 2 * b, *rest))
    for free in (2**40, 2**20):
        monkeypatch.setattr(peft_reading, "available_host_bytes", lambda free=free: free)
        text = mistake(ended["lora"].out_dir, "--out", out, "--overwrite")
        assert says(text, "PEFT ... Nothing is written")
        assert torch.equal(transformers_logits(out), before)


@pytest.mark.slow
def test_the_base_model_and_the_adapter_are_loaded_by_a_process_of_their_own(
    ended: dict[str, Ended], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["merge", str(ended["lora"].out_dir), "--out", str(tmp_path / "merged")]) == 0
    assert "logits of PEFT" in printed(capsys)


@pytest.mark.parametrize("name", ["lora", "dora", "mixed"])
def test_a_merged_run_has_the_logits_of_its_result(
    ended: dict[str, Ended], name: str, tmp_path: Path
) -> None:
    out_dir = ended[name].out_dir
    merged = merge(out_dir, tmp_path / "merged")
    assert_equal(transformers_logits(merged), own_logits(out_dir))
    assert_equal(own_logits(merged), own_logits(out_dir))


def test_a_checkpoint_is_merged_too(ended: dict[str, Ended], tmp_path: Path) -> None:
    merged = merge(ended["lora"].checkpoint, tmp_path / "merged")
    assert_equal(transformers_logits(merged), own_logits(ended["lora"].checkpoint))


def test_a_merged_model_is_used_as_its_run_is(
    ended: dict[str, Ended], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from transformers import AutoTokenizer

    merged = merge(ended["lora"].out_dir, tmp_path / "merged")
    printed = capsys.readouterr().out
    assert printed.endswith(f"\nnext:\n  ftkit chat {merged}\n  ftkit push {merged} ORG/NAME\n")
    answers = []
    for path in (ended["lora"].out_dir, merged):
        capsys.readouterr()
        words = ["--prompt", "what is red", "--max_new_tokens", "8", "--accelerator", "cpu"]
        assert run(["generate", str(path), *words]) == 0
        answers.append(capsys.readouterr().out)
    assert answers[0] == answers[1]
    assert {"config.json", "generation_config.json", "tokenizer.json"} <= {
        file.name for file in merged.iterdir()
    }
    assert AutoTokenizer.from_pretrained(merged).encode("red cat")


def test_the_number_format_is_that_of_the_base_or_of_the_option(
    ended: dict[str, Ended], tmp_path: Path
) -> None:
    base = make_llama(tmp_path / "base")
    as_base = merge(ended["lora"].out_dir, tmp_path / "1")
    assert open_base(str(as_base)).dtype == open_base(str(base)).dtype == torch.float32
    half = merge(ended["lora"].out_dir, tmp_path / "2", "--dtype", "bfloat16")
    assert open_base(str(half)).dtype == torch.bfloat16
    assert_equal(transformers_logits(half), own_logits(ended["lora"].out_dir), 0.05)


def test_weights_are_split_into_files_of_bounded_size(
    ended: dict[str, Ended], tmp_path: Path
) -> None:
    merged = merge(ended["lora"].out_dir, tmp_path / "merged", "--max_shard_size", "50KB")
    files = list(merged.glob("model-*-of-*.safetensors"))
    assert len(files) > 4
    largest_parameter = 400 * 64 * 4
    assert all(file.stat().st_size < largest_parameter + 2000 for file in files)
    assert_equal(transformers_logits(merged), own_logits(ended["lora"].out_dir))


# --- QLoRA ----------------------------------------------------------------------------------------


def printed(capsys: pytest.CaptureFixture[str]) -> str:
    """Printed text, with lines that were broken for width joined."""
    return re.sub(r"\n +", " ", capsys.readouterr().out)


def differences(text: str) -> dict[str, list[float]]:
    """Row of the table for each base: mean, largest, same token in percent."""
    found = {}
    for line in text.splitlines():
        if match := re.match(r"(quantized|original) +(\S+) +(\S+) +(\S+) % +(.*)", line):
            found[match[1]] = [float(match[n].replace(",", "")) for n in (2, 3, 4)]
    return found


@pytest.mark.parametrize("name", ["qlora", "pissa"])
def test_qlora_is_merged_into_what_training_saw_or_into_the_original(
    ended: dict[str, Ended], name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out_dir = ended[name].out_dir
    merged = merge(out_dir, tmp_path / "quantized")
    text = printed(capsys)
    kind = find_result(str(out_dir)).quantize
    assert says(text, f"weights of tiny as {kind}")
    found = differences(text)
    original = merge(out_dir, tmp_path / "original", "--base", "original")
    again = printed(capsys)
    assert says(again, "original weights of tiny") and "4 validation records" in again
    assert differences(again) == found
    assert_equal(transformers_logits(merged), own_logits(out_dir), 1e-5)
    assert_equal(transformers_logits(original), own_logits(out_dir, quantize=None), 1e-5)
    assert found["quantized"][1] < 1e-5 < 1e-3 < found["original"][1]


def test_the_differences_are_those_of_the_written_models(
    ended: dict[str, Ended], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out_dir = ended["qlora"].out_dir
    merge(out_dir, tmp_path / "merged", "--dtype", "bfloat16")
    found = differences(capsys.readouterr().out)
    assert 1e-4 < found["quantized"][1] < found["original"][1]  # bfloat16 rounds


@pytest.mark.parametrize("kind", ["bnb.fp4", "bnb.int8"])
def test_every_storage_is_turned_back_into_the_numbers_that_the_layers_compute_with(
    bases: dict[str, BaseModel], kind: Quantization, tmp_path: Path
) -> None:
    from ftkit.evaluation.loading import open_adapter

    base = bases["llama"]
    recipe = lora_recipe(base, lora_query=True)
    adapter = save(train(build(base, recipe)), base, recipe, tmp_path / "adapter")
    result = find_result(str(adapter))
    opened = open_adapter(result, dtype=torch.float32, quantize=kind)
    merged = Merged(opened, kind, None)
    loaded = load_result(result, device=torch.device("cpu"), dtype=torch.float32, quantize=kind)
    layer: Any = loaded.model.get_submodule("body.transformer.h.0.mlp.fc_1")
    found = merged("transformer.h.0.mlp.fc_1.weight")
    assert torch.equal(found, layer.unpacked(layer.weight))
    assert not torch.equal(found, dict(_weights(base))["transformer.h.0.mlp.fc_1.weight"])


def _weights(base: BaseModel) -> Any:
    from ftkit.models.pretrained.base_model import weights

    return weights(base)


# --- What is refused ------------------------------------------------------------------------------


def test_results_that_cannot_be_merged_are_refused(ended: dict[str, Ended], tmp_path: Path) -> None:
    out = ("--out", tmp_path / "merged")
    assert says(mistake(ended["full"].out_dir, *out), "nothing to merge ... ftkit export")
    assert "--base is quantized" in mistake(ended["lora"].out_dir, *out, "--base", "quantized")
    assert "--max_shard_size is '5'" in mistake(
        ended["lora"].out_dir, *out, "--max_shard_size", "5"
    )
    assert "--dtype is 'int8'" in mistake(ended["lora"].out_dir, *out, "--dtype", "int8")
    assert list(tmp_path.iterdir()) == []


def test_another_base_model_is_refused(ended: dict[str, Ended], tmp_path: Path) -> None:
    out_dir = ended["lora"].out_dir
    torch.manual_seed(1)
    other = make_llama(tmp_path / "other", rope_theta=500.0)
    text = mistake(out_dir, "--out", tmp_path / "merged", "--checkpoint_dir", other)
    assert says(text, "is not the model") and "Try --checkpoint_dir PATH" in text
    text = mistake(out_dir, "--out", tmp_path / "merged", "--checkpoint_dir", tmp_path / "none")
    assert "does not exist" in text


def test_an_adapter_alone_knows_its_base_model(ended: dict[str, Ended], tmp_path: Path) -> None:
    adapter = Path(shutil.copytree(ended["lora"].final, tmp_path / "adapter"))
    other = make_llama(tmp_path / "other", rope_theta=500.0)
    text = mistake(adapter, "--out", tmp_path / "merged", "--checkpoint_dir", other)
    assert says(text, "is not the model")
    moved = make_llama(tmp_path / "moved")
    merged = merge(adapter, tmp_path / "merged", "--checkpoint_dir", moved)
    assert_equal(transformers_logits(merged), own_logits(ended["lora"].out_dir))


def test_an_adapter_of_another_shape_is_refused(
    bases: dict[str, BaseModel], tmp_path: Path
) -> None:
    base = bases["llama"]
    recipe = lora_recipe(base)
    adapter = save(build(base, recipe), base, recipe, tmp_path / "adapter")
    wider = make_llama(tmp_path / "wider", hidden_size=128)
    text = mistake(adapter, "--out", tmp_path / "merged", "--checkpoint_dir", wider)
    assert "has shape" in text or "does not fit" in text
    assert not (tmp_path / "merged").exists()


def test_a_missing_base_is_named(ended: dict[str, Ended], tmp_path: Path) -> None:
    adapter = Path(shutil.copytree(ended["lora"].final, tmp_path / "adapter"))
    settings = json.loads((adapter / "adapter_config.json").read_text())
    settings["base_model_name_or_path"] = str(tmp_path / "gone")
    (adapter / "adapter_config.json").write_text(json.dumps(settings))
    text = mistake(adapter, "--out", tmp_path / "merged")
    assert str(tmp_path / "gone") in text and "--checkpoint_dir PATH" in text


def test_a_format_that_cannot_hold_the_weights_is_refused(
    bases: dict[str, BaseModel], tmp_path: Path
) -> None:
    base = bases["llama"]
    recipe = lora_recipe(base)
    model = train(build(base, recipe))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter *= 1e4  # type: ignore[misc]
    adapter = save(model, base, recipe, tmp_path / "adapter")
    text = mistake(adapter, "--out", tmp_path / "merged", "--dtype", "float16")
    assert "float16 cannot hold. Try --dtype bfloat16" in text
    assert [path.name for path in tmp_path.iterdir()] == ["adapter"]


# --- All or nothing -------------------------------------------------------------------------------


def test_an_existing_model_is_only_replaced_with_overwrite(
    ended: dict[str, Ended], tmp_path: Path
) -> None:
    merged = merge(ended["lora"].out_dir, tmp_path / "merged")
    before = transformers_logits(merged)
    assert says(mistake(ended["dora"].out_dir, "--out", merged), "exists ... --overwrite")
    assert torch.equal(transformers_logits(merged), before)
    merge(ended["dora"].out_dir, merged, "--overwrite")
    assert_equal(transformers_logits(merged), own_logits(ended["dora"].out_dir))
    assert [path.name for path in tmp_path.iterdir()] == ["merged"]


def test_only_models_and_adapters_are_replaced(ended: dict[str, Ended], tmp_path: Path) -> None:
    run_copy = Path(shutil.copytree(ended["lora"].out_dir, tmp_path / "run"))
    adapter = run_copy / "final"
    for out in (run_copy, run_copy / "checkpoints", tmp_path):
        assert "holds more than a model" in mistake(adapter, "--out", out, "--overwrite")
    assert "which is read" in mistake(adapter, "--out", adapter, "--overwrite")
    base = find_result(str(adapter)).base
    assert "which is read" in mistake(adapter, "--out", base, "--overwrite")


@pytest.mark.parametrize(
    ("signal", "code"),
    [
        pytest.param("SIGINT", 130, marks=pytest.mark.slow),
        pytest.param("SIGTERM", 143, marks=pytest.mark.matrix),
        pytest.param("SIGHUP", 129, marks=pytest.mark.matrix),
    ],
)
def test_a_signal_leaves_nothing_half_written(
    ended: dict[str, Ended], ftkit: Command, tmp_path: Path, signal: str, code: int
) -> None:
    done = ftkit(
        "merge",
        ended["lora"].out_dir,
        "--out",
        tmp_path / "merged",
        "--max_shard_size",
        "50KB",
        before=f"""
{DEFAULT_SIGNALS}
import os, signal
from pathlib import Path
from ftkit.models.pretrained.weight_files import ShardWriter
write = ShardWriter._write_shard
def write_and_end(self):
    write(self)
    assert list(Path({str(tmp_path)!r}).glob(".merged.partial/shard-*"))
    os.kill(os.getpid(), signal.{signal})
ShardWriter._write_shard = write_and_end
""",
        cold=signal == "SIGTERM",  # as a user's is
    )
    assert done.returncode == code, done.stderr
    assert list(tmp_path.iterdir()) == []


def test_leftovers_of_a_crash_are_removed_at_the_next_start(
    ended: dict[str, Ended], tmp_path: Path
) -> None:
    leftover = tmp_path / ".merged.partial"
    leftover.mkdir()
    (leftover / "shard-0").write_text("half")
    replaced = merge(ended["dora"].out_dir, tmp_path / ".merged.replaced")
    merged = tmp_path / "merged"
    text = mistake(ended["lora"].out_dir, "--out", merged)  # a crash between two renames
    assert "exists" in text
    assert not replaced.exists() and not leftover.exists()
    assert_equal(transformers_logits(merged), own_logits(ended["dora"].out_dir))
    merge(ended["lora"].out_dir, merged, "--overwrite")
    assert [path.name for path in tmp_path.iterdir()] == ["merged"]


def test_a_disk_without_room_is_refused_before_anything_is_written(
    ended: dict[str, Ended], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)._replace(free=2**20)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    text = mistake(ended["lora"].out_dir, "--out", tmp_path / "merged")
    assert "needs 6" in text and "the disk has 1.0 MiB free" in text
    assert list(tmp_path.iterdir()) == []
