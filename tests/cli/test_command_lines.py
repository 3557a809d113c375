"""Command lines and what becomes of them: recipes, options, or the key words of an error."""

import dataclasses
import shlex
import textwrap
from pathlib import Path
from typing import Any

import pytest
from command_table import COMMANDS

from ftkit.cli.app import run
from ftkit.cli.parser import parse
from ftkit.errors import UserError
from ftkit.utils.names import leaves
from ftkit.utils.urls import display_path
from ftkit.utils.yaml_files import parse_yaml

FILES = {
    "recipe.yaml": """
        checkpoint_dir: c
        lora_r: 32
        precision: bf16-true
        quantize:
        data:
          class_path: litgpt.data.Alpaca2k
          init_args: {mask_prompt: false, val_split_fraction: 0.05}
        train: {global_batch_size: 8, lr_warmup_steps: 10, max_norm: , min_lr: 6.0e-5}
        optimizer:
          class_path: torch.optim.AdamW
          init_args: {lr: 0.0002, weight_decay: 0.0, betas: [0.9, 0.95]}
    """,
    "later.yaml": """
        seed: 7
        train: {epochs: 2}
        optimizer: {lr: 0.1}
    """,
    "prompts.txt": "x",
}


@pytest.fixture(autouse=True)
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A directory with two recipes and a file of prompts, as the current one."""
    monkeypatch.chdir(tmp_path)
    for name, text in FILES.items():
        (tmp_path / name).write_text(textwrap.dedent(text))


def printed_recipe(line: str, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    """The keys that `--print_config` prints for a command line; components and mappings whole."""
    assert run([*shlex.split(line), "--print_config"]) == 0
    whole = ("data", "optimizer", "strategy", "eval.sets", "checkpoint.keep_every")
    return dict(leaves(parse_yaml(capsys.readouterr().out), whole=whole))


RECIPES: list[tuple[str, dict[str, Any]]] = [
    ("finetune --checkpoint_dir b", {}),
    ("finetune --checkpoint_dir=c --seed=-1", {"checkpoint_dir": "c", "seed": -1}),
    (
        "finetune b --optimizer SGD --optimizer.lr 0.1",
        {"optimizer": {"class_path": "torch.optim.SGD", "init_args": {"lr": 0.1}}},
    ),
    (
        "finetune --optimizer.lr 0.1 --optimizer SGD b",
        {"optimizer": {"class_path": "torch.optim.SGD", "init_args": {"lr": 0.1}}},
    ),
    (
        "finetune b --optimizer.lr 2e-4 --optimizer.betas [0.9,0.95] --optimizer.weight_decay 0",
        {
            "optimizer": {
                "class_path": "torch.optim.AdamW",
                "init_args": {"lr": 0.0002, "betas": [0.9, 0.95], "weight_decay": 0},
            }
        },
    ),
    (
        "finetune b --optimizer torch.optim.SGD --optimizer.momentum 0.9 --optimizer.nesterov true",
        {
            "optimizer": {
                "class_path": "torch.optim.SGD",
                "init_args": {"momentum": 0.9, "nesterov": True},
            }
        },
    ),
    (
        "finetune b --optimizer.lr 1 --optimizer '{class_path: SGD, lr: 2, momentum: 0.5}'",
        {"optimizer": {"class_path": "torch.optim.SGD", "init_args": {"lr": 1, "momentum": 0.5}}},
    ),
    (
        "finetune b --optimizer bitsandbytes.optim.AdamW8bit --optimizer.init_args.lr 1.0",
        {"optimizer": {"class_path": "bitsandbytes.optim.AdamW8bit", "init_args": {"lr": 1.0}}},
    ),
    (
        "finetune b --data JSON --data.path d.json",
        {"data": {"class_path": "litgpt.data.JSON", "init_args": {"path": "d.json"}}},
    ),
    (
        "finetune --data.path d.json b --data JSON --data.num_workers 0",
        {
            "data": {
                "class_path": "litgpt.data.JSON",
                "init_args": {"path": "d.json", "num_workers": 0},
            }
        },
    ),
    (
        "finetune b --data JSON --data.json_path d.json --data.path e.json",
        {"data": {"class_path": "litgpt.data.JSON", "init_args": {"path": "e.json"}}},
    ),
    (
        "finetune b --data JSON --data.sources '[{path: a.json}, {path: b.json, weight: 2}]'",
        {
            "data": {
                "class_path": "litgpt.data.JSON",
                "init_args": {"sources": [{"path": "a.json"}, {"path": "b.json", "weight": 2}]},
            }
        },
    ),
    (
        "finetune b --data JSON --data.path 2026-11-20 --data.subset 5",
        {
            "data": {
                "class_path": "litgpt.data.JSON",
                "init_args": {"path": "2026-11-20", "subset": "5"},
            }
        },
    ),
    (
        "finetune b --data.prompt_style 'Q: {instruction}\\nA:'",
        {
            "data": {
                "class_path": "litgpt.data.Alpaca",
                "init_args": {"prompt_style": "Q: {instruction}\nA:"},
            }
        },
    ),
    (
        "finetune b --data.prompt_style alpaca --data.val_split_fraction 1e-1",
        {
            "data": {
                "class_path": "litgpt.data.Alpaca",
                "init_args": {"prompt_style": "alpaca", "val_split_fraction": 0.1},
            }
        },
    ),
    (
        "finetune b --strategy fsdp --strategy.cpu_offload true",
        {"strategy": {"class_path": "fsdp", "init_args": {"cpu_offload": True}}},
    ),
    (
        "finetune b --strategy.stage 3 --strategy deepspeed --strategy.a.b 1",
        {"strategy": {"class_path": "deepspeed", "init_args": {"stage": 3, "a": {"b": 1}}}},
    ),
    (
        "finetune b --strategy.cpu_offload true",
        {"strategy": {"class_path": "auto", "init_args": {"cpu_offload": True}}},
    ),
    (
        "finetune b --train '{epochs: 2}' --train.max_steps 3",
        {"train.epochs": 2, "train.max_steps": 3},
    ),
    (
        "finetune b --train.max_steps 3 --train '{max_steps: 2, epochs: }'",
        {"train.epochs": None, "train.max_steps": 3},
    ),
    (
        "finetune b --train.epochs null --train.max_steps 10",
        {"train.epochs": None, "train.max_steps": 10},
    ),
    (
        "finetune b --train.lr_warmup_fraction 0.1",
        {"train.lr_warmup_steps": None, "train.lr_warmup_fraction": 0.1},
    ),
    (
        "finetune b --train.lr_warmup_fraction 0.1 --train.lr_warmup_steps 5",
        {"train.lr_warmup_steps": 5},
    ),
    (
        "finetune b --train.micro_batch_size auto --train.max_time 1.5 --train.min_lr 1",
        {"train.micro_batch_size": "auto", "train.max_time": 1.5, "train.min_lr": 1.0},
    ),
    (
        "finetune b --eval.sets.code c.jsonl --eval.sets.text.path t.jsonl",
        {"eval.sets": {"code": "c.jsonl", "text": {"path": "t.jsonl"}}},
    ),
    (
        "finetune b --eval.sets '{code: c.jsonl}' --eval.tasks [arc_easy,gsm8k]",
        {"eval.sets": {"code": "c.jsonl"}, "eval.tasks": ["arc_easy", "gsm8k"]},
    ),
    (
        "finetune b --eval.evaluate_example 3 --eval.max_new_tokens null",
        {"eval.max_new_tokens": None, "eval.evaluate_example": 3},
    ),
    (
        "finetune b --checkpoint.keep_every '{1000: 100, 2000: 500}' --checkpoint.save_every null",
        {"checkpoint.save_every": None, "checkpoint.keep_every": {1000: 100, 2000: 500}},
    ),
    (
        "finetune b --checkpoint.keep_every 500 --memory.activation_checkpointing 2",
        {"checkpoint.keep_every": 500, "memory.activation_checkpointing": 2},
    ),
    (
        "finetune b --memory.activation_checkpointing true --checkpoint.save_every 60s",
        {"checkpoint.save_every": "60s", "memory.activation_checkpointing": True},
    ),
    (
        "finetune b --log.run 123 --log.project yes --log.group ''",
        {"log.project": "yes", "log.run": "123"},
    ),
    ("finetune b --log.run '{a: b}' --out_dir null", {"log.run": "{a: b}"}),
    (
        "finetune b --logger_name '[csv, mlflow]' --lora_targets '[q_proj, v_proj]'",
        {
            "logger_name": ["csv", "mlflow"],
            "lora_r": 8,
            "lora_alpha": 16,
            "lora_targets": ["q_proj", "v_proj"],
        },
    ),
    (
        "finetune b --logger_name tensorboard --lora_targets '.*layers.[0-3].*_proj'",
        {
            "logger_name": "tensorboard",
            "lora_r": 8,
            "lora_alpha": 16,
            "lora_targets": ".*layers.[0-3].*_proj",
        },
    ),
    ("finetune b --resume auto --lora_alpha 16.5", {"resume": "auto", "lora_alpha": 16.5}),
    ("finetune b --resume 1500 --lora_alpha 64", {"resume": 1500, "lora_alpha": 64}),
    (
        "finetune b --resume true --quantize bnb.int8-training",
        {"resume": True, "quantize": "bnb.int8"},
    ),
    (
        "finetune b --resume out/x --quantize bnb.nf4 --precision bf16-true",
        {"precision": "bf16-true", "resume": "out/x", "quantize": "bnb.nf4"},
    ),
    (
        "finetune b --devices auto --num_nodes 2 --accelerator xpu",
        {"accelerator": "xpu", "devices": "auto", "num_nodes": 2},
    ),
    (
        "finetune b --out_dir s3://bucket/run --adapter out/a",
        {"out_dir": "s3://bucket/run", "adapter": "out/a"},
    ),
    ("finetune b --out_dir=out/x=y --access_token hf_secret", {"out_dir": "out/x=y"}),
    ("finetune_full b --seed 1 --seed 2 --compile true", {"compile": True, "seed": 2}),
    (
        "finetune --seed 3 recipe.yaml --config later.yaml d",
        {
            "checkpoint_dir": "d",
            "train.epochs": 2,
            "optimizer": {
                "class_path": "torch.optim.AdamW",
                "init_args": {"lr": 0.1, "weight_decay": 0.0, "betas": [0.9, 0.95]},
            },
            "seed": 3,
        },
    ),
    (
        "finetune recipe.yaml later.yaml --train.epochs 3 --optimizer SGD",
        {
            "train.epochs": 3,
            "optimizer": {"class_path": "torch.optim.SGD", "init_args": {}},
            "seed": 7,
        },
    ),
    (
        "finetune recipe.yaml --optimizer AdamW --optimizer.lr 1e-3",
        {
            "optimizer": {
                "class_path": "torch.optim.AdamW",
                "init_args": {"lr": 0.001, "weight_decay": 0.0, "betas": [0.9, 0.95]},
            }
        },
    ),
    (
        "finetune recipe.yaml --data.val_split_fraction 0.5 --train.max_norm 1 --quiet",
        {
            "data": {
                "class_path": "litgpt.data.Alpaca2k",
                "init_args": {"mask_prompt": False, "val_split_fraction": 0.5},
            },
            "train.max_norm": 1.0,
        },
    ),
    (
        "finetune recipe.yaml --data JSON --data.path x.json",
        {"data": {"class_path": "litgpt.data.JSON", "init_args": {"path": "x.json"}}},
    ),
    (
        "finetune_lora embedded:quickstart.yaml --train.max_steps 4",
        {
            "checkpoint_dir": "embedded:quickstart",
            "out_dir": "out/quickstart",
            "precision": "32-true",
            "data": {
                "class_path": "litgpt.data.JSON",
                "init_args": {"json_path": "embedded:quickstart", "mask_prompt": True},
            },
            "train.global_batch_size": 32,
            "train.micro_batch_size": 32,
            "train.epochs": 3,
            "train.max_steps": 4,
            "train.max_seq_length": 256,
            "train.lr_warmup_steps": 10,
            "train.min_lr": 0.0001,
            "eval.max_new_tokens": 24,
            "eval.initial_validation": True,
            "eval.exact_match": 200,
            "optimizer": {
                "class_path": "torch.optim.AdamW",
                "init_args": {"lr": 0.004, "weight_decay": 0.0},
            },
            "lora_targets": None,
            "lora_dropout": 0.0,
            "lora_key": True,
            "lora_projection": True,
            "lora_mlp": True,
        },
    ),
]
"""Command lines with the keys in which their recipe differs from that of the recipe file that they
name first, or of a command line that names the base model alone."""


@pytest.mark.extensions
@pytest.mark.parametrize(("line", "expected"), RECIPES, ids=[line for line, _ in RECIPES])
def test_a_command_line_of_finetune_gives_a_recipe(
    line: str, expected: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    command = line.split()[0]
    base = "recipe.yaml" if "recipe.yaml" in line else "b"
    plain = printed_recipe(f"{command} {base}", capsys)
    got = printed_recipe(line, capsys)
    different = {key: value for key, value in got.items() if repr(value) != repr(plain[key])}
    assert repr(dict(sorted(different.items()))) == repr(dict(sorted(expected.items())))


OPTIONS: list[tuple[str, dict[str, Any]]] = [
    (
        "finetune b --overwrite --stop_after 90min --metric m.py:f --metric m.py:g --force --lr 1",
        {
            "words": ("b",),
            "overwrite": True,
            "force": True,
            "stop_after": "90min",
            "metric": ("m.py:f", "m.py:g"),
            "keys": (("lr", "1"),),
        },
    ),
    (
        "plan r.yaml s.yaml --gpu 24GiB --sweep seed=1,2 --sweep precision=a,b --fit --devices 2",
        {
            "words": ("r.yaml", "s.yaml"),
            "gpu": "24GiB",
            "sweep": ("seed=1,2", "precision=a,b"),
            "fit": True,
            "keys": (("devices", "2"),),
        },
    ),
    (
        "plan finetune_full b --config r.yaml --optimizer.lr=1 --quiet",
        {
            "quiet": True,
            "words": ("finetune_full", "b"),
            "config": ("r.yaml",),
            "keys": (("optimizer.lr", "1"),),
        },
    ),
    (
        "data r.yaml --show 0 --out o.html --format html --data.path x",
        {
            "words": ("r.yaml",),
            "show": 0,
            "format": "html",
            "out": "o.html",
            "keys": (("data.path", "x"),),
        },
    ),
    (
        "import ck --out d --config r.yaml --config s.yaml --data JSON --overwrite",
        {
            "source": "ck",
            "out": "d",
            "config": ("r.yaml", "s.yaml"),
            "overwrite": True,
            "keys": (("data", "JSON"),),
        },
    ),
    ("import --source=ck --out ~/d", {"source": "ck", "out": "~/d"}),
    (
        "sweep s.yaml --only 'a-*' --only b --dry_run --seed -3 --plot p.png --out_dir o",
        {
            "sweep_file": "s.yaml",
            "out_dir": "o",
            "only": ("a-*", "b"),
            "plot": "p.png",
            "dry_run": True,
            "keys": (("seed", "-3"),),
        },
    ),
    (
        "sweep finetune --config r.yaml --sweep seed=1,2",
        {"sweep_file": "finetune", "config": ("r.yaml",), "sweep": ("seed=1,2",)},
    ),
    (
        "download a/b --access_token t --checkpoint_dir c",
        {"repo_id": "a/b", "access_token": "t", "checkpoint_dir": "c"},
    ),
    ("download --checkpoint_dir=c --repo_id a/b", {"repo_id": "a/b", "checkpoint_dir": "c"}),
    (
        "compare a b --sort tokens_per_s --format=csv --plot p.html",
        {"runs": ("a", "b"), "sort": "tokens_per_s", "format": "csv", "plot": "p.html"},
    ),
    (
        "watch s3://bucket/run --once --interval 5s",
        {"out_dir": "s3://bucket/run", "once": True, "interval": "5s"},
    ),
    ("watch out --serve 0", {"out_dir": "out", "serve": 0}),
    ("watch out --serve", {"out_dir": "out", "serve": 0}),
    ("watch --serve --interval 1s out", {"out_dir": "out", "serve": 0, "interval": "1s"}),
    (
        "checkpoints list out --format json --quiet",
        {"quiet": True, "out_dir": "out", "format": "json"},
    ),
    ("checkpoints show out 1500", {"out_dir": "out", "step": "1500"}),
    ("checkpoints verify gs://bucket/run --step 3", {"out_dir": "gs://bucket/run", "step": "3"}),
    (
        "checkpoints clean --keep_last 2 out --dry_run",
        {"out_dir": "out", "keep_last": 2, "dry_run": True},
    ),
    ("checkpoints diff a az://bucket/b", {"a": "a", "b": "az://bucket/b"}),
    ("generate r --prompt yes", {"result": "r", "prompt": "yes"}),
    ("generate r --prompt '- a list'", {"result": "r", "prompt": "- a list"}),
    (
        "generate r --prompt -x --system '-5 degrees'",
        {"result": "r", "system": "-5 degrees", "prompt": "-x"},
    ),
    ("generate r --prompt=--x", {"result": "r", "prompt": "--x"}),
    ("generate r --prompt '-- x'", {"result": "r", "prompt": "-- x"}),
    (
        "generate r --prompt null --input '{a: 1}'",
        {"result": "r", "prompt": "null", "input": "{a: 1}"},
    ),
    (
        "generate --temperature 0.8 --top_k 50 --top_p 1 --prompt 'a: b' r",
        {"result": "r", "temperature": 0.8, "top_k": 50, "prompt": "a: b"},
    ),
    (
        "generate r --prompt 1e3 --quantize none --accelerator xpu --max_new_tokens 1",
        {
            "result": "r",
            "quantize": "none",
            "accelerator": "xpu",
            "max_new_tokens": 1,
            "prompt": "1e3",
        },
    ),
    (
        "generate r --prompts prompts.txt --out answers.jsonl --compare_base --format json",
        {
            "result": "r",
            "prompts": "prompts.txt",
            "out": "answers.jsonl",
            "compare_base": True,
            "format": "json",
        },
    ),
    ("chat r --raw --format json", {"result": "r", "raw": True, "format": "json"}),
    (
        "chat --base null r --seed 0 --chat_template chatml",
        {"result": "r", "base": "null", "seed": 0, "chat_template": "chatml"},
    ),
    (
        "evaluate r --data JSON --data.path f --exact_match 0 --max_iters 2",
        {
            "result": "r",
            "data": (("data", "JSON"), ("data.path", "f")),
            "max_iters": 2,
            "exact_match": 0,
        },
    ),
    (
        "evaluate r --sets '{a: b}' --micro_batch_size 4 --rouge_l 1",
        {"result": "r", "sets": "{a: b}", "micro_batch_size": 4, "rouge_l": 1},
    ),
    (
        "evaluate r --tasks arc_easy,my.yaml --limit 5 --num_fewshot 0 --trust_task_code d",
        {
            "result": "r",
            "tasks": "arc_easy,my.yaml",
            "limit": 5,
            "num_fewshot": 0,
            "trust_task_code": "d",
        },
    ),
    (
        "merge r --out m --base original --dtype bfloat16 --max_shard_size 1GB",
        {
            "result": "r",
            "out": "m",
            "dtype": "bfloat16",
            "max_shard_size": "1GB",
            "base": "original",
        },
    ),
    (
        "export r --format gguf --quantization q8_0 --out g",
        {"result": "r", "out": "g", "format": "gguf", "quantization": "q8_0"},
    ),
    ("export r --check vllm", {"result": "r", "check": "vllm"}),
    (
        "push r me/m --public --message 'a: b' --base x/y --format json",
        {
            "result": "r",
            "repo_id": "me/m",
            "public": True,
            "base": "x/y",
            "message": "a: b",
            "format": "json",
        },
    ),
]
"""Command lines with the options that are not at their defaults; paths as texts."""


@pytest.mark.extensions
@pytest.mark.parametrize(("line", "expected"), OPTIONS, ids=[line for line, _ in OPTIONS])
def test_a_command_line_gives_options(line: str, expected: dict[str, Any]) -> None:
    words = shlex.split(line)
    length = 2 if words[0] == "checkpoints" else 1
    command, rest = COMMANDS[" ".join(words[:length])], words[length:]
    options = parse(command, rest)
    got = {}
    for field in dataclasses.fields(options):
        value = getattr(options, field.name)
        if "line" in field.metadata:
            assert value == ("ftkit", *words)
        elif repr(value) != repr(field.default):
            got[field.name] = display_path(value) if isinstance(value, Path) else value
    assert repr(dict(sorted(got.items()))) == repr(dict(sorted(expected.items())))


ERRORS: list[tuple[str, list[str]]] = [
    ("downlaod x/y", ["'downlaod'", "ftkit download"]),
    ("xyzzy", ["'xyzzy'", "ftkit --help"]),
    ("--print_shtab", ["--print_shtab", "bash"]),
    ("--print_shtab=ksh", ["--print_shtab", "'ksh'", "--print_shtab=bash"]),
    ("finetune --config", ["--config", "needs a value", "--config VALUE"]),
    ("finetune a/b --checkpoint_dir c", ["'a/b'", "one base model too many", "'c'"]),
    ("finetune --quiet=1", ["--quiet", "switch"]),
    ("finetune --stop_after", ["--stop_after", "needs a value"]),
    ("finetune b --stop_after 9m", ["--stop_after", "'9m'", "duration"]),
    ("finetune --optimizer.help AdamW8bit", ["bitsandbytes.optim.AdamW8bit"]),
    ("download a/b --config x", ["--config", "ftkit download"]),
    ("checkpoints list", ["OUT_DIR", "missing"]),
    ("checkpoints list out --format xml", ["--format", "'xml'", "table or json", "--format json"]),
    ("checkpoints list none", ["none", "directory", "out_dir of a run"]),
    ("checkpoints clean out --keep_last all", ["--keep_last", "'all'", "--keep_last 1"]),
    ("import s3://bucket/x --out o", ["SOURCE", "s3://bucket/x", "this machine"]),
    ("import ck --out s3://bucket/o", ["--out", "s3://bucket/o", "this machine", "--out o"]),
    ("checkpoints lst out", ["'lst'", "ftkit checkpoints", "ftkit checkpoints list"]),
    (
        "finetune",
        ["checkpoint_dir", "--checkpoint_dir TinyLlama/TinyLlama_v1.1", "--config RECIPE.yaml"],
    ),
    ("finetune b --seed", ["--seed", "needs a value", "--seed VALUE"]),
    ("finetune b --seed --devices 1", ["--seed", "needs a value", "--seed VALUE"]),
    ("finetune b --seed x", ["seed", "whole number", "'x'", "--seed 1337"]),
    ("finetune b --device 3", ["device", "devices"]),
    ("finetune b --xyzzy 3", ["xyzzy", "ftkit finetune", "--help for"]),
    ("finetune b -s 1", ["'-s'", "--KEY VALUE", "--devices 1"]),
    ("finetune b -- x", ["'--'", "--KEY VALUE", "--devices 1"]),
    ("finetune b c", ["'c'", "one base model too many", "'b'", "--"]),
    ("finetune none.yaml", ["--config none.yaml", "later.yaml"]),
    ("finetune d.jsonl", ["'d.jsonl'", "file of data", "--data JSON", "--data.path d.jsonl"]),
    ("finetune b --overwrite=true", ["--overwrite", "switch"]),
    ("finetune b --overwrite true", ["--overwrite", "switch"]),
    ("finetune b --overwrit", ["--overwrit", "needs a value", "--overwrit VALUE", "--overwrite"]),
    (
        "finetune b --optimizer '{class_path: SGD'",
        ["--optimizer", "'{class_path: SGD'", "--KEY.NAME VALUE"],
    ),
    ("finetune b --data d.json", ["data.class_path", "'d.json'", "--data Alpaca"]),
    (
        "finetune b --checkpoint.keep_every x",
        ["checkpoint.keep_every", "whole number", "'x'", "--checkpoint.keep_every 100"],
    ),
    ("finetune --data.help Jsn", ["--data.help", "'Jsn'", "--data.help JSON"]),
    ("finetune --optimizer.help os.system", ["--optimizer.help", "'os.system'"]),
    ("finetune --strategy.help fdsp", ["--strategy.help", "'fdsp'", "--strategy.help fsdp"]),
    ("plan b --format xml", ["--format", "table or json", "'xml'", "--format json"]),
    ("plan b --fit true", ["--fit", "switch"]),
    ("data b --show many", ["--show", "whole number of at least 0", "'many'", "--show 3"]),
    (
        "import",
        ["SOURCE", "missing", "ftkit import trl", "--out out/imported", "--config RECIPE.yaml"],
    ),
    ("import ck", ["--out", "missing", "--out out/imported"]),
    (
        "sweep",
        [
            "SWEEP.yaml",
            "missing",
            "ftkit sweep recipes",
            "ftkit sweep finetune",
            "--config RECIPE.yaml",
        ],
    ),
    ("download", ["REPO_ID", "missing", "ftkit download"]),
    ("download a/b c/d", ["'c/d'", "--KEY VALUE", "ftkit download", "--help"]),
    ("download a/b --devices 1", ["--devices", "ftkit download", "--help"]),
    ("compare", ["RUN", "missing", "out_dir"]),
    ("compare a --sort", ["--sort", "needs a value", "--sort VALUE"]),
    ("compare a --fromat json", ["--fromat", "ftkit compare", "--format"]),
    ("watch out --serve 70000", ["--serve", "whole number", "'70000'", "--serve 8321"]),
    ("watch", ["OUT_DIR", "missing", "ftkit watch out"]),
    ("checkpoints list out other", ["'other'", "--KEY VALUE", "ftkit checkpoints list", "--help"]),
    ("checkpoints list out --dry_run", ["--dry_run", "ftkit checkpoints list", "--help"]),
    ("checkpoints clean out", ["--keep_last", "missing", "--keep_last 1"]),
    (
        "checkpoints clean out --keep_last 0",
        ["--keep_last", "whole number of at least 1", "'0'", "--keep_last 1"],
    ),
    ("checkpoints diff a", ["B", "missing", "ftkit checkpoints diff"]),
    ("generate --prompt a", ["RESULT", "missing"]),
    ("generate r", ["--prompt", "missing", "'Tell me a story.'", "--prompts FILE"]),
    ("generate r --prompt", ["--prompt", "needs a value", "--prompt VALUE"]),
    ("generate r --prompt --seed 1", ["--prompt", "needs a value", "--prompt VALUE"]),
    (
        "generate r --prompt x --temperature hot",
        ["--temperature", "a number of at least 0", "'hot'", "--temperature 0.8"],
    ),
    ("generate r --prompt x --top_p 2", ["--top_p", "between 0 and 1", "'2'", "--top_p 0.95"]),
    ("generate r --prompt x --precision 16", ["--precision", "'16'", "--precision bf16-true"]),
    ("generate r --prompt x --temprature 1", ["--temprature", "ftkit generate", "--temperature"]),
    ("evaluate r --strategy fsdp", ["--strategy", "ftkit evaluate", "--help"]),
    ("merge r", ["--out", "missing", "--out out/merged"]),
    ("export r --format onnx", ["--format", "'onnx'", "--format hf"]),
    ("push r me", ["REPO_ID"]),
    ("push r", ["REPO_ID", "missing", "ftkit push out"]),
]
"""Command lines with a mistake, and what the message has to name."""


@pytest.mark.extensions
@pytest.mark.parametrize(("line", "words"), ERRORS, ids=[line for line, _ in ERRORS])
def test_a_mistake_is_named_with_its_key_its_value_and_a_remedy(
    line: str, words: list[str]
) -> None:
    with pytest.raises(UserError) as error:
        run(shlex.split(line))
    assert error.value.exit_code == 2
    for word in words:
        assert word in str(error.value)
