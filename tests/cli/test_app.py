"""The command line: help, mistakes, completion, and how little it imports."""

import dataclasses
import functools
import importlib
import json
import re
import shlex
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import litgpt.data  # noqa: F401 (libraries set environment variables)
import pytest
from command import NO_TORCH, ROOT, Command
from command_table import COMMANDS
from messages import says

from ftkit import __version__
from ftkit.cli.app import main
from ftkit.cli.commands import FTKIT
from ftkit.cli.parser import components_of, declared, heads_of, parse, split_line
from ftkit.data.own_data import OwnDataOptions
from ftkit.recipe.parsing import read_recipe
from ftkit.recipe.recipe_keys import COMPONENTS, key_types
from ftkit.recipe.strategy_rows import STRATEGIES

RECIPES = ROOT / "recipes"
FINETUNE = ["finetune", "finetune_lora", "finetune_full"]
OWN = [
    "config",
    "print_config",
    "overwrite",
    "force",
    "stop_after",
    "metric",
    "trust_task_code",
    "quiet",
    "plugin",
    "without",
    "from_devices",
    "tool",
]
"""Options of these commands that are no key of a recipe."""
OF_COMPONENTS = [
    *(f"data.{field.name}" for field in dataclasses.fields(OwnDataOptions)),
    # Once, also where strategies have it in common.
    *{f"strategy.{field.name}" for row in STRATEGIES for field in dataclasses.fields(row.options)},
    *("data.help", "objective.help", "optimizer.help", "strategy.help"),
]
CHECKPOINTS = ["list", "show", "verify", "clean", "diff"]


@pytest.fixture
def ftkit(ftkit: Command) -> Command:
    """Runs the command as a user's shell does."""
    return functools.partial(ftkit, cold=True)


@pytest.fixture
def said(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., tuple[Any, str, str]]:
    """Exit code and output of a command line: `code, out, err = said("--version")`."""
    monkeypatch.setenv("COLUMNS", "80")

    def run_main(*argv: object) -> tuple[object, str, str]:
        monkeypatch.setattr("sys.argv", ["ftkit", *map(str, argv)])
        with pytest.raises(SystemExit) as end:
            main()
        return end.value.code, *capsys.readouterr()

    return run_main


# --- Help ---------------------------------------------------------------------------------------


def test_help_lists_the_commands(said: Callable[..., tuple[Any, str, str]]) -> None:
    code, out, err = said("--help")
    assert (code, err) == (0, "")
    assert said("-h") == (code, out, err)
    assert out.startswith("usage: ftkit ")
    for name in FTKIT.words:
        assert re.search(rf"^    {name} ", out, re.MULTILINE)


def test_no_command_shows_the_help_and_is_a_mistake(
    said: Callable[..., tuple[Any, str, str]],
) -> None:
    assert said() == (2, said("--help")[1], "")


def test_the_version_is_that_of_the_package(said: Callable[..., tuple[Any, str, str]]) -> None:
    assert said("--version") == (0, f"ftkit {__version__}\n", "")


