"""Recipe files and overrides: each gives its settings, and mistakes are named."""

import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from command import ROOT
from messages import key_words, message_of, says

from ftkit.errors import UserError
from ftkit.recipe.parsing import from_dict, read_keys, read_recipe, to_dict, to_yaml, with_overrides
from ftkit.recipe.recipe import LAYER_SWITCHES, LoraRecipe, Method, Recipe
from ftkit.recipe.recipe_keys import key_types

RECIPES = ROOT / "recipes"
FILES = sorted(path for path in RECIPES.rglob("*.yaml") if path.parent.name != "sweeps")

LITGPT_RECIPE = """
checkpoint_dir: checkpoints/meta-llama/Llama-2-7b-hf
out_dir: out/finetune/qlora-llama2-7b
precision: bf16-true
quantize:
devices: 1
num_nodes: 1
lora_r: 32
lora_alpha: 16
lora_dropout: 0.05
lora_query: true
lora_key: false
lora_value: true
lora_projection: false
lora_mlp: false
lora_head: false
data:
  class_path: litgpt.data.Alpaca2k
  init_args:
    mask_prompt: false
    val_split_fraction: 0.05
    prompt_style: alpaca
    ignore_index: -100
    seed: 42
    num_workers: 4
train:
  save_interval: 200
  log_interval: 1
  global_batch_size: 8
  micro_batch_size: 2
  lr_warmup_steps: 10
  epochs: 4
  max_tokens:
  max_steps:
  max_seq_length: 512
  tie_embeddings:
  max_norm:
  min_lr: 6.0e-5
eval:
  interval: 100
  max_new_tokens: 100
  max_iters: 100
  initial_validation: false
  final_validation: true
logger_name: csv
seed: 1337
optimizer:
  class_path: torch.optim.AdamW
  init_args:
    lr: 0.0002
    weight_decay: 0.0
    betas:
      - 0.9
      - 0.95
"""


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def options(line: str) -> list[tuple[str, str]]:
    """`--key value` pairs as overrides, words as the shell splits them."""
    words = shlex.split(line)
    keys = [word.removeprefix("--") for word in words[::2]]
    return list(zip(keys, words[1::2], strict=True))


def read(*files: Path, line: str = "", method: Method | None = "lora") -> Recipe:
    return read_recipe(files, [("checkpoint_dir", "base"), *options(line)], method=method)


@pytest.fixture(scope="module")
def default() -> Recipe:
    """A recipe without keys."""
    return read()


def value_of(recipe: Recipe, key: str) -> Any:
    value: Any = to_dict(recipe)
    for part in key.split("."):
        value = value[part]
    return value


def refusal(*files: Path, line: str = "", method: Method | None = "lora") -> str:
    return message_of(read, *files, line=line, method=method)


# --- Recipes ------------------------------------------------------------------------------------

TINY = "TinyLlama/TinyLlama-1.1B-intermediate-step-1431k-3T"
FULL = {"precision": "32-true", "train.global_batch_size": 16, "train.micro_batch_size": 16}
LORA = {
    "precision": "bf16-true",
    "train.global_batch_size": 16,
    "train.micro_batch_size": 4,
    "train.lr_warmup_steps": 10,
    "lora_r": 32,
    "lora_alpha": 16,
    "lora_dropout": 0.05,
    **dict.fromkeys(LAYER_SWITCHES, True),
}
SGD = {"class_path": "torch.optim.SGD", "init_args": {}}


def batches(global_batch_size: int, micro_batch_size: int) -> str:
    return (
        f" --train.global_batch_size {global_batch_size}"
        f" --train.micro_batch_size {micro_batch_size}"
    )


