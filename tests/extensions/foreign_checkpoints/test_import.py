"""Runs that others began: what other programs have written goes on under ftkit, step for step.

What lies in the folder checkpoints beside this file was written by these programs themselves
(`scripts/make_foreign_checkpoints`), which then did one step more: its loss and weights are here.
"""

import csv
import hashlib
import json
import re
import shlex
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import torch
from command import ROOT, Command
from foreign_checkpoints import BASE, KEPT, SHALLOW, recipe, stored_of
from messages import key_words, says
from neox_orders import CORPORA
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from ftkit.checkpoint.metadata import read_metadata
from ftkit.checkpoint.store import Store
from ftkit.cli.app import run as run_command
from ftkit.errors import UserError
from ftkit.extensions.foreign_checkpoints.command import import_run
from ftkit.extensions.foreign_checkpoints.commands import ImportOptions
from ftkit.extensions.foreign_checkpoints.unpickling import held
from ftkit.models.architectures.architecture import ModelLayout
from ftkit.models.pretrained.base_model import open_base, storage_of
from ftkit.recipe.parsing import read_recipe

CLOSE = 1e-5


def go_on(ftkit: Command, run: Path, method: str) -> dict[str, str]:
    """The row of the step after the import."""
    command = "finetune" if method == "lora" else "finetune_full"
    words = (command, "--config", run / "recipe.yaml", "--resume", "auto", "--stop_after", 1)
    ended = ftkit(*words)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    with (run / "metrics.csv").open() as file:
        (row,) = csv.DictReader(file)
    return row


def weights_of(run: Path, kept: "Kept") -> dict[str, torch.Tensor]:
    """Those of the newest checkpoint, by the names that the other program gives them."""
    checkpoint = Store(run / "checkpoints").path(4)
    if kept.method == "lora" and kept.layout == "hf":
        return load_file(checkpoint / "adapter/adapter_model.safetensors")
    ours = stored_of(checkpoint, "parameter")
    return _joined(ours) if kept.method == "lora" else named_in(kept, ours, kept.layout)


def named_in(
    kept: "Kept", ours: Mapping[str, torch.Tensor], layout: ModelLayout
) -> dict[str, torch.Tensor]:
    """Tensors by the names of a layout."""
    architecture = open_base(str(kept.base), None).architecture
    return dict(storage_of(architecture, layout).written(ours.items()))