@pytest.mark.parametrize("command", FINETUNE)
class TestHelpOfFinetune:
    @pytest.fixture
    def text(self, said: Callable[..., tuple[Any, str, str]], command: str) -> str:
        code, out, err = said(command, "--help")
        assert (code, err) == (0, "")
        return out

    def test_explains_every_key_once(self, text: str, command: str) -> None:
        method = "full" if command == "finetune_full" else "lora"
        shown = re.findall(r"^  --(\S+)", text, re.MULTILINE)
        of_method = ["peft.help"] if method == "lora" else []
        assert sorted(shown) == sorted([*key_types(method), *OWN, *OF_COMPONENTS, *of_method])

    def test_starts_with_the_config_and_the_switches(self, text: str, command: str) -> None:
        shown = re.findall(r"^  (?:-h, )?--(\S+)", text, re.MULTILINE)
        assert shown[: len(OWN) + 2] == ["help", *OWN, "checkpoint_dir"]

    def test_help_describes_its_own_kind_of_training_only(self, text: str, command: str) -> None:
        kind, other = "LoRA and QLoRA", "Full fine-tuning"
        if command == "finetune_full":
            kind, other = other, kind
        assert f"\n{kind}: " in text
        assert other not in text

    def test_shows_choices_and_defaults_as_a_recipe_has_them(self, text: str, command: str) -> None:
        words = " ".join(text.split())
        assert "--precision {32-true,bf16-true,bf16-mixed,16-true,16-mixed}" in words
        assert "--devices N|auto Devices per machine. Default: 1." in words
        assert "--eval.initial_validation {true,false}" in words
        assert "--optimizer.NAME VALUE. Default: AdamW." in words
        assert "Default: 6e-05." in words
        assert "--resume {true,false}|N|TEXT Continue from a checkpoint." in words
        assert "--checkpoint.save_every TEXT" in words and "Default: 15min." in words
        assert "--stop_after N|DURATION Save and stop" in words
        assert "random:NAME for random weights" in words and "default size. Required." in words
        if command != "finetune_full":
            choices = "bnb.nf4,bnb.nf4-dq,bnb.fp4,bnb.fp4-dq,bnb.int8,stored"
            assert f"--quantize {{{choices}}}" in words

    def test_has_no_words_of_python(self, text: str, command: str) -> None:
        for word in ("class_path", "Optional[", "Literal", "<class", "null", "Namespace", "CONFIG"):
            assert word not in text

    def test_fits_the_terminal(self, text: str, command: str) -> None:
        assert max(map(len, text.splitlines())) <= 80


def test_help_wins_wherever_it_stands(said: Callable[..., tuple[Any, str, str]]) -> None:
    assert said("finetune", "--seed", "x", "--help") == said("finetune", "--help")


@pytest.mark.extensions
def test_help_of_download_names_its_options(said: Callable[..., tuple[Any, str, str]]) -> None:
    code, out, err = said("download", "--help")
    assert (code, err) == (0, "")
    assert out.startswith("usage: ftkit download REPO_ID ")
    assert "--access_token TOKEN" in out and "--checkpoint_dir PATH" in out


@pytest.mark.parametrize("name", [name for name in COMMANDS if name not in FINETUNE])
def test_help_of_a_command_explains_its_words_and_options_with_examples(
    said: Callable[..., tuple[Any, str, str]], name: str
) -> None:
    command = COMMANDS[name]
    code, out, err = said(*name.split(), "--help")
    assert (code, err) == (0, "")
    assert out.startswith(f"usage: ftkit {name} ")
    shown = re.findall(r"^  (?:-h, )?--(\S+)", out, re.MULTILINE)
    known = [item.name for item in declared(command.options) if not item.is_word]
    beside = heads_of(command.options) or ()
    helps = [f"{component}.help" for component in components_of(command.options)]
    assert sorted(shown) == sorted(["help", *known, *beside, *helps])
    for word in (item for item in declared(command.options) if item.is_word):
        assert re.search(rf"^  {word.placeholder}  .*\S", out, re.MULTILINE)
    assert f"\nExamples:\n  ftkit {name} " in out
    lines = out.partition("\nExamples:\n")[0].splitlines()
    assert max(map(len, lines)) <= 80
    words = ["out/run"] if any(item.is_word for item in declared(command.options)) else []
    assert said(*name.split(), "-h", *words) == (0, out, "")


