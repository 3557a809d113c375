"""Adapters that vLLM refuses: a table, compared with vLLM's own code if it is installed."""

import importlib.util
import json
import logging
import re
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from results import Ended

from ftkit.cli.app import run
from ftkit.errors import UserError
from ftkit.models.lora.serving import RANKS, SERVING_RULES, VLLM_VERSION, obstacles, serving_rank

PLAIN: dict[str, Any] = {"r": 8, "lora_alpha": 16, "target_modules": ["q_proj"], "bias": "none"}
REFUSED: dict[str, dict[str, Any]] = {
    "peft_type": {"peft_type": "VERA"},
    "use_dora": {"use_dora": True},
    "modules_to_save": {"modules_to_save": ["embed_tokens"]},
    "bias": {"bias": "all"},
    "lora_bias": {"lora_bias": True},
    "init_lora_weights": {"init_lora_weights": "pissa"},
    "alora_invocation_tokens": {"alora_invocation_tokens": [1]},
    "layer_replication": {"layer_replication": [[0, 1]]},
    "use_bdlora": {"use_bdlora": {"nblocks": 2}},
    "use_qalora": {"use_qalora": True},
    "r": {"r": 600},
    "rank_pattern": {"rank_pattern": {"q_proj": 600}},
}
SERVED: list[dict[str, Any]] = [
    {},
    {"use_rslora": True},
    {"init_lora_weights": "gaussian"},
    {"modules_to_save": ["score"]},
    {"r": 512},
    {"rank_pattern": {"q_proj": 320}, "alpha_pattern": {"q_proj": 4}},
]


def test_every_rule_has_a_case() -> None:
    assert {rule.key for rule in SERVING_RULES} | {"r", "rank_pattern"} == REFUSED.keys()


@pytest.mark.parametrize("key", REFUSED)
def test_a_refusal_names_the_key(key: str) -> None:
    (text,) = obstacles(PLAIN | REFUSED[key])
    assert key in text or "rank is 600" in text


@pytest.mark.parametrize("changes", SERVED)
def test_adapters_that_are_served_have_no_obstacle(changes: dict[str, Any]) -> None:
    assert list(obstacles(PLAIN | changes)) == []


def test_the_rank_of_the_server_is_the_next_that_it_may_have() -> None:
    assert [serving_rank(PLAIN | {"r": r}) for r in (1, 9, 16, 300, 512, 513)] == [
        1, 16, 16, 320, 512, None
    ]  # fmt: skip


# --- The command ----------------------------------------------------------------------------------


def check(result: Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    code = run(["export", str(result), "--check", "vllm"])
    return code, capsys.readouterr().out


@pytest.mark.extensions
def test_the_command_prints_how_to_serve_or_what_to_change(
    ended: dict[str, Ended], capsys: pytest.CaptureFixture[str]
) -> None:
    code, out = check(ended["lora"].out_dir, capsys)
    assert code == 0 and f"rules of vLLM {VLLM_VERSION}" in out and "--enable-lora" in out
    code, out = check(ended["dora"].out_dir, capsys)
    assert code == 1 and "it is DoRA (use_dora: True)" in out and "were trained whole" in out
    assert f"ftkit merge {ended['dora'].out_dir} --out" in out
    code, out = check(ended["full"].out_dir, capsys)
    assert code == 0 and "vllm serve" in out
    with pytest.raises(UserError, match=r"ftkit export .* --format hf"):
        check(ended["full"].checkpoint, capsys)
    with pytest.raises(UserError, match="--check writes nothing"):
        run(["export", str(ended["lora"].out_dir), "--check", "vllm", "--format", "peft"])


@pytest.mark.extensions
def test_a_run_warns_when_it_saves_an_adapter_that_is_not_served(ended: dict[str, Ended]) -> None:
    warnings = {name: ended[name].report.warnings for name in ("lora", "qlora", "pissa", "dora")}
    said = {name for name, texts in warnings.items() if any("vLLM" in text for text in texts)}
    assert said == {"dora"}


# --- Beside vLLM ----------------------------------------------------------------------------------


@pytest.fixture
def of_vllm(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """vLLM's module that checks adapters, without the rest, which needs its devices."""
    found = importlib.util.find_spec("vllm")
    if found is None or not found.submodule_search_locations:
        # Half a gigabyte, not in the extra dev; the rules themselves are tested without it.
        pytest.skip("vllm is not installed")
    file = Path(found.submodule_search_locations[0]) / "lora" / "peft_helper.py"
    stubs: dict[str, dict[str, Any]] = {
        "vllm": {},
        "vllm.config": {},
        "vllm.config.lora": {"LoRAConfig": object},
        "vllm.logger": {"init_logger": Logger},
    }
    for name, content in stubs.items():
        module = ModuleType(name)
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, name, module)
    spec = importlib.util.spec_from_file_location("peft_helper_of_vllm", file)
    assert spec is not None and spec.loader is not None
    helper = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, helper)
    spec.loader.exec_module(helper)
    helper.__file__ = str(file)
    return helper


class Logger(logging.Logger):
    info_once = logging.Logger.info


def test_vllm_itself_agrees(of_vllm: ModuleType) -> None:
    def refusal(changes: dict[str, Any]) -> str:
        config = json.loads(json.dumps(PLAIN | changes))
        limit = SimpleNamespace(max_lora_rank=RANKS[-1])
        try:
            of_vllm.PEFTHelper.from_dict(config).validate_legal(limit)
        except ValueError as error:
            return str(error)
        return ""

    # It does not look at the type: other adapters lack its keys, and tensors with its names.
    of_lora = {key: changes for key, changes in REFUSED.items() if key != "peft_type"}
    assert {key: bool(refusal(changes)) for key, changes in of_lora.items()} == dict.fromkeys(
        of_lora, True
    )
    assert [refusal(changes) for changes in SERVED] == [""] * len(SERVED)
    source = (Path(str(of_vllm.__file__)).parents[1] / "config" / "lora.py").read_text()
    ranks = re.search(r"MaxLoRARanks = Literal\[([\d, ]+)\]", source)
    assert ranks is not None and tuple(map(int, ranks[1].split(","))) == RANKS