EXPERIMENTS: list[tuple[Method, str, str, dict[str, Any]]] = [
    ("full", "tiny-llama-full", "", FULL | {"train.lr_warmup_steps": 100}),
    ("full", "tiny-llama-full", batches(32, 32), {"train.global_batch_size": 32}),
    ("full", "tiny-llama-full", batches(8, 8), {"train.micro_batch_size": 8}),
    ("full", "tiny-llama-full", batches(32, 8), {"train.micro_batch_size": 8}),
    ("full", "tiny-llama-full", "--precision bf16-true", {"precision": "bf16-true"}),
    ("full", "tiny-llama-full", "--precision bf16-mixed", {"precision": "bf16-mixed"}),
    ("full", "open-llama-3b-full", batches(32, 8), {"train.global_batch_size": 32}),
    ("full", "open-llama-7b-full", batches(16, 4), {"train.micro_batch_size": 4}),
    ("full", "open-llama-13b-full", batches(1, 1), {"train.global_batch_size": 1}),
    (
        "full",
        "open-llama-13b-full",
        "--optimizer SGD --train.max_steps 25",
        {"optimizer": SGD, "train.max_steps": 25},
    ),
    ("lora", "tiny-llama-lora", "", LORA | {"checkpoint_dir": f"checkpoints/{TINY}"}),
    ("lora", "open-llama-3b-lora", "", LORA),
    ("lora", "open-llama-7b-lora", "", LORA),
    ("lora", "open-llama-7b-lora", "--quantize bnb.nf4", LORA | {"quantize": "bnb.nf4"}),
    ("lora", "open-llama-13b-lora", "", LORA),
]


@pytest.mark.parametrize(
    ("method", "name", "line", "expected"),
    EXPERIMENTS,
    ids=[f"{name} {line}".strip() for _, name, line, _ in EXPERIMENTS],
)
def test_the_commands_of_the_tutorial_parse_to_their_settings(
    method: Method, name: str, line: str, expected: dict[str, Any]
) -> None:
    recipe = read_recipe([RECIPES / f"{name}.yaml"], options(line), method=method)
    common = {
        "data.class_path": "litgpt.data.Alpaca2k",
        "data.init_args.val_split_fraction": 0.5,
        "train.max_seq_length": 512,
        "train.min_lr": 6e-5,
        "eval.interval": 25,
        "eval.final_validation": False,
        "seed": 1337,
    }
    if "optimizer" not in expected:
        common["optimizer.init_args"] = {"lr": 2e-4, "weight_decay": 0.0, "betas": [0.9, 0.95]}
    assert recipe.method == method
    assert {key: value_of(recipe, key) for key in common | expected} == common | expected


MULTI_GPU = {
    "a100-7b-1device": (1, "auto", 4, 4, 0.2),
    "a100-7b-4ddp": (4, "ddp", 16, 4, 0.2),
    "a100-7b-4fsdp": (4, "fsdp", 16, 4, 0.2),
    "a100-7b-4fsdp-8batch": (4, "fsdp", 32, 8, 0.2),
    "a100-13b-deepspeed": (4, "deepspeed", 64, 4, 0.2),
    "v100-tiny-1device": (1, "auto", 32, 8, 0.5),
    "v100-tiny-4ddp": (4, "ddp", 128, 8, 0.5),
    "v100-tiny-4fsdp": (4, "fsdp", 128, 8, 0.5),
    "v100-3b-1device": (1, "auto", 1, 1, 0.9),
    "v100-3b-4fsdp": (4, "fsdp", 4, 1, 0.9),
}


@pytest.mark.extensions
@pytest.mark.parametrize("name", MULTI_GPU)
def test_the_multi_gpu_experiments_parse_to_their_settings(name: str) -> None:
    recipe = read_recipe([RECIPES / "multi_gpu" / f"{name}.yaml"])
    assert (
        recipe.devices,
        recipe.strategy["class_path"],
        recipe.train.global_batch_size,
        recipe.train.micro_batch_size,
        recipe.data["init_args"]["val_split_fraction"],
    ) == MULTI_GPU[name]
    assert (recipe.method, recipe.precision, recipe.checkpoint.save) == ("full", "bf16-true", False)
    assert recipe.eval.interval == 0