@pytest.mark.extensions
@pytest.mark.parametrize("name", ["finetune", "plan", "sweep", "export"])
def test_a_usage_takes_several_lines_where_the_terminal_is_narrow(
    said: Callable[..., tuple[Any, str, str]], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    lines = said(name, "--help")[1].partition("\n\n")[0].splitlines()
    assert max(map(len, lines)) <= 60
    assert any(line.endswith("[--KEY VALUE ...]") for line in lines)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_option_of_a_command_is_explained(name: str) -> None:
    for item in declared(COMMANDS[name].options):
        assert item.text.endswith("."), item.name


@pytest.mark.parametrize("name", COMMANDS)
def test_the_examples_of_a_command_are_understood_by_its_parser(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "questions.txt").touch()
    command = COMMANDS[name]
    for example in command.examples:
        argv = shlex.split(example.replace("\\\n", " "))
        line = split_line(command, argv)
        if line.components:
            assert {component for component, _ in line.components} <= set(COMPONENTS)
        else:
            assert isinstance(parse(command, argv), command.options)


@pytest.mark.parametrize("name", COMMANDS)
def test_the_function_of_a_command_exists(name: str) -> None:
    module, _, function = COMMANDS[name].function.partition(":")
    assert callable(getattr(importlib.import_module(module), function))


@pytest.mark.extensions
@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--data.help"], "--data takes one of: JSON, NeoX, Alpaca, Alpaca2k, "),
        (["--data.help", "JSON"], "--data.path TEXT|PATH A file (.json, .jsonl, .csv,"),
        (["--data.help", "JSON"], "--data.json_path TEXT|PATH Older name of path."),
        (["--data.help", "JSON"], "--data.columns {KEY:VALUE,...} Names of the records"),
        (["--data.help", "JSON"], "--data.sources [{KEY:VALUE,...},...] Several sources"),
        (["--data.help=LIMA"], "--data.access_token TEXT"),
        (["--data.help", "litgpt.data.FLAN"], "--data.subsets TEXT Comma-separated list"),
        (["--optimizer.help"], " AdamW, "),
        (["--optimizer.help"], " bitsandbytes.optim.AdamW8bit, "),
        (["--optimizer.help", "AdamW"], "--optimizer.betas [NUMBER,NUMBER] Coefficients used"),
        (["--optimizer.help", "AdamW"], "--optimizer.lr NUMBER Learning rate"),
        (["--optimizer.help", "bitsandbytes.optim.AdamW8bit"], "Default: [0.9, 0.999]."),
        (["--objective.help"], "--objective takes one of: sft (the answers of records), dft ("),
        (["--objective.help", "sft"], "--objective.z_loss NUMBER Coefficient"),
        (["--strategy.help"], "--strategy takes one of: auto, single, ddp, fsdp, deepspeed."),
        (["--strategy.help", "fsdp"], "--strategy.cpu_offload {true,false} Keep parameters,"),
        (["--strategy.help", "deepspeed"], "--strategy.stage {1,2,3} ZeRO stage"),
        (["--strategy.help", "ddp"], "--strategy.context N Neighbouring ranks"),
        (["--strategy.help", "single"], "--strategy single has no keys of its own."),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_the_keys_of_what_a_recipe_names_are_shown(
    said: Callable[..., tuple[Any, str, str]], argv: list[str], words: str
) -> None:
    code, out, err = said("finetune", *argv)
    assert (code, err) == (0, "")
    assert words in " ".join(out.split())
    assert max(map(len, out.splitlines())) <= 80


def test_plan_shows_these_keys_too_and_evaluate_only_those_of_data(
    said: Callable[..., tuple[Any, str, str]],
) -> None:
    for words in (["--data.help", "JSON"], ["--optimizer.help"], ["--strategy.help", "fsdp"]):
        assert said("plan", *words) == said("finetune", *words)
    assert said("evaluate", "--data.help", "JSON") == said("finetune", "--data.help", "JSON")
    assert said("evaluate", "out/run", "--strategy.help", "fsdp")[0] == 2


def test_help_of_checkpoints_lists_its_commands(said: Callable[..., tuple[Any, str, str]]) -> None:
    code, out, err = said("checkpoints", "--help")
    assert (code, err) == (0, "")
    assert out.startswith("usage: ftkit checkpoints COMMAND ")
    assert says(out, "ftkit checkpoints list out/finetune/lora")
    for name in CHECKPOINTS:
        assert re.search(rf"^    {name} ", out, re.MULTILINE)
    assert said("checkpoints") == (2, out, "")


# --- Mistakes -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "line",
    [
        "finetun",
        "finetune --seed",
        "finetune --overwrite=true",
        "finetune b --seed x",
        "finetune --data.help Jsn",
        "download a/b --overwrite 1",
        "checkpoints list none",
        "sweep",
    ],
)
def test_a_mistake_prints_one_message_and_ends_with_exit_code_2(
    said: Callable[..., tuple[Any, str, str]], line: str
) -> None:
    code, out, err = said(*line.split())
    assert (code, out) == (2, "")
    assert err.startswith("ftkit: ") and err.count("\n") == 1
    assert "Traceback" not in err


