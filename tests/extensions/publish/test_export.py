"""ftkit export: directories that other programs load, exact in both directions."""

import io
import json
import shutil
from pathlib import Path
from typing import Any

import litgpt
import pytest
import torch
from conversions import assert_equal, export, litgpt_logits, merge, own_logits, transformers_logits
from litgpt.utils import save_config
from messages import message_of, says
from results import Ended
from safetensors.torch import load_file
from tiny import make_llama, make_tokenizer
from torch import Tensor

from ftkit.cli.app import run
from ftkit.models.pretrained.base_model import fingerprint, open_base, weights

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


def mistake(*words: object) -> str:
    return message_of(run, ["export", *map(str, words)])


def make_litgpt(directory: Path, *, tied: bool, dtype: torch.dtype) -> Path:
    """A LitGPT checkpoint with a vocabulary of 390 in tables of 448 rows."""
    config = litgpt.Config(
        name="tiny",
        block_size=64,
        vocab_size=390,
        padded_vocab_size=448,
        n_layer=2,
        n_head=4,
        n_embd=32,
        n_query_groups=2,
        rotary_percentage=1.0,
        parallel_residual=False,
        bias=False,
        norm_class_name="RMSNorm",
        mlp_class_name="LLaMAMLP",
        intermediate_size=48,
    )
    directory.mkdir()
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = litgpt.GPT(config).to(dtype)
    if tied:
        model.lm_head.weight = model.transformer.wte.weight
    torch.save(model.state_dict(), directory / "lit_model.pth")
    save_config(config, directory)
    make_tokenizer(directory)
    return directory


# --- Round trips ----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("tied", [False, True])
def test_from_litgpt_to_hugging_face_and_back_nothing_changes(
    tied: bool, dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = make_litgpt(tmp_path / "start", tied=tied, dtype=dtype)
    hf = export(start, "hf", tmp_path / "hf")
    back = export(hf, "litgpt", tmp_path / "back")
    before, after = (
        torch.load(directory / "lit_model.pth", weights_only=True) for directory in (start, back)
    )
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert tensor.dtype == after[name].dtype == dtype and torch.equal(tensor, after[name])
    assert torch.equal(litgpt_logits(start), litgpt_logits(back))
    assert_equal(transformers_logits(hf), litgpt_logits(start), 1e-5)
    assert json.loads((hf / "config.json").read_text())["vocab_size"] == 448
    models = [open_base(str(directory)) for directory in (start, hf, back)]
    assert [model.tied for model in models] == [tied] * 3
    assert len({fingerprint(model) for model in models}) == 1


@pytest.mark.parametrize("tied", [False, True])
def test_from_hugging_face_to_litgpt_and_back_nothing_changes(tied: bool, tmp_path: Path) -> None:
    start = make_llama(tmp_path / "tiny", tie_word_embeddings=tied)
    lit = export(start, "litgpt", tmp_path / "lit")
    back = export(lit, "hf", tmp_path / "back")
    before, after = (load_file(path / "model.safetensors") for path in (start, back))
    assert before.keys() == after.keys()
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())
    settings = [json.loads((path / "config.json").read_text()) for path in (start, back)]
    assert settings[0] == settings[1]
    assert_equal(litgpt_logits(lit), transformers_logits(start))


@pytest.mark.parametrize("name", ["phi-3", "gpt-neox"])
def test_fused_families_go_to_litgpt_and_back(name: str, tmp_path: Path) -> None:
    from adapters import MAKERS

    start = MAKERS[name](tmp_path / name)
    lit = export(start, "litgpt", tmp_path / "lit")
    back = export(lit, "hf", tmp_path / "back")
    before, after = (load_file(path / "model.safetensors") for path in (start, back))
    assert before.keys() == after.keys()
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())
    assert_equal(litgpt_logits(lit), transformers_logits(start))


# --- Results of runs ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["full", "tied", "bf16"])
@pytest.mark.parametrize("where", ["out_dir", "checkpoint"])
def test_a_full_fine_tune_and_its_checkpoints_are_exported(
    ended: dict[str, Ended], name: str, where: str, tmp_path: Path
) -> None:
    result = getattr(ended[name], where)
    hf = export(result, "hf", tmp_path / "hf")
    expected = dict(weights(open_base(str(ended[name].final))))
    found = dict(weights(open_base(str(hf))))
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], tensor) for key, tensor in expected.items())
    assert {tensor.dtype for tensor in found.values()} == {open_base(str(ended[name].final)).dtype}
    lit = export(result, "litgpt", tmp_path / "lit")
    assert_equal(litgpt_logits(lit), transformers_logits(hf))


def test_a_merged_model_is_exported(ended: dict[str, Ended], tmp_path: Path) -> None:
    merged = merge(ended["lora"].out_dir, tmp_path / "merged")
    lit = export(merged, "litgpt", tmp_path / "lit")
    assert_equal(litgpt_logits(lit), own_logits(ended["lora"].out_dir))


def test_an_adapter_is_exported_as_it_is(ended: dict[str, Ended], tmp_path: Path) -> None:
    run = ended["lora"]
    sources = {run.out_dir: run.final, run.checkpoint: run.checkpoint / "adapter"}
    for number, (result, source) in enumerate(sources.items()):
        out = export(result, "peft", tmp_path / str(number))
        assert {file.name for file in out.iterdir()} - {"README.md"} == {
            "adapter_config.json",
            "adapter_model.safetensors",
            "chat_template.jinja",
            "generation_config.json",
            "tokenizer.json",
            "tokenizer_config.json",
        }
        for file in out.iterdir():
            assert file.read_bytes() == (source / file.name).read_bytes()
        assert torch.equal(own_logits(out), own_logits(run.out_dir))


