"""quantize: stored trains an adapter on the weights as the files of the base model have them."""

import json
from pathlib import Path

import pytest
import torch
from adapters import build, export, logits, lora_recipe, train
from command import Command
from fp8_models import STYLES, in_fp8
from messages import says
from rank_jobs import needs_deepspeed
from runs import WITHOUT_EVALUATION, options
from safetensors.torch import load_file, save_file
from tiny import make_data, make_llama
from transformers_models import make_in_mxfp4, make_transformers_model

from ftkit.errors import UserError
from ftkit.evaluation.loading import load_result, open_adapter
from ftkit.evaluation.result import find_result
from ftkit.models.bodies.experts import packed_in
from ftkit.models.language_model import LanguageModel, outline
from ftkit.models.lora.layers import unpacked_weight
from ftkit.models.lora.targets import our_name
from ftkit.models.pretrained.base_model import BaseModel, open_base, read_blueprint, weights
from ftkit.models.unpacking import held_as_stored
from ftkit.runs.report.metrics import read_metrics


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> BaseModel:
    return open_base(str(make_in_mxfp4(tmp_path_factory.mktemp("base") / "gpt-oss")))


def adapted(base: BaseModel, quantize: str | None, dtype: torch.dtype) -> LanguageModel:
    recipe = lora_recipe(base, quantize=quantize, lora_experts=bool(has_experts(base)))
    return train(build(base, recipe, dtype=dtype))


def has_experts(base: BaseModel) -> bool:
    return base.architecture.expert_share < 1


def gradients(model: LanguageModel) -> dict[str, torch.Tensor]:
    model(torch.arange(12)[None], torch.arange(12)).float().square().mean().backward()
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    return {name: p.grad for name, p in trained.items() if p.grad is not None}


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
    stored, plain = (adapted(base, kind, torch.float32) for kind in ("stored", None))
    torch.testing.assert_close(logits(stored), logits(plain), rtol=1e-5, atol=1e-6)
    found, expected = gradients(stored), gradients(plain)
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-7)


FP8 = [("llama", style) for style in STYLES]
FP8 += [("qwen3_moe", "DeepSeek V3"), ("deepseek_v3", "DeepSeek V3.1"), ("deepseek_v3", "Qwen")]