def test_a_mistake_on_a_real_command_line_has_no_traceback(ftkit: Command) -> None:
    end = ftkit("finetune", "--checkpoint_dir", "b", "--train.epochs", "many")
    assert (end.returncode, end.stdout) == (2, "")
    assert says(end.stderr, "train.epochs is 'many' ... whole number ... --train.epochs 5")


@pytest.mark.parametrize(
    ("argv", "values"),
    [
        (["--seed", "1"], [("seed", "1")]),
        (["--seed=1"], [("seed", "1")]),
        (["--seed", "-1"], [("seed", "-1")]),
        (["--log.run", ""], [("log.run", "")]),
        (["--log.run="], [("log.run", "")]),
        (["--data", "{a: b=c}"], [("data", "{a: b=c}")]),
        (["--a=b=c"], [("a", "b=c")]),
        (["--config", "1", "--config", "2"], [("config", "1"), ("config", "2")]),
    ],
)
def test_an_option_has_its_value_beside_it_or_after_an_equals_sign(
    argv: list[str], values: list[tuple[str, ...]]
) -> None:
    assert split_line(COMMANDS["finetune"], argv).values == values


def test_switches_take_no_value_and_may_stand_anywhere() -> None:
    options = parse(COMMANDS["finetune"], ["--overwrite", "--seed", "1", "--print_config"])
    assert (options.overwrite, options.print_config, options.force) == (True, True, False)
    assert options.keys == (("seed", "1"),)


@pytest.mark.extensions
def test_a_single_word_may_also_be_given_by_its_name() -> None:
    for argv in (["a/b", "--access_token", "t"], ["--access_token", "t", "--repo_id", "a/b"]):
        assert parse(COMMANDS["download"], argv).repo_id == "a/b"


def test_a_reader_that_goes_away_ends_the_command_quietly(ftkit: Command) -> None:
    before = "import os\nreading, writing = os.pipe()\nos.close(reading)\nos.dup2(writing, 1)"
    end = ftkit("--version", before=before)
    assert (end.returncode, end.stderr) == (1, "")