@pytest.mark.parametrize("form", ["hf", "litgpt", "peft"])
def test_an_export_prints_the_command_to_chat_with_it(
    ended: dict[str, Ended],
    form: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    out = export(ended["lora" if form == "peft" else "full"].out_dir, form, tmp_path / form)
    head, *following = capsys.readouterr().out.splitlines()
    assert head.startswith(f"{out} is ready for {form}: ") and head.endswith("iB")
    assert following == ["next:", f"  ftkit chat {out}"]
    monkeypatch.setattr("sys.stdin", io.StringIO("what is the colour of the moon\n"))
    words = ("--max_new_tokens", "4", "--accelerator", "cpu")
    assert run([*following[1].split()[1:], *words]) == 0


def test_dtype_sets_the_number_format(ended: dict[str, Ended], tmp_path: Path) -> None:
    for form in ("hf", "litgpt"):
        out = export(ended["full"].out_dir, form, tmp_path / form, "--dtype", "float16")
        base = open_base(str(out))
        assert {tensor.dtype for _, tensor in weights(base)} == {torch.float16}
        assert json.loads((out / "config.json").read_text())["dtype"] == "float16"


def test_the_prompt_style_of_the_run_comes_along(ended: dict[str, Ended], tmp_path: Path) -> None:
    from litgpt.prompts import Alpaca, load_prompt_style

    for form in ("hf", "litgpt"):
        out = export(ended["full"].out_dir, form, tmp_path / form)
        assert isinstance(load_prompt_style(out), Alpaca)


def test_a_litgpt_export_holds_tensors_and_nothing_else(
    ended: dict[str, Ended], tmp_path: Path
) -> None:
    """LitGPT reads nothing but torch.load; the restricted loader is enough."""
    out = export(ended["full"].out_dir, "litgpt", tmp_path / "lit")
    content: Any = torch.load(out / "lit_model.pth", weights_only=True)
    assert type(content) is dict and all(type(value) is Tensor for value in content.values())
    stored_bytes = sum(tensor.nbytes for tensor in content.values())
    assert (out / "lit_model.pth").stat().st_size < stored_bytes + 50_000


# --- What is refused ------------------------------------------------------------------------------


def test_a_layout_that_does_not_suit_is_refused_with_one_that_does(
    ended: dict[str, Ended], tmp_path: Path
) -> None:
    out = ("--out", tmp_path / "out")
    lora, full = ended["lora"].out_dir, ended["full"].out_dir
    text = mistake(lora, "--format", "hf", *out)
    assert f"Try ftkit merge {lora} --out {tmp_path / 'out'}." in text
    text = mistake(lora, "--format", "litgpt", *out)
    assert says(text, f"ftkit export {tmp_path / 'out'} --format litgpt")
    assert says(mistake(full, "--format", "peft", *out), "PEFT's layout ... adapters")
    assert "--format is missing" in mistake(full, *out)
    text = mistake(lora, "--format", "peft", "--dtype", "float16", *out)
    assert says(text, "adapter ... as it is")
    assert list(tmp_path.iterdir()) == []


def test_biases_that_litgpt_has_no_setting_for_are_refused(tmp_path: Path) -> None:
    base = make_llama(tmp_path / "biased", attention_bias=True)
    text = mistake(base, "--format", "litgpt", "--out", tmp_path / "lit")
    assert says(text, "LitGPT ... Try --format hf")
    assert not (tmp_path / "lit").exists()


def test_a_damaged_checkpoint_is_refused_and_nothing_is_left(
    ended: dict[str, Ended], tmp_path: Path
) -> None:
    copy = Path(shutil.copytree(ended["full"].checkpoint, tmp_path / ended["full"].checkpoint.name))
    (shard,) = copy.glob("shard-*")
    shard.write_bytes(shard.read_bytes()[:-10])
    assert "is damaged" in mistake(copy, "--format", "hf", "--out", tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == [copy.name]


@pytest.mark.parametrize("form", ["hf", "litgpt"])
def test_a_full_disk_is_reported_and_nothing_is_left(
    ended: dict[str, Ended], form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from litgpt.utils import incremental_save

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("ftkit.models.pretrained.weight_files.save_tensors", fail)
    monkeypatch.setattr(incremental_save, "store_early", fail)
    text = mistake(ended["full"].out_dir, "--format", form, "--out", tmp_path / "out")
    assert "cannot be written" in text and "No space left" in text
    assert list(tmp_path.iterdir()) == []


def test_an_existing_directory_is_replaced_only_with_overwrite(
    ended: dict[str, Ended], tmp_path: Path
) -> None:
    for form, result in (("hf", "full"), ("litgpt", "full"), ("peft", "lora")):
        out = export(ended[result].out_dir, form, tmp_path / form)
        again = (ended[result].out_dir, "--format", form, "--out", out)
        assert "or --overwrite" in mistake(*again)
        (out / "old.txt").touch()
        export(ended[result].out_dir, form, out, "--overwrite")
        assert not (out / "old.txt").exists()