@pytest.mark.parametrize(("kind", "style"), FP8)
def test_weights_in_fp8_are_held_as_the_files_have_them(
    kind: str, style: str, tmp_path: Path
) -> None:
    packed, _ = in_fp8(make_transformers_model(tmp_path / "base", kind), tmp_path, style)
    base = open_base(str(packed))
    recipe = lora_recipe(base, quantize="stored")
    model, of_base = build(base, recipe), dict(weights(base))
    held = list(held_as_stored(model))
    # Each of them, and no other; those of experts are one parameter.
    stored = load_file(packed / "model.safetensors")
    files = {name: t for name, t in stored.items() if t.dtype == torch.float8_e4m3fn}
    parameters = dict(model.named_parameters())
    assert sum(parameters[name].nbytes for name in held) == sum(t.nbytes for t in files.values())
    for name in held:
        owner, _, leaf = name.rpartition(".")
        module = model.get_submodule(owner)
        if matrices := packed_in(module).get(leaf):
            weight = matrices.unpacked(parameters[name], slice(0, matrices.experts))
        else:
            weight = unpacked_weight(module)
        assert weight.equal(of_base[our_name(name)].float())
    # The settings alone say which they are: for a plan, nothing else is there.
    described = outline(read_blueprint(str(packed)), recipe, torch.float32)
    assert list(held_as_stored(described)) == held


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("kind", "style"), FP8[1:3] + FP8[-2:])
def test_an_adapter_on_fp8_computes_what_it_does_on_the_unpacked_weights(
    kind: str, style: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    packed, plain = in_fp8(make_transformers_model(tmp_path / "base", kind), tmp_path, style)
    expected = adapted(open_base(str(plain)), None, dtype)
    for quantize in ("stored", None):
        found = adapted(open_base(str(packed)), quantize, dtype)
        assert torch.equal(logits(found), logits(expected))
        torch.testing.assert_close(gradients(found), gradients(expected), rtol=0, atol=0)
        expected.zero_grad()


def test_dora_and_pissa_begin_at_the_weights_in_fp8(tmp_path: Path) -> None:
    packed, plain = in_fp8(make_llama(tmp_path / "base"), tmp_path, "DeepSeek V3")
    for keys in ({"lora_variant": "dora"}, {"lora_init": "pissa"}):
        models = [
            build(base, lora_recipe(base, quantize=quantize, **keys))
            for base, quantize in (
                (open_base(str(packed)), "stored"),
                (open_base(str(plain)), None),
            )
        ]
        assert torch.equal(*map(logits, models))


def test_a_merged_result_has_the_numbers_of_the_files(base: BaseModel, tmp_path: Path) -> None:
    merge = pytest.importorskip("ftkit.extensions.publish.merge")
    recipe = lora_recipe(base, quantize="stored")
    adapter = export(train(build(base, recipe)), base, recipe, tmp_path / "adapter")
    opened = open_adapter(find_result(str(adapter)), dtype=torch.float32, quantize="stored")
    merged, of_base = merge.Merged(opened, None, None), dict(weights(base))
    experts = [name for name, tensor in of_base.items() if tensor.ndim == 3]
    assert len(experts) == 4
    for name in experts:
        assert merged(name).equal(of_base[name])


@pytest.mark.parametrize("implementation", ["litgpt", "transformers"])
def test_results_are_read_and_merged_with_the_base_in_fp8(
    implementation: str, tmp_path: Path
) -> None:
    packed, plain = in_fp8(make_llama(tmp_path / "base"), tmp_path, "Qwen")
    adapters = {}
    for place, quantize in ((packed, "stored"), (plain, None)):
        base = open_base(str(place), implementation)
        recipe = lora_recipe(base, quantize=quantize)
        out = export(train(build(base, recipe)), base, recipe, tmp_path / f"adapter-{place.name}")
        adapters[place] = find_result(str(out))
    found = {}
    for place, quantize in ((packed, "stored"), (plain, None)):
        kinds = {"dtype": torch.float32, "quantize": quantize, "device": torch.device("cpu")}
        loaded = load_result(adapters[place], base=str(place), **kinds)
        whole = load_result(find_result(str(place)), **kinds)
        opened = open_adapter(
            adapters[place], dtype=torch.float32, quantize=quantize, base=str(place)
        )
        merged = pytest.importorskip("ftkit.extensions.publish.merge").Merged(opened, None, None)
        numbers = {name: merged(name) for name in merged.shapes}
        found[place] = (logits(loaded.model), logits(whole.model), numbers)
    torch.testing.assert_close(found[packed], found[plain], rtol=0, atol=0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("form", "strategy"),
    [
        *((form, "fsdp") for form in ("FP8", "FP8, experts")),
        pytest.param("MXFP4", "fsdp", marks=pytest.mark.matrix),
        pytest.param("FP8", "ddp", marks=pytest.mark.matrix),
        pytest.param("FP8", "deepspeed", marks=[pytest.mark.matrix, needs_deepspeed]),
        pytest.param("FP8, experts", "deepspeed", marks=[pytest.mark.matrix, needs_deepspeed]),
    ],
)
def test_runs_in_any_layout_have_the_losses_of_unpacked_weights(
    form: str, strategy: str, base: BaseModel, tmp_path: Path, ftkit: Command
) -> None:
    data = make_data(tmp_path / "data.json")
    model, experts = base.directory, ["--lora_experts", "true"]
    if form != "MXFP4":
        kind = "qwen3_moe" if "experts" in form else "llama"
        model, _ = in_fp8(make_transformers_model(tmp_path / "base", kind), tmp_path, "DeepSeek V3")
        experts = experts if "experts" in form else []

    def run(name: str, *changes: str) -> list[float]:
        out = tmp_path / f"out-{name}"
        done = ftkit(
            "finetune", model, "--data", "JSON", "--data.path", data, *experts, *changes,
            "--train.max_steps", 3, "--accelerator", "cpu", "--precision", "32-true",
            "--lora_dropout", 0, "--out_dir", out,
            "--train.global_batch_size", 4, "--train.micro_batch_size", 2,
            *options(**WITHOUT_EVALUATION), within_s=300,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return [float(row["loss"] or 0) for row in read_metrics(out / "metrics.csv")]

    plain, stored = run("plain"), ("--quantize", "stored")
    assert len(plain) == 3
    on_one = run("stored", *stored, "--stop_after", "2")
    assert on_one == (pytest.approx(plain[:2], rel=1e-5) if form == "MXFP4" else plain[:2])
    ranks = ("--strategy", strategy, "--devices", "2")
    assert run("stored", *stored, *ranks, "--resume", "auto") == pytest.approx(plain, rel=1e-5)
    assert run("ranks", *stored, *ranks) == pytest.approx(plain, rel=1e-5)


@pytest.mark.parametrize(
    ("kind", "form"),
    [
        ("gpt_oss", "gpt-oss has plain numbers"),
        ("llama", "plain numbers"),
        ("GPTQ", "GPTQ"),
        ("int8", "compressed-tensors"),
    ],
)
def test_other_forms_are_refused(kind: str, form: str, tmp_path: Path) -> None:
    place = tmp_path / "gpt-oss"
    made = make_transformers_model(place, kind) if kind == "gpt_oss" else make_llama(place)
    configs = {
        "GPTQ": {"quant_method": "gptq", "bits": 4},
        "int8": {
            "quant_method": "compressed-tensors",
            "format": "int-quantized",
            "config_groups": {"group_0": {"weights": {"type": "int", "num_bits": 8}}},
        },
    }
    other = open_base(str(made))
    if kind in configs:
        file = made / "config.json"
        settings = json.loads(file.read_text()) | {"quantization_config": configs[kind]}
        file.write_text(json.dumps(settings))
        other = read_blueprint(str(made))
    with pytest.raises(UserError) as refused:
        outline(other, lora_recipe(other, quantize="stored"), torch.float32)
    assert says(str(refused.value), f"quantize is stored ... {form} ... --quantize bnb.nf4-dq")


def test_weights_that_are_not_in_fp8_as_their_settings_say_are_plain(tmp_path: Path) -> None:
    packed, plain = in_fp8(make_llama(tmp_path / "base"), tmp_path)
    file = packed / "model.safetensors"
    tensors, meant = load_file(file), load_file(plain / "model.safetensors")
    changed = "model.layers.1.mlp.down_proj.weight"
    del tensors[f"{changed}_scale_inv"]
    save_file(tensors | {changed: meant[changed]}, file, {"format": "pt"})
    base = open_base(str(packed))
    model = build(base, lora_recipe(base, quantize="stored"))
    assert len(list(held_as_stored(model))) == 13
    other = open_base(str(plain))
    assert torch.equal(logits(model), logits(build(other, lora_recipe(other))))