def test_an_interrupted_command_ends_with_130(
    said: Callable[..., tuple[Any, str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(_: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr("ftkit.cli.app.run", interrupt)
    assert said("finetune") == (130, "", "")


# --- print_config -------------------------------------------------------------------------------


@pytest.mark.extensions
@pytest.mark.parametrize(
    ("command", "recipe", "options"),
    [
        ("finetune", "tiny-llama-lora.yaml", ["--quantize", "bnb.nf4"]),
        ("finetune_full", "tiny-llama-full.yaml", ["--optimizer", "SGD", "--optimizer.lr", "2e-4"]),
        ("finetune_full", "multi_gpu/a100-13b-deepspeed.yaml", []),
    ],
)
def test_the_printed_config_is_an_equal_recipe(
    said: Callable[..., tuple[Any, str, str]],
    tmp_path: Path,
    command: str,
    recipe: str,
    options: list[Any],
) -> None:
    argv = [command, "--config", RECIPES / recipe, *options]
    code, out, err = said(*argv, "--print_config")
    assert (code, err) == (0, "")
    copy = tmp_path / "copy.yaml"
    copy.write_text(out)
    keys = parse(COMMANDS[command], options).keys
    assert read_recipe([copy]) == read_recipe([RECIPES / recipe], keys)
    assert said(command, "--config", copy, "--print_config") == (0, out, "")


def test_recipes_and_the_base_model_may_stand_on_their_own(
    said: Callable[..., tuple[Any, str, str]], tmp_path: Path
) -> None:
    later = tmp_path / "later.yaml"
    later.write_text("seed: 7\n")
    recipe = RECIPES / "tiny-llama-lora.yaml"
    named = ["--config", recipe, "--config", later, "--checkpoint_dir", "some/base"]
    expected = said("finetune", *named, "--print_config")
    assert said("finetune", recipe, later, "some/base", "--print_config") == expected
    assert "checkpoint_dir: some/base\n" in expected[1] and "seed: 7\n" in expected[1]


def test_printing_the_config_needs_no_model_data_network_or_directory(
    ftkit: Command, tmp_path: Path
) -> None:
    end = ftkit(
        *("finetune", "--checkpoint_dir", "no/where", "--data", "JSON", "--print_config"),
        *("--data.json_path", "none.json", "--access_token", "hf_secret", "--out_dir", "none/out"),
    )
    assert (end.returncode, end.stderr) == (0, "")
    assert "checkpoint_dir: no/where" in end.stdout
    assert "hf_secret" not in end.stdout
    assert list(tmp_path.iterdir()) == []


# --- Completion ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def completion(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The script that `ftkit --print_shtab=bash` prints."""
    from command import command_environment, command_line

    file = tmp_path_factory.mktemp("completion") / "ftkit.bash"
    line = command_line("--print_shtab=bash")
    with file.open("w") as script:
        subprocess.run(line, stdout=script, env=command_environment(), check=True)
    return file


@pytest.mark.extensions
@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("ftkit ", set(FTKIT.words)),
        ("ftkit down", {"download"}),
        ("ftkit finetune --lora_", {f"--{k}" for k in key_types("lora") if k[:5] == "lora_"}),
        ("ftkit finetune_full --lora_", set()),
        ("ftkit finetune --train.max_s", {"--train.max_steps", "--train.max_seq_length"}),
        ("ftkit finetune --train", {f"--{k}" for k in key_types("lora") if k.startswith("train.")}),
        (
            "ftkit finetune --ch",
            {f"--{k}" for k in key_types("lora") if k.startswith("checkpoint")},
        ),
        ("ftkit finetune --co", {"--config", "--compile"}),
        ("ftkit finetune --sto", {"--stop_after"}),
        ("ftkit finetune --data.ma", {"--data.mask_prompt"}),
        ("ftkit finetune --strategy.sh", {"--strategy.sharding"}),
        ("ftkit finetune --optimizer", {"--optimizer", "--optimizer.help"}),
        ("ftkit plan --f", {"--fit", "--format", "--from_devices"}),
        ("ftkit finetune --precision bf", {"bf16-true", "bf16-mixed"}),
        ("ftkit finetune --quantize bnb.n", {"bnb.nf4", "bnb.nf4-dq"}),
        ("ftkit finetune_full --logger_name t", {"tensorboard", "trackio"}),
        ("ftkit download --a", {"--access_token"}),
        ("ftkit ch", {"chat", "checkpoints"}),
        ("ftkit checkpoints ", set(CHECKPOINTS)),
        ("ftkit checkpoints verify --f", {"--format"}),
        ("ftkit checkpoints list --format ", {"table", "json"}),
        ("ftkit checkpoints clean --", {"--help", "--quiet", "--keep_last", "--dry_run"}),
        ("ftkit generate --prompt", {"--prompt", "--prompts", "--prompt_style"}),
        ("ftkit evaluate --accelerator ", {"auto", "cpu", "cuda"}),
        ("ftkit compare --", {"--help", "--quiet", "--sort", "--format", "--plot"}),
        ("ftkit compare --format ", {"table", "json", "csv", "markdown"}),
        ("ftkit watch --", {"--help", "--serve", "--once", "--interval"}),
        ("ftkit chat --t", {"--temperature", "--top_k", "--top_p"}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_bash_completes_commands_keys_and_choices(
    completion: Path, line: str, offered: set[str] | set[Any]
) -> None:
    words = line.split(" ")
    program = (
        f"source {completion}\n"
        f"COMP_WORDS=({' '.join(words[:-1])} '{words[-1]}'); COMP_CWORD={len(words) - 1}\n"
        "_shtab_ftkit; printf '%s\\n' \"${COMPREPLY[@]}\""
    )
    end = subprocess.run(["bash", "-c", program], capture_output=True, text=True)
    assert set(end.stdout.split()) - {"null"} == offered, end.stderr


def test_the_completion_is_valid_bash(completion: Path) -> None:
    end = subprocess.run(["bash", "-n", completion], capture_output=True, text=True)
    assert (end.returncode, end.stderr) == (0, "")


# --- What it imports ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("argv", "code"),
    [
        (["--help"], 0),
        (["--version"], 0),
        (["finetune", "--data.help", "JSON"], 0),
        (["finetune", "--strategy.help"], 0),
        (["finetune", "--help"], 0),
        (["finetune", "--config", RECIPES / "tiny-llama-lora.yaml", "--print_config"], 0),
        (["finetune", "--config", RECIPES / "tiny-llama-lora.yaml", "--seed", "x"], 2),
        (["finetune", "--checkpoint_dir", "b", "--data", "JSON"], 2),
        (["checkpoints", "list", "--help"], 0),
        (["checkpoints", "verify", ROOT / "none"], 2),
        (["generate", "--help"], 0),
        (["generate", ROOT / "none", "--prompt", "a"], 2),
        (["evaluate", ROOT / "none", "--max_iters", "0"], 2),
        (["compare", ROOT / "none"], 2),
        (["watch", ROOT / "none"], 2),
    ],
    ids=[
        "help",
        "version",
        "help on data",
        "help on strategies",
        "finetune help",
        "print_config",
        "bad recipe",
        "no data",
        "checkpoints help",
        "no checkpoints",
        "generate help",
        "no result",
        "bad option",
        "nothing to compare",
        "nothing to watch",
    ],
)
def test_commands_that_start_no_run_import_no_torch(
    ftkit: Command, argv: list[Any], code: int
) -> None:
    end = ftkit(*argv, before=NO_TORCH)
    assert end.returncode == code
    assert end.stderr.endswith("imported: []\n")


@pytest.mark.slow
def test_native_code_of_a_hub_is_neither_fetched_nor_run(ftkit: Command, tmp_path: Path) -> None:
    """bitsandbytes does so when it is imported, on some CPUs, if there is this package."""
    (tmp_path / "kernels.py").write_text("from pathlib import Path\nPath('was-run').touch()\n")
    recipe = ["random:pythia-14m", "--quantize", "bnb.nf4", "--train.max_seq_length", "32"]
    end = ftkit("plan", "--checkpoint_dir", *recipe, "--format", "json")
    assert end.returncode == 0, end.stderr
    assert json.loads(end.stdout)["quantize"] == "bnb.nf4"
    lines = [line for line in end.stderr.splitlines() if not line.startswith("predicting what ")]
    assert lines == []
    assert not (tmp_path / "was-run").exists()


@pytest.mark.parametrize("key", ["checkpoint_dir", "out_dir", "data.path"])
def test_a_text_that_is_too_long_for_a_path_is_a_mistake(
    said: Callable[..., tuple[Any, str, str]], key: str
) -> None:
    code, out, err = said("finetune", "--data", "JSON", f"--{key}", "x" * 5000)
    assert (code, out) == (2, "")
    assert err.startswith("ftkit: ") and "Traceback" not in err