def test_every_multi_gpu_recipe_is_in_the_table() -> None:
    assert {file.stem for file in (RECIPES / "multi_gpu").iterdir()} == MULTI_GPU.keys()


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(RECIPES)))
class TestEveryRecipe:
    @pytest.mark.extensions
    def test_is_of_the_method_its_keys_say(self, file: Path) -> None:
        assert read_recipe([file]).method == ("lora" if "lora_r" in file.read_text() else "full")

    @pytest.mark.extensions
    def test_survives_json_and_yaml(self, file: Path, tmp_path: Path) -> None:
        recipe = read_recipe([file])
        assert from_dict(to_dict(recipe), recipe.method) == recipe
        copy = write(tmp_path / "copy.yaml", to_yaml(recipe))
        assert read_recipe([copy], method=recipe.method) == recipe
        assert read_recipe([copy]) == recipe


def test_a_recipe_of_litgpt_with_empty_keys_is_accepted(tmp_path: Path) -> None:
    recipe = read_recipe([write(tmp_path / "lora.yaml", LITGPT_RECIPE)])
    assert isinstance(recipe, LoraRecipe)
    assert (recipe.quantize, recipe.lora_r, recipe.train.max_tokens) == (None, 32, None)


@pytest.mark.parametrize("key", [key for key in key_types("lora") if key != "checkpoint_dir"])
def test_an_empty_key_never_breaks_a_recipe(key: str, default: Recipe, tmp_path: Path) -> None:
    group, _, name = key.rpartition(".")
    text = f"{group}:\n  {name}:\n" if group else f"{key}:\n"
    assert value_of(read(write(tmp_path / "r.yaml", text)), key) in (None, value_of(default, key))


@pytest.mark.parametrize("group", ["train", "eval", "log", "checkpoint", "data", "optimizer"])
def test_an_empty_group_means_its_defaults(group: str, default: Recipe, tmp_path: Path) -> None:
    assert read(write(tmp_path / "r.yaml", f"{group}:\n")) == default


def test_an_empty_group_can_be_filled_by_an_override(tmp_path: Path) -> None:
    recipe = read(write(tmp_path / "r.yaml", "train:\n"), line="--train.epochs 2")
    assert recipe.train.epochs == 2


# --- Merging ------------------------------------------------------------------------------------


def test_overrides_win_over_files_and_later_files_over_earlier_ones(tmp_path: Path) -> None:
    one = write(tmp_path / "1.yaml", "seed: 1\ntrain: {epochs: 1, max_steps: 1, min_lr: 0.1}\n")
    two = write(tmp_path / "2.yaml", "train: {epochs: 2, max_steps: 2}\n")
    recipe = read(one, two, line="--train.max_steps 3")
    assert (recipe.seed, recipe.train.epochs, recipe.train.max_steps) == (1, 2, 3)
    assert recipe.train.min_lr == 0.1


@pytest.mark.parametrize(
    "line",
    [
        "--data JSON --data.json_path p",
        "--data JSON --data.json_path p --data.num_workers 0",
        "--data.class_path JSON --data.init_args.json_path p",
        "--strategy fsdp --strategy.cpu_offload true",
        "--strategy deepspeed --strategy.stage 3 --strategy.offload_optimizer true",
        "--optimizer SGD --optimizer.lr 0.1 --optimizer.momentum 0.9",
        "--optimizer.lr 2e-4 --data.num_workers 0 --seed 3 --train.epochs 2",
        "--train '{epochs: 2}' --train.max_steps 3",
    ],
)
def test_the_order_of_options_never_matters(line: str, tmp_path: Path) -> None:
    file = write(tmp_path / "r.yaml", LITGPT_RECIPE)
    recipe = read_recipe([file], options(line))
    assert read_recipe([file], options(line)[::-1]) == recipe
    assert recipe != read_recipe([file])


