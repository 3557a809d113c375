"""Runs that certainly do not fit are refused before anything starts; the micro-batch is chosen."""

import dataclasses
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from messages import key_words, message_of, says
from tiny import make_tokenizer

from ftkit.cli.app import run
from ftkit.errors import DoesNotFit, UserError
from ftkit.launch import preflight
from ftkit.planning import gpus
from ftkit.planning.check import check
from ftkit.planning.gpus import HOST, Gpu
from ftkit.planning.predict import Planned, plan_files
from ftkit.planning.suggest import changes_that_fit
from ftkit.recipe.batches import MicroBatch
from ftkit.recipe.devices import Devices
from ftkit.recipe.parsing import Override, read_recipe, to_yaml
from ftkit.recipe.plan import make_plan
from ftkit.recipe.recipe import Recipe
from ftkit.utils import progress
from ftkit.utils.hardware import HostLimit, processes_killed_for_memory

CUDA = Devices(accelerator="cuda", count=1, names=("NVIDIA Some GPU",), memory_bytes=(24 * 2**30,))
COMMAND = ["ftkit", "finetune_full", "--config", "mine.yaml"]
ANSWER: dict[str, Any] = {
    "fits": False,
    "micro_batch_size": 4,
    "micro_batch_tokens": 8192,
    "low_bytes": 40 * 2**30,
    "high_bytes": 50 * 2**30,
    "host_bytes": 2**30,
    "host_low_bytes": 0,
    "length_source": "data",
    "length": "512 tokens: the longest sample",
    "other_model": "",
    "changes": [
        {"title": "LoRA", "method": "lora", "overrides": [["lora_r", "8"]]},
        {"title": "8-bit", "method": "full", "overrides": [["optimizer", "bitsandbytes.optim.A"]]},
    ],
}


def recipe(**keys: str) -> Recipe:
    """With micro-batches of one sequence, if no key says more of them."""
    values = {"checkpoint_dir": "random:pythia-14m", "train.max_seq_length": "64"}
    if not any("micro_batch" in key for key in keys):
        values["train.micro_batch_size"] = "1"
    values |= {key.replace("__", "."): value for key, value in keys.items()}
    return read_recipe([], list(values.items()))


def require_room(
    recipe: Recipe, devices: Devices, command: Sequence[str], *, force: bool = False
) -> MicroBatch | None:
    plan = make_plan(recipe, devices)
    return preflight.require_room(plan, devices, command, force=force)


class Gpu24GiB:
    """A machine with one GPU, its plans always found to be the same."""

    def __init__(self) -> None:
        self.answer: dict[str, Any] = dict(ANSWER)
        self.plans = 0
        """How many were made."""
        self.memory_bytes = 0
        """What the last was made for."""

    def ask(self, _: Recipe, __: Devices, device: Gpu, **___: object) -> dict[str, Any]:
        self.plans += 1
        self.memory_bytes = device.memory_bytes
        return self.answer


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu24GiB:
    machine = Gpu24GiB()
    monkeypatch.setattr(preflight, "check", machine.ask)
    return machine


def test_a_run_that_cannot_fit_is_refused_with_commands_that_would(gpu: Gpu24GiB) -> None:
    with pytest.raises(DoesNotFit) as refused:
        require_room(recipe(), CUDA, COMMAND)
    assert refused.value.exit_code == 3
    text = str(refused.value)
    assert says(text, "40.0 GiB on each GPU ... 24.0 GiB") and "--force" in text
    assert "LoRA: ftkit finetune --config mine.yaml --lora_r 8" in text
    assert "8-bit: ftkit finetune_full --config mine.yaml --optimizer bitsandbytes" in text


def test_commands_that_are_shown_have_no_token(gpu: Gpu24GiB) -> None:
    for words in (["--access_token", "my-secret"], ["--data.access_token=my-secret"]):
        with pytest.raises(DoesNotFit) as refused:
            require_room(recipe(), CUDA, [*COMMAND, *words])
        assert "LoRA: ftkit finetune" in str(refused.value)
        assert "my-secret" not in str(refused.value)