def _joined(adapter: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """An adapter by LitGPT's names, where query and value are one layer."""
    parts: dict[str, list[torch.Tensor]] = {}
    for name, tensor in adapter.items():
        theirs = re.sub(r"\.[qkv]_proj(?=\.)", "", name).removesuffix(".default.weight")
        parts.setdefault(theirs, []).append(tensor)
    return {name: torch.cat(tensors) for name, tensors in parts.items()}


def differences(found: Mapping[str, torch.Tensor], noted: Mapping[str, list[float]]) -> float:
    """The largest between weights and what was noted of theirs."""
    worst = 0.0
    for name, values in noted.items():
        plain = name.replace(".default.", ".")
        flat = found[plain].float().flatten()
        places = [i * (flat.numel() - 1) // (len(values) - 1) for i in range(len(values))]
        worst = max(worst, (flat[places] - torch.tensor(values)).abs().max().item())
    return worst


@dataclass(frozen=True, kw_only=True)
class Kept:
    """A checkpoint of another program."""

    inside: str = ""
    """What is imported, in its directory."""
    method: str = "full"
    layout: ModelLayout = "hf"
    base: Path = BASE
    train: Mapping[str, float | None] = field(default_factory=dict)
    """What the recipe says, as the checkpoint does not."""


CASES = {
    "trainer": Kept(inside="checkpoint-3"),
    "trainer-deepspeed": Kept(inside="checkpoint-3"),
    "trainer-fsdp": Kept(inside="checkpoint-3", base=SHALLOW),
    "trainer-fsdp-gathered": Kept(inside="checkpoint-3"),
    "trl-lora": Kept(inside="checkpoint-3", method="lora"),
    "deepspeed-zero1": Kept(),
    "deepspeed-zero3": Kept(),
    "gpt-neox": Kept(),
    "distributed": Kept(inside="checkpoint", base=SHALLOW),
    "lightning": Kept(inside="checkpoint.ckpt"),
    "lightning-sharded": Kept(inside="checkpoint.ckpt", base=SHALLOW),
    "litgpt": Kept(inside="step-000003", layout="litgpt", train={"max_norm": None}),
    "litgpt-lora": Kept(
        inside="step-000003",
        method="lora",
        layout="litgpt",
        train={"max_norm": None, "min_lr": 3e-3, "lr_warmup_steps": 0},
    ),
}


SLOW = {"trl-lora", "gpt-neox", "litgpt-lora"}
"""Whose runs go on in a process of their own; those of the others do so in the matrix."""


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(name, marks=pytest.mark.slow if name in SLOW else pytest.mark.matrix)
        for name in CASES
    ],
)
def test_the_step_after_an_import_is_the_one_that_the_other_program_did(
    ftkit: Command, tmp_path: Path, case: str
) -> None:
    kept = CASES[case]
    source, run = KEPT / case / kept.inside, tmp_path / "run"
    theirs = json.loads((KEPT / case / "next.json").read_text())
    config = recipe(tmp_path, kept.base, **kept.train)
    imported = ftkit("import", source, "--out", run, "--config", config)
    assert imported.returncode == 0, imported.stderr
    assert says(imported.stdout, "not taken over: the order")
    (step,) = Store(run / "checkpoints").steps()
    assert step == theirs["step"] - 1
    metadata = read_metadata(Store(run / "checkpoints").path(step))
    assert metadata.samples == 18 and metadata.method == kept.method
    assert metadata.learning_rate == pytest.approx(theirs["learning_rate"], rel=1e-6)

    row = go_on(ftkit, run, kept.method)
    assert float(row["lr"]) == pytest.approx(theirs["learning_rate"], rel=1e-6)
    assert float(row["loss"]) == pytest.approx(theirs["loss"], abs=CLOSE)
    found = weights_of(run, kept)
    assert found.keys() == {name.replace(".default.", ".") for name in theirs["weights"]}
    assert differences(found, theirs["weights"]) < CLOSE


@pytest.mark.parametrize("case", [name for name, kept in CASES.items() if kept.method == "full"])
def test_what_was_imported_is_all_that_the_next_step_of_the_other_program_needed(
    tmp_path: Path, case: str
) -> None:
    """Done here by transformers and torch with what lies in our checkpoint."""
    kept = CASES[case]
    source, run = KEPT / case / kept.inside, tmp_path / "run"
    theirs = json.loads((KEPT / case / "next.json").read_text())
    config = recipe(tmp_path, kept.base, **kept.train)
    import_run(ImportOptions(source=source, out=run, config=(str(config),)))
    checkpoint = Store(run / "checkpoints").path(theirs["step"] - 1)
    settings = read_recipe([run / "recipe.yaml"], [], method="full").optimizer["init_args"]
    metadata = read_metadata(checkpoint)

    model = AutoModelForCausalLM.from_pretrained(kept.base, dtype=torch.float32)
    model.load_state_dict(named_in(kept, stored_of(checkpoint, "parameter"), "hf"))
    optimizer = torch.optim.AdamW(
        model.parameters(),
        lr=metadata.learning_rate,
        betas=settings["betas"],
        weight_decay=settings["weight_decay"],
    )
    for kind in ("exp_avg", "exp_avg_sq"):
        moments = named_in(kept, stored_of(checkpoint, kind), "hf")
        for name, parameter in model.named_parameters():
            state = optimizer.state[parameter]
            state["step"] = torch.tensor(metadata.optimizer_scalars["step"])
            state[kind] = moments[name].clone()
    ids = torch.tensor(json.loads((kept.base / "samples.json").read_text()))
    loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    loss.backward()
    max_norm = kept.train.get("max_norm", 0.5)
    if max_norm is not None:
        torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    optimizer.step()

    assert loss.item() == pytest.approx(theirs["loss"], abs=CLOSE)
    after = {name: parameter.detach() for name, parameter in model.named_parameters()}
    if kept.layout == "litgpt":
        architecture = open_base(str(kept.base), None).architecture
        holders = storage_of(architecture, "hf").holders(
            {name: held(tensor) for name, tensor in after.items()}
        )
        after = named_in(kept, {name: found.read() for name, found in holders.items()}, "litgpt")
    assert after.keys() == theirs["weights"].keys()
    assert differences(after, theirs["weights"]) < CLOSE