def test_of_one_option_given_twice_the_last_one_counts() -> None:
    assert read(line="--seed 1 --seed 2").seed == 2
    assert read(line="--data.json_path 1 --data JSON --data.json_path 2").data["init_args"] == {
        "json_path": "2"
    }


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("lr_warmup_steps", "lr_warmup_fraction"),
        ("lr_warmup_fraction", "lr_warmup_steps"),
        ("lr_warmup_fraction", "lr_warmup_run_fraction"),
        ("save_interval", "save_interval_epochs"),
    ],
)
def test_the_other_way_to_set_a_number_of_steps_replaces_the_first(
    first: str, second: str, tmp_path: Path
) -> None:
    file = write(tmp_path / "r.yaml", f"train: {{{first}: 1}}\n")
    train = read(file, line=f"--train.{second} 1").train
    assert (getattr(train, first), getattr(train, second)) == (None, 1)


# --- Values -------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["2e-4", "2E-4", "2.0e-4", "0.0002", ".2e-3"])
def test_a_number_is_a_number_in_files_and_in_overrides(text: str, tmp_path: Path) -> None:
    file = write(
        tmp_path / "r.yaml",
        f"train: {{min_lr: {text}}}\noptimizer: {{init_args: {{lr: {text}}}}}\n",
    )
    for recipe in (read(file), read(line=f"--train.min_lr {text} --optimizer.lr {text}")):
        assert recipe.train.min_lr == 2e-4
        assert recipe.optimizer["init_args"] == {"lr": 2e-4}


@pytest.mark.parametrize("text", ["123", "2e-4", "true", "2026-11-20", "[a]", "x: y", "- b"])
@pytest.mark.parametrize("key", ["log.run", "out_dir", "checkpoint_dir"])
def test_where_text_is_wanted_any_word_on_the_command_line_is_text(key: str, text: str) -> None:
    recipe = read_recipe([], [("checkpoint_dir", "b"), (key, text)])
    assert value_of(recipe, key) == text


@pytest.mark.parametrize("text", ["123", "2e-4", "true", "2026-11-20", "0x1f", "é"])
def test_text_stays_text_through_yaml(text: str, tmp_path: Path) -> None:
    recipe = read_recipe([], [("checkpoint_dir", "b"), ("log.run", f"'{text}'")])
    assert recipe.log.run == text
    assert read_recipe([write(tmp_path / "r.yaml", to_yaml(recipe))], method="full") == recipe


def test_dates_are_text(tmp_path: Path) -> None:
    assert read(write(tmp_path / "r.yaml", "log: {run: 2026-11-20}\n")).log.run == "2026-11-20"


def test_values_of_yaml_anchors_are_merged(tmp_path: Path) -> None:
    text = (
        "data: {init_args: &a {seed: 1, num_workers: 2}}\noptimizer: {init_args: {<<: *a, lr: 3}}"
    )
    recipe = read(write(tmp_path / "r.yaml", text))
    assert recipe.optimizer["init_args"] == {"seed": 1, "num_workers": 2, "lr": 3}


@pytest.mark.parametrize(
    ("method", "text", "expected"),
    [
        (None, "seed: 1", "full"),
        (None, "lora_r: 4", "lora"),
        (None, "quantize: bnb.nf4", "lora"),
        ("lora", "seed: 1", "lora"),
        ("full", "seed: 1", "full"),
    ],
)
def test_the_method_is_that_of_the_command_or_else_that_of_the_keys(
    method: str | None, text: str, expected: str, tmp_path: Path
) -> None:
    assert read(write(tmp_path / "r.yaml", text), method=method).method == expected


@pytest.mark.parametrize("key", ["access_token", "data.access_token"])
def test_no_access_token_is_ever_written_or_lost_meanwhile(key: str) -> None:
    recipe = read(line=f"--data LIMA --{key} my-secret")
    assert recipe.data_token == "my-secret"
    assert "my-secret" not in to_yaml(recipe) + repr(to_dict(recipe))
    assert with_overrides(recipe, [("seed", "3")]).data_token == "my-secret"