@pytest.mark.parametrize("fits", [True, None])
def test_runs_that_may_fit_are_not_refused(
    gpu: Gpu24GiB, fits: bool | None, capsys: pytest.CaptureFixture[str]
) -> None:
    gpu.answer["fits"] = fits
    require_room(recipe(), CUDA, COMMAND)
    assert gpu.plans == 1
    said = capsys.readouterr().out
    words = "may not be enough: this run needs 40.0 GiB to 50.0 GiB of 24.0 GiB on each GPU"
    assert (words in said and "512 tokens: the longest sample" in said) == (fits is None)


SMALL = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 400}
LARGE = {
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "vocab_size": 32000,
}
LARGE_CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 6144,
    "intermediate_size": 16384,
    "num_hidden_layers": 34,
    "num_attention_heads": 48,
    "vocab_size": 32000,
    "max_position_embeddings": 2048,
}
FLAT = LARGE | {"num_hidden_layers": 4}
LITGPT = {
    "hidden_size": "n_embd",
    "intermediate_size": "intermediate_size",
    "num_hidden_layers": "n_layer",
    "vocab_size": "padded_vocab_size",
}


@pytest.mark.parametrize("where", ["directory", "litgpt", "hub", "downloaded"])
@pytest.mark.parametrize(
    ("settings", "context", "keys", "plans"),
    [
        (SMALL, 256, {}, 0),
        (SMALL, 131_072, {"lora_r": "8"}, 0),
        (LARGE, 2048, {}, 1),
        (LARGE, 2048, {"lora_r": "8"}, 1),
        (FLAT, 2048, {"lora_r": "8"}, 0),
        (FLAT, 2048, {"lora_r": "8", "train__micro_batch_size": "16"}, 1),
        (FLAT, 131_072, {"lora_r": "8"}, 1),
        (FLAT, 2048, {"lora_r": "8", "train__micro_batch_tokens": "1000"}, 0),
        (FLAT, 2048, {"lora_r": "8", "train__micro_batch_tokens": "30000"}, 1),
        # As many as are usual: 8,192 on GPUs.
        (SMALL, 2048, {"lora_r": "8", "train__micro_batch_size": "null"}, 0),
        (FLAT, 2048, {"lora_r": "8", "train__micro_batch_size": "null"}, 1),
    ],
)
def test_whether_a_run_is_planned_depends_on_its_size_and_not_on_downloads(
    gpu: Gpu24GiB,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    where: str,
    settings: dict[str, int],
    context: int,
    keys: dict[str, str],
    plans: int,
) -> None:
    gpu.answer["fits"] = True
    monkeypatch.chdir(tmp_path)
    is_local = where in ("directory", "litgpt")
    name = "mine" if is_local else "org/mine"
    directory = tmp_path / (name if is_local else f"checkpoints/{name}")

    def settings_arrive(*_: object, **__: object) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        config = settings | {"max_position_embeddings": context}
        (directory / "config.json").write_text(json.dumps(config))
        if where == "litgpt":
            lines = [f"{LITGPT[key]}: {value}" for key, value in settings.items()]
            text = "\n".join([*lines, f"block_size: {context}"])
            (directory / "model_config.yaml").write_text(text)
        if where == "downloaded":
            (directory / "model.safetensors").write_bytes(b"weights")

    if where != "hub":
        settings_arrive()
    monkeypatch.setattr(preflight, "fetch_settings", settings_arrive)
    requested = recipe(checkpoint_dir=name, train__max_seq_length="null", **keys)
    require_room(requested, CUDA, COMMAND)
    assert gpu.plans == plans