@pytest.mark.slow
def test_the_document_shows_what_the_imports_of_its_examples_say(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    text = (ROOT / "docs/import.md").read_text()
    shown = re.findall(r"^\$ ftkit (import .*)\n((?:(?!\$ |```).*\n)*)", text, re.MULTILINE)
    assert len(shown) == 2
    shutil.copytree(KEPT / "gpt-neox", tmp_path / "neox")
    shutil.copytree(KEPT / "base", tmp_path / "neox-hf")
    shutil.copytree(CORPORA, tmp_path / "corpora")
    monkeypatch.chdir(tmp_path)
    for words, output in shown:
        assert run_command(shlex.split(words)) == 0
        assert capfd.readouterr().out == output


def test_the_checkpoints_are_as_their_programs_wrote_them() -> None:
    noted = json.loads((KEPT / "files.json").read_text())
    found = {
        path.relative_to(KEPT).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in KEPT.rglob("*")
        if path.is_file() and path.name != "files.json"
    }
    assert found == noted


def test_a_final_model_of_litgpt_continues_with_a_new_optimizer_and_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    final, run = tmp_path / "final", tmp_path / "run"
    shutil.copytree(KEPT / "litgpt/step-000003", final)
    content = torch.load(final / "lit_model.pth", weights_only=True)
    (final / "lit_model.pth").unlink()
    torch.save({"model": content["model"]}, final / "lit_model.pth")
    config = (str(recipe(tmp_path, max_norm=None)),)
    import_run(ImportOptions(source=final, out=run, config=config))
    said = capsys.readouterr().out
    assert says(said, "not taken over: the optimizer's state") and "counted from 0" in said
    (step,) = Store(run / "checkpoints").steps()
    checkpoint = Store(run / "checkpoints").path(step)
    assert step == 0 and read_metadata(checkpoint).optimizer_scalars == {"step": 0.0}
    found = named_in(CASES["litgpt"], stored_of(checkpoint, "parameter"), "litgpt")
    assert all(torch.equal(found[name], value) for name, value in content["model"].items())
    moments = stored_of(checkpoint, "exp_avg_sq")
    assert moments and not any(tensor.any() for tensor in moments.values())

    (final / "hyperparameters.yaml").unlink()
    with pytest.raises(UserError, match=key_words("hyperparameters.yaml")):
        import_run(ImportOptions(source=final, out=tmp_path / "other", config=config))


@pytest.mark.parametrize("case", [name for name, kept in CASES.items() if kept.base == BASE])
def test_a_base_model_with_fewer_layers_than_were_trained_is_refused(
    tmp_path: Path, case: str
) -> None:
    """Half of the weights would be lost, and the loss of the next step would be another."""
    source, run = KEPT / case / CASES[case].inside, tmp_path / "run"
    options = ImportOptions(source=source, out=run, config=(str(recipe(tmp_path, SHALLOW)),))
    with pytest.raises(UserError, match=key_words("base")):
        import_run(options)
    assert not run.exists()


def test_a_head_that_was_trained_apart_from_its_embedding_needs_a_model_that_has_both(
    tmp_path: Path,
) -> None:
    """LitGPT unties the two when it trains them."""
    base = tmp_path / "base"
    shutil.copytree(BASE, base)
    weights = load_file(base / "model.safetensors")
    del weights["lm_head.weight"]
    save_file(weights, base / "model.safetensors", {"format": "pt"})
    config = json.loads((base / "config.json").read_text()) | {"tie_word_embeddings": True}
    (base / "config.json").write_text(json.dumps(config))
    source, run = KEPT / "litgpt/step-000003", tmp_path / "run"
    options = ImportOptions(source=source, out=run, config=(str(recipe(tmp_path, base)),))
    with pytest.raises(UserError, match=key_words("head", "--train.tie_embeddings false")):
        import_run(options)
    import_run(replace(options, config=(str(recipe(tmp_path, base, tie_embeddings=False)),)))
    (step,) = Store(run / "checkpoints").steps()
    found = stored_of(Store(run / "checkpoints").path(step), "parameter")
    theirs = torch.load(source / "lit_model.pth", weights_only=True)["model"]
    assert torch.equal(found["lm_head.weight"], theirs["lm_head.weight"])