def test_data_are_read_with_a_token_of_their_own_before_that_of_the_run() -> None:
    recipe = read(line="--data LIMA --access_token of-run --data.access_token of-data")
    assert recipe.data_token == "of-data"
    assert read(line="--data LIMA").data_token is None


def test_a_recorded_recipe_is_read_as_it_stands_whatever_version_wrote_it(tmp_path: Path) -> None:
    file = tmp_path / "recipe.yaml"
    file.write_text("later: {key: 2e-4}\ndata: {class_path: x.Y, init_args: {z: [1], e: {}}}\n")
    expected = {"later.key": 2e-4, "data.class_path": "x.Y", "data.init_args.z": [1]}
    assert read_keys(file) == expected
    file.write_text("seed: 1\nseed: 2\n")
    with pytest.raises(UserError, match=key_words(f"{file} ... YAML ... 'seed' ... twice")):
        read_keys(file)


# --- Mistakes -----------------------------------------------------------------------------------


@pytest.mark.extensions
@pytest.mark.parametrize(
    ("line", "nearest"),
    [
        ("--train.epoch 3", "train.epochs"),
        ("--device 3", "devices"),
        ("--micro_batch_size 3", "train.micro_batch_size"),
        ("--max_steps 3", "train.max_steps"),
        ("--epoch 3", "train.epochs"),
        ("--train.micro_batchsize 3", "train.micro_batch_size"),
        ("--trian.epochs 3", "train.epochs"),
        ("--lora_rank 3", "lora_r"),
        ("--train.lr_decay 0.2", "train.lr_decay_fraction"),
        ("--train.neftune 5", "train.neftune_noise_alpha"),
        ("--eval.intervall 3", "eval.interval"),
        ("--seed.x 3", "seed"),
        ("--lr 3", "optimizer.lr"),
        ("--learning_rate 3", "optimizer.lr"),
        ("--train.learning_rate 3", "optimizer.lr"),
        ("--output_dir x", "out_dir"),
        ("--model_name x", "checkpoint_dir"),
    ],
)
def test_an_unknown_key_names_the_nearest_one_in_full(line: str, nearest: str) -> None:
    key = line.split()[0].removeprefix("--")
    assert says(refusal(line=line), f"{key} ... Did you mean {nearest}")


@pytest.mark.parametrize("key", ["metric", "eval.metric"])
def test_a_recipe_that_names_a_file_to_execute_is_refused_with_the_reason(key: str) -> None:
    said = refusal(line=f"--{key} mine.py:score")
    assert says(said, f"{key} ... executed")
    assert says(said, "Remove ... --metric FILE.py:FUNCTION")


def test_a_key_without_a_similar_one_points_to_the_help() -> None:
    assert "See ftkit finetune --help" in refusal(line="--xyzzy 3")