@pytest.mark.parametrize(("other", "plans"), [(SMALL, 0), (LARGE, 1)])
@pytest.mark.parametrize("key", ["teacher", "reference"])
def test_a_run_with_another_large_model_is_planned(
    gpu: Gpu24GiB,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    key: str,
    other: dict[str, int],
    plans: int,
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, settings in (("mine", SMALL), ("other", other)):
        Path(name).mkdir()
        config = settings | {"max_position_embeddings": 256}
        Path(name, "config.json").write_text(json.dumps(config))
    gpu.answer["other_model"] = f"for the {key}"
    use = {"teacher": "distill", "reference": "dpo"}[key]
    keys = {key: "other", "objective": use}
    requested = recipe(checkpoint_dir="mine", lora_r="8", **keys)
    if plans:
        with pytest.raises(DoesNotFit, match=key_words(f"40.0 GiB ... for the {key}")):
            require_room(requested, CUDA, COMMAND)
    else:
        require_room(requested, CUDA, COMMAND)
    assert gpu.plans == plans


def models_here(directory: Path, **changes: Any) -> None:
    """Settings and tokenizers of two models, mine and other."""
    for name, own_changes in (("mine", {}), ("other", changes)):
        made = directory / name
        made.mkdir()
        make_tokenizer(made)
        settings = SMALL | {"max_position_embeddings": 256} | own_changes.get("settings", {})
        (made / "config.json").write_text(json.dumps(settings))
        vocabulary = made / "tokenizer.json"
        if "token" in own_changes:
            text = vocabulary.read_text()
            vocabulary.write_text(text.replace('"<s>"', json.dumps(own_changes["token"])))


REWARD = {"architectures": ["LlamaForSequenceClassification"]}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("key", "changes", "words"),
    [
        ("reference", {"token": "<e>"}, ("reference is other", "mine", "'<s>' is token 331")),
        ("teacher", {"token": "<e>"}, ("teacher is other", "mine", "'<s>' is token 331")),
        ("teacher", {"settings": {"vocab_size": 999}}, ("teacher is other", "999", "mine")),
        ("teacher", {"settings": REWARD}, ("teacher is other, a reward model",)),
        ("reference", {"settings": {"vocab_size": 999}}, None),
        ("reference", {}, None),
        ("teacher", {}, None),
    ],
)
def test_a_second_model_with_other_tokens_is_refused_before_weights_are_there(
    key: str,
    changes: dict[str, Any],
    words: tuple[str, ...] | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    models_here(tmp_path, **changes)
    requested = recipe(checkpoint_dir="mine", **{key: "other"})
    if words is None:
        preflight.check_second_models(requested)
    else:
        assert says(message_of(preflight.check_second_models, requested), *words)


@pytest.mark.slow
def test_a_run_whose_teacher_has_other_tokens_starts_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tiny_data: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    models_here(tmp_path, token="<e>")
    words = ["finetune", "mine", "--objective", "distill", "--teacher", "other"]
    words += ["--data", "JSON", "--data.path", str(tiny_data), "--accelerator", "cpu"]
    with pytest.raises(UserError, match="vocabulary differs"):
        run([*words, "--data.val_split_fraction", "0.1", "--out_dir", "out"])
    assert {path.name for path in tmp_path.iterdir()} == {"mine", "other"}


@pytest.mark.parametrize(
    ("keys", "plans"), [({}, 0), ({"objective": "kto", "reference": "mine"}, 1)]
)
def test_a_base_model_that_is_there_twice_counts_twice(
    gpu: Gpu24GiB,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    keys: dict[str, str],
    plans: int,
) -> None:
    """Its 550 million parameters, with gradients and Adam's state, are just below suspicion."""
    monkeypatch.chdir(tmp_path)
    Path("mine").mkdir()
    sizes = {"hidden_size": 1536, "intermediate_size": 4096, "num_hidden_layers": 16}
    config = {"vocab_size": 32000, "max_position_embeddings": 256, **sizes}
    Path("mine/config.json").write_text(json.dumps(config))
    gpu.answer["fits"] = True
    require_room(recipe(checkpoint_dir="mine", **keys), CUDA, COMMAND)
    assert gpu.plans == plans


@pytest.mark.parametrize("is_there", [True, False])
def test_a_model_without_settings_is_checked_if_it_is_local(
    gpu: Gpu24GiB, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, is_there: bool
) -> None:
    gpu.answer = {"error": "unknown"}
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(preflight, "fetch_settings", lambda *_, **__: None)
    if is_there:
        (tmp_path / "org" / "mine").mkdir(parents=True)
    require_room(recipe(checkpoint_dir="org/mine"), CUDA, COMMAND)
    assert gpu.plans == is_there


CPUS = Devices(accelerator="cpu", count=2)


def host_with(monkeypatch: pytest.MonkeyPatch, gib: int, swap_gib: int, free_gib: int) -> None:
    """Give this machine so much host memory."""

    def limit(processes: int) -> HostLimit:
        return HostLimit(gib * 2**30 // processes, swap_gib * 2**30 // processes)

    monkeypatch.setattr(gpus, "host_limit", limit)
    monkeypatch.setattr(gpus, "available_host_bytes", lambda n: free_gib * 2**30 // n)


def test_on_cpus_a_run_that_cannot_fit_in_the_host_memory_is_refused_likewise(
    gpu: Gpu24GiB, monkeypatch: pytest.MonkeyPatch
) -> None:
    host_with(monkeypatch, gib=60, swap_gib=4, free_gib=60)
    with pytest.raises(DoesNotFit) as refused:
        require_room(recipe(devices="2"), CPUS, COMMAND)
    text = str(refused.value)
    assert refused.value.exit_code == 3
    assert says(text, "40.0 GiB of host memory for each rank"), "two share it"
    assert says(text, "30.0 GiB ... 2.0 GiB of swap") and "--force" in text
    assert "LoRA: ftkit finetune --config mine.yaml --lora_r 8" in text


@pytest.mark.parametrize(
    ("fits", "free_gib", "swap_gib", "warns"),
    [(True, 80, 0, False), (True, 45, 0, True), (None, 45, 8, True)],
)
def test_memory_of_other_processes_on_cpus_only_warns(
    gpu: Gpu24GiB,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    fits: bool | None,
    free_gib: int,
    swap_gib: int,
    warns: bool,
) -> None:
    host_with(monkeypatch, gib=100, swap_gib=swap_gib, free_gib=free_gib)
    gpu.answer["fits"] = fits
    require_room(recipe(), CPUS, COMMAND)
    said = capsys.readouterr().out
    needs = "this run needs 40.0 GiB to 50.0 GiB of 45.0 GiB of host memory that is free"
    assert (needs in said) == warns
    assert ("swap is slow" in said) == (warns and swap_gib > 0)


@pytest.mark.parametrize(("low_gib", "fits"), [(70, False), (10, None)])
def test_host_memory_is_checked_for_gpus_too(
    gpu: Gpu24GiB,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    low_gib: int,
    fits: bool | None,
) -> None:
    host_with(monkeypatch, gib=60, swap_gib=4, free_gib=60)
    gpu.answer |= {"fits": fits, "low_bytes": 2**30, "high_bytes": 2**31}
    gpu.answer |= {"host_low_bytes": low_gib * 2**30, "host_bytes": 80 * 2**30}
    if fits is None:
        require_room(recipe(), CUDA, COMMAND)
        said = capsys.readouterr().out
        assert says(said, "10.0 GiB to 80.0 GiB of 64.0 GiB of host memory")
        return
    with pytest.raises(DoesNotFit, match=key_words("70.0 GiB of host memory")):
        require_room(recipe(), CUDA, COMMAND)


@pytest.mark.matrix
def test_a_run_of_a_large_model_is_refused_before_its_weights_are_made(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The whole way on a machine of 24 GiB: 15.5 billion parameters, whose weights are not here."""
    host_with(monkeypatch, gib=24, swap_gib=0, free_gib=23)
    monkeypatch.chdir(tmp_path)
    Path("model").mkdir()
    (tmp_path / "model/config.json").write_text(json.dumps(LARGE_CONFIG))
    words = ["finetune", "model", "--accelerator", "cpu", "--train.max_seq_length", "64"]
    with pytest.raises(DoesNotFit) as refused:
        run([*words, "--train.micro_batch_size", "1", "--train.global_batch_size", "1"])
    text = str(refused.value)
    assert "at least 84.1 GiB" in text and "of host memory for each rank" in text
    assert "QLoRA: ftkit finetune model" in text, "which fits"
    assert [path.name for path in tmp_path.iterdir()] == ["model"], "nothing is left behind"


@pytest.mark.slow
def test_force_starts_a_run_on_cpus_that_is_predicted_not_to_fit(
    gpu: Gpu24GiB, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, common: list[str]
) -> None:
    monkeypatch.setattr(gpus, "host_limit", lambda ranks: HostLimit(2**18, 0))
    monkeypatch.setattr(gpus, "available_host_bytes", lambda ranks: 2**18)
    words = ["finetune", *common, "--train.max_steps", "1", "--out_dir", str(tmp_path / "out")]
    with pytest.raises(DoesNotFit, match=r"but each has 0.2 MiB"):
        run(words)
    assert not list(tmp_path.iterdir())
    assert run([*words, "--force"]) == 0


@pytest.mark.parametrize(("devices", "gib"), [("1", 80), ("2", 24), ("auto", 8)])
def test_the_memory_is_that_of_the_smallest_gpu_that_is_used(
    gpu: Gpu24GiB, monkeypatch: pytest.MonkeyPatch, devices: str, gib: int
) -> None:
    sizes = (80 * 2**30, 24 * 2**30, 8 * 2**30)
    three = dataclasses.replace(CUDA, count=3, memory_bytes=sizes)
    gpu.answer["fits"] = True
    require_room(recipe(devices=devices), three, COMMAND)
    assert gpu.memory_bytes == gib * 2**30
    half = [size // 2 for size in sizes]
    monkeypatch.setattr(gpus, "free_bytes", lambda count, kind: half[:count])
    preflight.with_micro_batch(recipe(devices=devices, train__micro_batch_size="auto"), three)
    assert gpu.memory_bytes == gib * 2**29


def test_gpus_of_unknown_memory_refuse_nothing(gpu: Gpu24GiB) -> None:
    require_room(recipe(), dataclasses.replace(CUDA, memory_bytes=()), COMMAND)
    assert gpu.plans == 0


def test_auto_takes_the_planned_micro_batch_and_shows_its_assumption(
    gpu: Gpu24GiB, capsys: pytest.CaptureFixture[str]
) -> None:
    gpu.answer |= {"fits": True, "length_source": "assumed", "length": "2,048 tokens assumed"}
    requested = recipe(train__micro_batch_size="auto", accelerator="cpu")
    found = preflight.with_micro_batch(requested, Devices(accelerator="cpu", count=2))
    assert found.train.micro_batch_size == 4
    said = "train.micro_batch_size is 4; sequences: 2,048 tokens assumed\n"
    assert capsys.readouterr().out == said
    given = dataclasses.replace(
        requested, train=dataclasses.replace(requested.train, micro_batch_size=2)
    )
    assert preflight.with_micro_batch(given, CUDA) == given


OPEN = {"train__micro_batch_size": "null"}
USUAL = MicroBatch(sequences=16, tokens=8192, source="usual")


def test_open_micro_batches_are_as_usual_where_the_device_is_not_known(gpu: Gpu24GiB) -> None:
    unknown = dataclasses.replace(CUDA, memory_bytes=())
    assert require_room(recipe(**OPEN), unknown, COMMAND) == USUAL
    assert require_room(recipe(), unknown, COMMAND) is None
    assert gpu.plans == 0


@pytest.mark.parametrize("force", [False, True])
def test_open_micro_batches_are_as_large_as_fits_in_all_the_memory_of_the_device(
    gpu: Gpu24GiB, monkeypatch: pytest.MonkeyPatch, force: bool
) -> None:
    monkeypatch.setattr(gpus, "free_bytes", lambda *_: pytest.fail("what is free changes"))
    large = recipe(checkpoint_dir="random:Llama-2-7b-hf", **OPEN)
    gpu.answer |= {"fits": not force, "micro_batch_tokens": 1280, "high_bytes": 2**30}
    smaller = dataclasses.replace(USUAL, tokens=1280, source="memory")
    assert require_room(large, CUDA, COMMAND, force=force) == smaller
    assert gpu.memory_bytes == 24 * 2**30
    gpu.answer |= {"fits": True, "micro_batch_tokens": 8192}
    assert require_room(large, CUDA, COMMAND) == USUAL


@pytest.mark.slow
def test_a_plan_takes_the_largest_open_micro_batch_that_fits(tmp_path: Path) -> None:
    file = tmp_path / "recipe.yaml"
    keys = {"data": "Alpaca", "train__max_seq_length": "512", "precision": "bf16-true"}
    file.write_text(to_yaml(recipe(**OPEN | keys)))
    roomy = Gpu(name="roomy", memory_bytes=2**40)
    usual = plan_files([file], gpu=roomy)
    assert usual.plan.chosen == USUAL
    one = plan_files([file], [("train.micro_batch_tokens", "511")], gpu=roomy)
    small = Gpu(name="small", memory_bytes=(usual.high_bytes + one.high_bytes) // 2)
    smaller = plan_files([file], gpu=small)
    assert smaller.fits and smaller.plan.chosen is not None
    tokens = smaller.plan.micro_batch_tokens
    assert smaller.plan.chosen.source == "memory" and tokens is not None and 511 < tokens < 8192
    # A little more would not.
    more = [("train.micro_batch_tokens", str(tokens + 256))]
    assert not plan_files([file], more, gpu=small).fits
    least = plan_files([file], gpu=Gpu(name="tiny", memory_bytes=2**20))
    assert (least.fits, least.plan.micro_batch_tokens) == (False, 511)


def test_a_shortage_halves_a_micro_batch() -> None:
    half = USUAL.half
    assert half == dataclasses.replace(USUAL, tokens=4096, source="memory", halved=1)
    four = MicroBatch(sequences=4, tokens=None, source="checkpoint")
    assert four.half == dataclasses.replace(four, sequences=2, source="memory", halved=1)
    assert dataclasses.replace(four, sequences=1).half is None


@pytest.mark.parametrize("quiet", [False, True])
@pytest.mark.parametrize("place", ["auto", "too large"])
def test_a_prediction_before_a_run_shows_progress(
    gpu: Gpu24GiB,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    place: str,
    quiet: bool,
) -> None:
    gpu.answer |= {"fits": True}
    monkeypatch.setattr(progress, "LATE_S", 0.0)
    monkeypatch.setattr(progress, "_verbosity", "quiet" if quiet else "full")
    shown: list[str] = []

    def ask(*words: Any, **more: Any) -> dict[str, Any]:
        deadline = time.monotonic() + 10
        while not quiet and not shown:
            assert time.monotonic() < deadline, "nothing was shown"
            shown.extend(capsys.readouterr().err.splitlines())
        return gpu.ask(*words, **more)

    monkeypatch.setattr(preflight, "check", ask)
    if place == "auto":
        requested = recipe(train__micro_batch_size="auto", accelerator="cpu")
        preflight.with_micro_batch(requested, Devices(accelerator="cpu", count=2))
    else:
        require_room(recipe(checkpoint_dir="random:Llama-2-7b-hf"), CUDA, COMMAND)
    assert gpu.plans == 1
    assert shown == ([] if quiet else ["predicting memory ..."])
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("size", ["auto", "4", "null"])
def test_auto_takes_the_planned_tokens_whatever_bounds_the_sequences(
    gpu: Gpu24GiB, size: str
) -> None:
    gpu.answer |= {"fits": True, "micro_batch_tokens": 6144}
    requested = recipe(
        train__micro_batch_tokens="auto", train__micro_batch_size=size, accelerator="cpu"
    )
    found = preflight.with_micro_batch(requested, Devices(accelerator="cpu", count=2))
    assert found.train == dataclasses.replace(requested.train, micro_batch_tokens=6144)
    assert preflight.with_micro_batch(found, CUDA) == found


@pytest.mark.parametrize("key", ["micro_batch_size", "micro_batch_tokens"])
def test_auto_is_refused_where_not_even_one_sequence_fits(gpu: Gpu24GiB, key: str) -> None:
    requested = recipe(**{f"train__{key}": "auto"}, accelerator="cpu")
    with pytest.raises(DoesNotFit, match=key_words(f"{key} is auto ... 40.0 GiB")):
        preflight.with_micro_batch(requested, Devices(accelerator="cpu", count=2))


@pytest.mark.slow
def test_more_ranks_and_offload_are_not_advised_where_all_is_host_memory(tmp_path: Path) -> None:
    file = tmp_path / "recipe.yaml"
    file.write_text(to_yaml(recipe(accelerator="cpu", precision="32-true")))
    found: Any = check(str(file), Gpu(name=HOST, memory_bytes=2**40), failed=True)
    assert found["changes"] and all(change["fits"] for change in found["changes"])
    assert not any("strategy" in dict(change["overrides"]) for change in found["changes"])


@pytest.mark.parametrize("fast", [True, False])
def test_bfloat16_is_the_last_advice_where_a_cpu_emulates_it(fast: bool, tmp_path: Path) -> None:
    file = tmp_path / "recipe.yaml"
    file.write_text(to_yaml(recipe(accelerator="cpu", precision="32-true")))
    device = Gpu(name=HOST, memory_bytes=2**20, bf16=fast)
    tried: list[object] = []

    def attempt(changed: Sequence[Override]) -> Planned:
        tried.append(dict(changed).get("precision"))
        raise UserError("refused")

    assert changes_that_fit(plan_files([file], gpu=device), attempt) == []
    single = tried[: tried.index("bf16-true") + 1]
    assert (len(single) == 1) == fast
    assert set(tried) == {None, "bf16-true"}


@pytest.mark.parametrize("fast", [True, False])
def test_a_check_plans_in_the_precision_of_its_cpu(
    fast: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    devices = Devices(accelerator="cpu", count=2, bf16_native=fast)
    asked: list[Gpu] = []

    def note(_: Recipe, __: Devices, device: Gpu, ___: MicroBatch | None) -> dict[str, Any]:
        asked.append(device)
        return {}

    monkeypatch.setattr(preflight, "_check_shown", note)
    require_room(recipe(accelerator="cpu"), devices, COMMAND)
    asked.append(gpus.free_here(1, devices))
    assert len(asked) == 2
    file = tmp_path / "recipe.yaml"
    file.write_text(to_yaml(recipe(accelerator="cpu")))
    for device in asked:
        precision = plan_files([file], gpu=device).plan.precision
        assert precision == ("bf16-mixed" if fast else "32-true")


def test_the_kernels_count_of_processes_killed_for_memory_is_read(tmp_path: Path) -> None:
    file = tmp_path / "vmstat"
    file.write_text("pgfault 12\noom_kill 3\n")
    assert processes_killed_for_memory(file) == 3
    assert processes_killed_for_memory(tmp_path / "none") is None


@pytest.mark.matrix
def test_the_check_finds_the_largest_micro_batch_for_the_memory(tmp_path: Path) -> None:
    """Which a smaller one need not be: sums of gradients are kept between micro-steps."""
    file = tmp_path / "recipe.yaml"

    def checked(size: object, memory_bytes: int = 2**40) -> Any:
        file.write_text(to_yaml(recipe(train__micro_batch_size=str(size), accelerator="cpu")))
        return check(str(file), Gpu(name=HOST, memory_bytes=memory_bytes))

    needed = {size: checked(size)["high_bytes"] for size in (16, 8, 4)}
    assert checked("auto")["micro_batch_size"] == 16
    memory = needed[16] - 2**20
    largest = max(size for size, bytes_ in needed.items() if bytes_ <= memory)
    scarce = checked("auto", memory)
    assert scarce["fits"] is True and scarce["micro_batch_size"] == largest < 16


@pytest.mark.matrix
def test_the_check_fills_the_memory_with_tokens(tmp_path: Path) -> None:
    file = tmp_path / "recipe.yaml"
    file.write_text(to_yaml(recipe(train__micro_batch_tokens="auto", accelerator="cpu")))
    plenty: Any = check(str(file), Gpu(name=HOST, memory_bytes=2**40))
    assert plenty["fits"] is True
    assert plenty["micro_batch_tokens"] == 16 * 63, "all of a step"
    scarce: Any = check(str(file), Gpu(name=HOST, memory_bytes=plenty["high_bytes"] - 2**20))
    assert scarce["fits"] is True
    assert scarce["micro_batch_tokens"] in (640, 768, 896)
    more = recipe(train__micro_batch_tokens=str(scarce["micro_batch_tokens"] + 128))
    file.write_text(to_yaml(dataclasses.replace(more, accelerator="cpu")))
    too_much: Any = check(str(file), Gpu(name=HOST, memory_bytes=plenty["high_bytes"] - 2**20))
    assert too_much["fits"] is not True
