"""quantize: stored trains an adapter on the weights as the files of the base model have them."""

from pathlib import Path

import pytest
import torch
from adapters import build, export, logits, lora_recipe, train
from command import Command
from messages import says
from tiny import make_data, make_llama
from transformers_models import make_in_mxfp4, make_transformers_model

from ftkit.errors import UserError
from ftkit.evaluation.loading import open_adapter
from ftkit.evaluation.result import find_result
from ftkit.exchange.merge import Merged
from ftkit.models.bodies.experts import packed_in
from ftkit.models.language_model import LanguageModel, outline
from ftkit.models.pretrained.base_model import BaseModel, open_base, weights
from ftkit.runs.report.metrics import read_metrics


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> BaseModel:
    return open_base(str(make_in_mxfp4(tmp_path_factory.mktemp("base") / "gpt-oss")))


def adapted(base: BaseModel, quantize: str | None) -> LanguageModel:
    return train(build(base, lora_recipe(base, quantize=quantize, lora_experts=True)))


def test_matrices_are_held_in_four_bits_and_have_the_numbers_of_the_files(base: BaseModel) -> None:
    model = build(base, lora_recipe(base, quantize="stored"))
    of_base, found = dict(weights(base)), 0
    for name, module in model.named_modules():
        for kind, matrices in packed_in(module).items():
            held = module.get_parameter(kind)
            plain = matrices.unpacked(held, slice(0, matrices.experts)).mT
            assert plain.equal(of_base[f"{name}.{kind}".removeprefix("body.")].float())
            assert held.nbytes * 2 == plain.numel()
            found += 1
    assert found == 2 * 2


def test_an_adapter_learns_as_on_the_unpacked_weights(base: BaseModel) -> None:
    stored, plain = (adapted(base, kind) for kind in ("stored", None))
    torch.testing.assert_close(logits(stored), logits(plain), rtol=1e-5, atol=1e-6)
    gradients = []
    for model in (stored, plain):
        ids = torch.arange(12)[None]
        model(ids, torch.arange(12)).square().mean().backward()
        gradients.append({n: p.grad for n, p in model.named_parameters() if p.requires_grad})
    assert gradients[0].keys() == gradients[1].keys()
    for name, gradient in gradients[1].items():
        torch.testing.assert_close(gradients[0][name], gradient, rtol=1e-4, atol=1e-7)


def test_a_merged_result_has_the_numbers_of_the_files(base: BaseModel, tmp_path: Path) -> None:
    recipe = lora_recipe(base, quantize="stored")
    adapter = export(train(build(base, recipe)), base, recipe, tmp_path / "adapter")
    opened = open_adapter(find_result(str(adapter)), dtype=torch.float32, quantize="stored")
    merged, of_base = Merged(opened, None, None), dict(weights(base))
    experts = [name for name, tensor in of_base.items() if tensor.ndim == 3]
    assert len(experts) == 4
    for name in experts:
        assert merged(name).equal(of_base[name])


@pytest.mark.slow
def test_runs_in_any_layout_have_the_losses_of_unpacked_weights(
    base: BaseModel, tmp_path: Path, ftkit: Command
) -> None:
    data = make_data(tmp_path / "data.json")
    losses = []
    for number, changes in enumerate(
        ([], ["--quantize", "stored"], ["--quantize", "stored", "--strategy", "fsdp"])
    ):
        out, devices = tmp_path / str(number), 2 if "fsdp" in changes else 1
        done = ftkit(
            "finetune", base.directory, "--data", "JSON", "--data.path", data, *changes,
            "--devices", devices, "--train.max_steps", 3, "--accelerator", "cpu",
            "--precision", "32-true", "--lora_dropout", 0, "--lora_experts", "true",
            "--out_dir", out,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        losses.append([float(row["loss"] or 0) for row in read_metrics(out / "metrics.csv")])
    assert len(losses[0]) == 3
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    assert losses[2] == pytest.approx(losses[0], rel=1e-5)


@pytest.mark.parametrize(
    ("kind", "form"), [("gpt_oss", "gpt-oss has plain numbers"), ("llama", "plain numbers")]
)
def test_other_forms_are_refused(kind: str, form: str, tmp_path: Path) -> None:
    place = tmp_path / "gpt-oss"
    made = make_llama(place) if kind == "llama" else make_transformers_model(place, kind)
    other = open_base(str(made))
    with pytest.raises(UserError) as refused:
        outline(other, lora_recipe(other, quantize="stored"), torch.float32)
    assert says(str(refused.value), f"quantize is stored ... {form} ... --quantize bnb.nf4-dq")