@pytest.mark.extensions
@pytest.mark.parametrize(
    ("line", "message"),
    [
        (
            "--train.micro_batch_size four",
            "train.micro_batch_size is 'four' ... whole number or 'auto' ... Try",
        ),
        ("--train.epochs 1.5", "train.epochs is 1.5 ... whole number"),
        ("--train.epochs true", "train.epochs is true ... whole number"),
        ("--train.min_lr low", "train.min_lr is 'low' ... number"),
        ("--lora_query 1", "lora_query is 1 ... true or false ... --lora_query true"),
        ("--devices two", "devices is 'two' ... whole number or 'auto'"),
        ("--precision 32", "precision is 32 ... 32-true, bf16-true"),
        ("--precision bf16", "Try --precision bf16-true."),
        ("--quantize nf4", "Try --quantize bnb.nf4."),
        ("--logger_name tensorbord", "Try --logger_name tensorboard."),
        ("--logger_name [csv,mlfow]", "or a list of them. Try --logger_name '[csv, mlflow]'."),
        ("--train.max_norm big", "Try --train.max_norm 1.0."),
        ("--train 5", "train is 5 ... --train.global_batch_size 16"),
        ("--data [a]", "data is ['a'] ... mapping"),
        ("--data {a", "--data '{a' is not valid YAML or JSON."),
        ("--data.prompt_style p --data.prompt_style.x 1", "prompt_style is 'p', a single value."),
        ("--optimizer.class_path 3", "optimizer ... class_path (text) and init_args"),
    ],
)
def test_a_wrong_value_names_key_value_rule_and_a_change(line: str, message: str) -> None:
    text = refusal(line=line)
    assert says(text, message)
    assert "Try --" in text or "remove" in text.lower() or "Check" in text


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("auto", "auto"),
        ("true", True),
        ("false", False),
        ("null", False),
        ("1500", 1500),
        ("1", 1),
        ("out/x", "out/x"),
        ("gs://bucket/x", "gs://bucket/x"),
    ],
)
def test_resume_is_a_word_a_step_or_a_path(text: str, value: str | int) -> None:
    resume = read_recipe([], [("checkpoint_dir", "b"), ("resume", text)]).resume
    assert resume == value and type(resume) is type(value)


@pytest.mark.parametrize("key", [key for key in key_types("lora") if key not in ("resume",)])
def test_the_suggested_change_works(key: str) -> None:
    def attempt(value: str) -> str | None:
        try:
            read_recipe([], [("checkpoint_dir", "b"), (key, value)], method="lora")
        except UserError as error:
            return str(error)
        return None

    message = attempt("{{[")
    if message and "Try --" in message:
        suggested = message.rpartition("Try ")[2].removesuffix(".").split()
        assert suggested[0] == f"--{key}"
        assert attempt(suggested[1]) is None


def test_a_number_in_a_file_is_not_taken_for_text(tmp_path: Path) -> None:
    message = refusal(write(tmp_path / "r.yaml", "log: {run: 123}\n"))
    assert says(message, "log.run is 123 ... text ... --log.run 123")


def test_a_base_model_is_required() -> None:
    with pytest.raises(UserError, match=key_words("checkpoint_dir ... Try --checkpoint_dir")):
        read_recipe([])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("seed: 1\nseed: 2\n", "the key 'seed' appears twice"),
        ("train: {epochs: 1, epochs: 2}\n", "the key 'epochs' appears twice"),
        ("? [a]\n: 1\n", "a key must be a single word"),
        ("seed: [\n", "is not valid YAML"),
        ("seed: \x00\n", "is not valid YAML"),
        ("seed: !!python/object/apply:os.getcwd []\n", "is not valid YAML"),
        ("- seed\n", "must hold keys and values"),
        ("", "must hold keys and values"),
        ("1: 2\n", "1 is not a key of a recipe."),
    ],
)
def test_a_file_without_a_recipe_is_refused(text: str, message: str, tmp_path: Path) -> None:
    assert message in refusal(write(tmp_path / "r.yaml", text))


def test_a_missing_file_names_a_similar_one(tmp_path: Path) -> None:
    there = write(tmp_path / "tiny-llama-lora.yaml", "seed: 1")
    message = refusal(tmp_path / "tiny-lama-lora.yaml")
    assert says(message, f"Did you mean {there}")


def test_a_missing_file_without_a_similar_one_says_where_to_look(tmp_path: Path) -> None:
    assert "Check the path" in refusal(tmp_path / "none.yaml")


def test_a_directory_as_a_recipe_is_refused(tmp_path: Path) -> None:
    assert "is not a regular file" in refusal(tmp_path)


@pytest.mark.parametrize("key", ["lora_r", "lora_query", "quantize"])
def test_keys_of_lora_do_not_belong_to_full_fine_tuning(key: str) -> None:
    value = {"lora_r": "4", "lora_query": "true", "quantize": "bnb.nf4"}[key]
    message = refusal(line=f"--{key} {value}", method="full")
    assert says(message, f"{key} ... full fine-tuning")
    assert "Use ftkit finetune instead" in message


@pytest.mark.parametrize("field", ["data", "optimizer"])
@pytest.mark.parametrize(
    "class_path",
    ["os.system", "trap.Trap", "litgpt.data.base.trap", "torch.optim.lr_scheduler.LambdaLR",
     "litgpt.data.x-y", "builtins.exec", "torch.optim."],
)  # fmt: skip
def test_a_class_outside_the_allowed_packages_is_refused(field: str, class_path: str) -> None:
    message = refusal(line=f"--{field}.class_path {class_path}")
    assert says(message, f"{field}.class_path is {class_path!r}")
    assert "Try --" in message


def test_a_refused_class_is_never_imported(tmp_path: Path) -> None:
    sign = tmp_path / "imported"
    write(tmp_path / "trap.py", f"open({str(sign)!r}, 'w')\nclass Trap: pass\n")
    write(tmp_path / "r.yaml", "checkpoint_dir: b\ndata: {class_path: trap.Trap}\n")
    program = (
        f"import sys; sys.path[:0] = [{str(ROOT)!r}, {str(tmp_path)!r}]\n"
        "from ftkit.errors import UserError\n"
        "from ftkit.recipe.parsing import read_recipe\n"
        "for files, pairs in ((['r.yaml'], []), ([], [('checkpoint_dir', 'trap.Trap'),\n"
        "        ('optimizer', 'trap.Trap')]), ([], [('checkpoint_dir', 'b'), \n"
        "        ('data', '{class_path: litgpt.data.JSON, init_args: {x: trap.Trap}}')])):\n"
        "    try: read_recipe(files, pairs)\n"
        "    except UserError as error: print(error)\n"
        "assert 'trap' not in sys.modules\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True
    )
    assert (run.returncode, run.stderr) == (0, "")
    assert run.stdout.count("recipes may only name classes") == 2
    assert not sign.exists()


@pytest.mark.parametrize(
    ("options", "sets"),
    [
        ([("eval.sets.b", "b.json")], {"a": "a.json", "b": "b.json"}),
        ([("eval.sets", "{b: b.json}")], {"b": "b.json"}),
        ([("eval.sets.b", "b.json"), ("eval.sets", "null")], {"b": "b.json"}),
        ([("eval.sets", "null")], None),
        ([("eval.sets.a.path", "b.json")], {"a": {"path": "b.json"}}),
        ([("eval.sets.a.split", "test")], {"a": {"path": "a.json", "split": "test"}}),
        (
            [("eval.sets.a", "{path: b.json, columns: {text: t}}")],
            {"a": {"path": "b.json", "columns": {"text": "t"}}},
        ),
    ],
)
def test_sets_to_validate_on_are_given_together_or_one_by_one(
    tmp_path: Path, options: list[tuple[str, str]], sets: dict[str, Any] | None
) -> None:
    file = tmp_path / "recipe.yaml"
    file.write_text("checkpoint_dir: x\neval:\n  sets:\n    a: a.json\n")
    recipe = read_recipe([file], options)
    assert recipe.eval.sets == sets
    assert from_dict(to_dict(recipe), recipe.method) == recipe


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[a.json]", "names with a file ... --eval.sets '{code: code.jsonl}'"),
        ("a.json", "eval.sets is 'a.json' ... names with a file"),
        ("{a: a.json, a: b.json}", "not valid ... 'a' ... twice"),
    ],
)
def test_sets_that_have_no_names_are_refused(text: str, message: str) -> None:
    with pytest.raises(UserError, match=key_words(message)):
        read_recipe([], [("checkpoint_dir", "x"), ("eval.sets", text)])
