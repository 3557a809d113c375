"""Files of other programs as recipes: what becomes of keys, and what is refused."""

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import yaml
from messages import key_words, says

from ftkit.errors import UserError
from ftkit.extensions.foreign_recipes.convert import converted
from ftkit.extensions.foreign_recipes.translation import Translation
from ftkit.models.chat_templates.prompt_styles import resolve_prompt_style
from ftkit.recipe.parsing import read_recipe
from ftkit.recipe.readers import READERS, Reader, Terms, readers_of, translated
from ftkit.recipe.recipe import LoraRecipe, Recipe
from ftkit.recipe.recipe_keys import key_types

AXOLOTL: dict[str, Any] = {
    "base_model": "org/base",
    "datasets": [{"path": "d.jsonl", "type": "alpaca"}],
    "learning_rate": 2e-4,
    "adapter": "lora",
    "lora_r": 32,
    "lora_alpha": 16,
    "lora_target_linear": True,
}
SEEING: dict[str, Any] = {
    "processor_type": "AutoProcessor",
    "chat_template": "gemma3",
    "datasets": [{"path": "d.jsonl", "type": "chat_template"}],
    "lora_target_linear": ...,
    "lora_target_modules": r"model.language_model.layers.[\d]+.self_attn.(q|v)_proj",
}
"""An axolotl file of a model that sees."""
FACTORY: dict[str, Any] = {
    "model_name_or_path": "org/base",
    "finetuning_type": "lora",
    "template": "llama3",
    "dataset": "own",
}
FACTORY_V1: dict[str, Any] = {"model": "org/base", "train_dataset": "sets.yaml"}
TRL: dict[str, Any] = {"model_name_or_path": "org/base", "dataset_name": "org/data"}
SFT: dict[str, Any] = {**TRL, "packing": False}
DPO: dict[str, Any] = {**TRL, "beta": 0.2, "label_smoothing": 0.0}
KTO: dict[str, Any] = {**TRL, "desirable_weight": 1.5}
REWARD: dict[str, Any] = {**TRL, "center_rewards_coefficient": 0.01}
TORCHTUNE: dict[str, Any] = {
    "output_dir": "out",
    "model": {
        "_component_": "torchtune.models.llama3_2.lora_llama3_2_1b",
        "lora_attn_modules": ["q_proj", "v_proj", "output_proj"],
        "apply_lora_to_mlp": True,
    },
    "tokenizer": {"_component_": "torchtune.models.llama3.llama3_tokenizer", "path": "t.model"},
    "checkpointer": {
        "_component_": "torchtune.training.FullModelHFCheckpointer",
        "checkpoint_dir": "/models/base/",
        "output_dir": "${output_dir}",
    },
    "dataset": {"_component_": "torchtune.datasets.alpaca_cleaned_dataset", "packed": False},
    "optimizer": {"_component_": "torch.optim.AdamW", "lr": 3e-4, "fused": True},
    "loss": {"_component_": "torchtune.modules.loss.CEWithChunkedOutputLoss"},
}
FULL = {"_component_": "torchtune.models.qwen2_5.qwen2_5_0_5b"}
QAT = {"activation_dtype": "int8", "weight_dtype": "int4"}
FILES = {
    "axolotl": AXOLOTL,
    "llama-factory": FACTORY,
    "llama-factory-v1": FACTORY_V1,
    "torchtune": TORCHTUNE,
    "trl-sft": SFT,
    "trl-dpo": DPO,
    "trl-kto": KTO,
    "trl-reward": REWARD,
}


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    named = {"own": {"file_name": "own.json"}, "chats": {"file_name": "chats.json",
             "formatting": "sharegpt", "columns": {"messages": "talk"}},
             "documents": {"file_name": "own.json", "columns": {"prompt": "text"}},
             "seen": {"file_name": "own.json", "columns": {"images": "images"}},
             "far": {"file_name": "x/own.json", "columns": {"images": "images"}},
             "otherwise": {"file_name": "own.json", "columns": {"images": "pictures"}},
             "heard": {"file_name": "own.json", "columns": {"audios": "audios"}}}  # fmt: skip
    (tmp_path / "data/dataset_info.json").write_text(json.dumps(named))
    sets = {"own": {"path": "data/own.json", "source": "local", "converter": "alpaca"}}
    (tmp_path / "sets.yaml").write_text(yaml.safe_dump(sets))
    pairs = {"pairs": {"path": "org/pairs", "split": "train_prefs", "converter": "pair"}}
    (tmp_path / "pairs.yaml").write_text(yaml.safe_dump(pairs))
    sized = {"own": sets["own"] | {"size": 50}, "weighted": sets["own"] | {"weight": 2.0}}
    (tmp_path / "sized.yaml").write_text(yaml.safe_dump(sized))
    talks = {"talks": sets["own"] | {"converter": "sharegpt"}}
    (tmp_path / "talks.yaml").write_text(yaml.safe_dump(talks))
    for name in ("own", "chats"):
        (tmp_path / f"data/{name}.json").write_text('[{"instruction": "a", "output": "b"}]')
    return tmp_path


def write(values: dict[str, Any], name: str = "their.yml") -> str:
    Path(name).write_text(yaml.safe_dump(values))
    return name


def translation(file: dict[str, Any], *without: str, ranks: int = 1, **keys: Any) -> Translation:
    given = {key: value for key, value in (file | keys).items() if value is not ...}
    found = translated(given, "their.yml", terms=Terms(without=without, devices=ranks))
    assert isinstance(found, Translation)
    return found


def keys_of(file: dict[str, Any], *without: str, ranks: int = 1, **keys: Any) -> dict[str, Any]:
    return translation(file, *without, ranks=ranks, **keys).recipe


def refusal(file: dict[str, Any], *without: str, **keys: Any) -> str:
    with pytest.raises(UserError) as caught:
        translation(file, *without, **keys)
    return str(caught.value)


@pytest.mark.parametrize(
    ("file", "keys"),
    [
        (AXOLOTL, {"tokens": ["<a>", "<b>"], "lora_modules_to_save": ["embed_tokens", "lm_head"]}),
        (AXOLOTL, {"tokens": ["<a>", "<b>"], "adapter": ..., "lora_target_linear": ...}),
        (FACTORY, {"add_tokens": "<a>, <b>", "resize_vocab": True}),
    ],
)
def test_new_tokens_are_added_and_how_they_begin_is_told(
    file: dict[str, Any], keys: dict[str, Any]
) -> None:
    found = translation(file, **keys)
    assert found.recipe["data"]["init_args"]["add_tokens"] == ["<a>", "<b>"]
    assert any("begin as the mean" in difference for difference in found.differs)
    read_recipe([write({k: v for k, v in (file | keys).items() if v is not ...})])


def test_new_tokens_that_stay_as_they_begin_are_refused() -> None:
    assert says(refusal(FACTORY, add_tokens="<a>", additional_target="norm"), "add_tokens", "<a>")
    assert says(refusal(FACTORY, resize_vocab=True), "resize_vocab")


def torchtune(**parts: Any) -> dict[str, Any]:
    """A file of torchtune; parts are changed where a mapping is given."""
    return {
        key: TORCHTUNE.get(key, {}) | parts[key] if isinstance(parts.get(key), dict) else value
        for key, value in (TORCHTUNE | parts).items()
    }


@pytest.mark.parametrize(
    ("parts", "ours"),
    [
        ({}, {"lora_query": True, "lora_key": False, "lora_value": True, "lora_projection": True,
              "lora_mlp": True, "lora_head": False, "checkpoint_dir": "/models/base",
              "lora_variant": "lora", "out_dir": "out"}),
        ({"model": FULL}, {"lora_r": None, "train.save_interval_epochs": 1.0}),
        ({"model": {"_component_": "torchtune.models.llama2.qlora_llama2_7b"}},
         {"quantize": "bnb.nf4-dq"}),
        ({"model": {"use_dora": True, "quantize_base": True}},
         {"quantize": "bnb.nf4-dq", "lora_variant": "dora"}),
        ({"checkpointer": {"_component_": "torchtune.training.FullModelMetaCheckpointer",
                           "checkpoint_dir": "/models/base/original/"}},
         {"checkpoint_dir": "/models/base"}),
        ({"batch_size": 2, "gradient_accumulation_steps": 8},
         {"train.global_batch_size": 16, "train.micro_batch_size": 2}),
        ({"max_steps_per_epoch": 50}, {"train.epochs": 1, "train.max_steps": 50}),
        ({"clip_grad_norm": "inf"}, {"train.max_norm": None}),
        ({"clip_grad_norm": 0.5, "dtype": "fp32"}, {"train.max_norm": 0.5, "precision": "32-true"}),
        ({"enable_activation_checkpointing": True, "enable_activation_offloading": True},
         {"memory.activation_checkpointing": True, "memory.offload_activations": True}),
        ({"lr_scheduler": {"_component_": "torchtune.training.get_cosine_schedule_with_warmup",
                           "num_warmup_steps": 100}},
         {"train.lr_schedule": "cosine", "train.lr_warmup_steps": 100, "train.min_lr": 0.0}),
        ({"optimizer": {"_component_": "bitsandbytes.optim.PagedAdamW8bit"}},
         {"optimizer": "bitsandbytes.optim.PagedAdamW8bit"}),
        ({"loss": {"_component_": "torchtune.rlhf.loss.DPOLoss"},
          "dataset": {"_component_": "torchtune.datasets.stack_exchange_paired_dataset"}},
         {"objective": "dpo", "reference": None}),
        ({"loss": {"_component_": "torchtune.rlhf.loss.RSOLoss"}, "model": FULL,
          "dataset": {"_component_": "torchtune.datasets.hh_rlhf_helpful_dataset"}},
         {"objective": "dpo", "reference": "/models/base"}),
        ({"kd_loss": {"_component_": "torchtune.modules.loss.ForwardKLWithChunkedOutputLoss"},
          "kd_ratio": 0.25, "teacher_checkpointer": TORCHTUNE["checkpointer"]},
         {"objective": "distill", "teacher": "/models/base"}),
        ({"quantizer": {"_component_":
            "torchtune.training.quantization.Int8DynActInt4WeightQATQuantizer"}, "model": FULL},
         {"qat.weights": "int4", "qat.activations": "int8", "qat.group_size": 256}),
        ({"enable_fp8_training": True, "model": FULL}, {"float8": True}),
        ({"tokenizer": {"max_seq_len": 512}, "dataset": {"packed": True}, "batch_size": 3},
         {"train.global_batch_tokens": 1536, "train.max_seq_length": 511}),
    ],
)  # fmt: skip
def test_keys_of_torchtune_become_ours(parts: dict[str, Any], ours: dict[str, Any]) -> None:
    file = torchtune(**parts)
    if parts.get("model") is FULL:
        file["model"] = FULL
    found = keys_of(file)
    classes = {key: (found.get(key) or {}).get("class_path") for key in ("objective", "optimizer")}
    assert {key: (found | classes).get(key) for key in ours} == ours
    read_recipe([write(file)])


@pytest.mark.parametrize(
    ("dataset", "ours"),
    [
        ({}, {"path": "yahma/alpaca-cleaned", "train_on": "all"}),
        ({"train_on_input": False}, {"train_on": "messages"}),
        ({"source": "csv", "data_files": "d.csv", "column_map": {"output": "answer"}},
         {"path": "d.csv", "columns": {"output": "answer"}}),
        ({"_component_": "torchtune.datasets.instruct_dataset", "source": "org/data",
          "column_map": {"input": "question", "output": "answer"}, "split": "train[:9%]"},
         {"split": "train[:9%]", "train_on": "messages",
          "columns": {"instruction": "question", "output": "answer"}}),
        ({"_component_": "torchtune.datasets.samsum_dataset"},
         {"path": "Samsung/samsum", "columns": {"instruction": "dialogue", "output": "summary"}}),
        ({"_component_": "torchtune.datasets.chat_dataset", "source": "org/data", "name": "a",
          "conversation_column": "talk", "conversation_style": "openai"},
         {"subset": "a", "columns": {"messages": "talk"}}),
        ({"_component_": "torchtune.datasets.text_completion_dataset", "source": "text",
          "data_files": ["d.txt"], "column": "text"},
         {"path": "d.txt", "columns": None, "chat_template": None, "train_on": None}),
    ],
)  # fmt: skip
def test_data_sets_of_torchtune_become_ours(dataset: dict[str, Any], ours: dict[str, Any]) -> None:
    file = torchtune(dataset=dataset, shuffle=False)
    options = keys_of(file)["data"]["init_args"]
    expected = ours | {"shuffle": False, "val_split_fraction": 0.0}
    assert {key: options.get(key) for key in expected} == expected
    read_recipe([write(file)])


@pytest.mark.parametrize(
    ("parts", "missing"),
    [
        ({"model": {"_component_": "torchtune.models.llama3_2_vision.lora_llama3_2_vision_11b"}},
         "model ... models that see"),
        ({"model": {"_component_": "torchtune.models.llama3.llama3"}}, "model ... llama3.llama3"),
        ({"model": {"_component_": "own.models.lora_llama3_8b"}}, "model ... own.models"),
        ({"model": {"attn_dropout": 0.1}}, "model.attn_dropout"),
        ({"tokenizer": {"_component_": "own.one"}}, "tokenizer ... conversations as one"),
        ({"tokenizer": {"prompt_template": "torchtune.data.ChatMLTemplate"}}, "prompt_template"),
        ({"checkpointer": {"_component_": "torchtune.training.FullModelTorchTuneCheckpointer"}},
         "checkpointer ... FullModelTorchTuneCheckpointer"),
        ({"dataset": {"_component_": "torchtune.datasets.multimodal.the_cauldron_dataset"}},
         "dataset ... images in data sets of torchtune"),
        ({"dataset": {"_component_": "own.data.my_dataset"}}, "dataset ... my_dataset"),
        ({"dataset": {"filter_fn": "own.code"}}, "dataset.filter_fn ... chosen by code"),
        ({"dataset": {"packed": True}}, "dataset.packed ... without a length"),
        ({"dataset": ...}, "no dataset"),
        ({"epochs": 2, "max_steps_per_epoch": 9}, "max_steps_per_epoch"),
        ({"optimizer": {"_component_": "torch.optim.Rprop"}}, "optimizer ... torch.optim.Rprop"),
        ({"lr_scheduler": {"_component_": "torch.optim.lr_scheduler.StepLR"}}, "StepLR"),
        ({"loss": {"_component_": "torchtune.rlhf.loss.DPOLoss"}}, "dataset ... loss of pairs"),
        ({"dtype": "fp16"}, "dtype ... fp16"),
        ({"quantizer": {"_component_":
            "torchtune.training.quantization.Int8DynActInt4WeightQATQuantizer"}}, "adapters"),
        ({"policy_model": {"_component_": "torchtune.models.llama3.llama3_8b"}}, "online RL"),
        ({"tasks": ["mmlu"]}, "ftkit evaluate"),
        ({"made_up": 3}, "made_up ... does not know of torchtune"),
    ],
)  # fmt: skip
def test_parts_of_torchtune_without_an_equal_are_refused_by_name(
    parts: dict[str, Any], missing: str
) -> None:
    assert says(refusal(torchtune(**parts)), missing)


def test_places_in_files_of_torchtune_are_filled() -> None:
    folder = TORCHTUNE["checkpointer"] | {"checkpoint_dir": "${root}/${name}"}
    file = torchtune(checkpointer=folder, root="/models/${name}", name="base", out="a")
    found = keys_of(file, "root", "name", "out", output_dir="${out}/${nothing}")
    assert found["checkpoint_dir"] == "/models/base/base" and found["out_dir"] == "a/${nothing}"
    circle = keys_of(file, "root", "name", "out", name="${root}", root="${name}")
    assert "${" in circle["checkpoint_dir"]


@pytest.mark.parametrize(
    ("file", "keys", "shuffles"),
    [
        (AXOLOTL, {"curriculum_sampling": True}, False),
        (AXOLOTL, {"group_by_length": True}, True),
        (FACTORY, {"disable_shuffling": True}, False),
        (FACTORY, {"group_by_length": True}, True),
        (SFT, {"train_sampling_strategy": "sequential"}, False),
        (SFT, {"train_sampling_strategy": "group_by_length"}, True),
        (KTO, {}, False),
        (KTO, {"train_sampling_strategy": "random"}, True),
        (TORCHTUNE, {"shuffle": False}, False),
    ],
)
def test_the_order_of_samples_is_the_other_programs(
    file: dict[str, Any], keys: dict[str, Any], shuffles: bool
) -> None:
    assert keys_of(file, **keys)["data"]["init_args"].get("shuffle", True) is shuffles


def test_asft_is_anchored_at_the_model_or_the_one_that_is_named() -> None:
    full = FACTORY | {"finetuning_type": "full", "use_asft_loss": True}
    found = keys_of(full, asft_alpha=0.3)
    assert found["objective"] == {"class_path": "asft", "init_args": {"alpha": 0.3}}
    assert found["teacher"] == "org/base"
    assert keys_of(full, ref_model="org/other")["teacher"] == "org/other"
    read_recipe([write(full)])


def test_an_adapter_of_no_layer_is_refused() -> None:
    assert says(refusal(AXOLOTL, lora_target_linear=...), "adapter", "no layer")


VALUES_OF_NO_KEY: tuple[Any, ...] = (
    "fast", "", -3, 10**30, 10**400, 1e308, float("inf"), float("nan"), True, [], [[]], [3],
    ["x"], [{}], {}, {"a": [None]}, "2020-01-01", "\0", "9" * 5000, "(",
)  # fmt: skip


@pytest.mark.parametrize("name", FILES)
def test_no_value_of_any_key_ends_in_an_error_of_python(name: str) -> None:
    (reader,) = readers_of(FILES[name])
    ends: Counter[str] = Counter()
    for row in [row for row in reader.opened.rows.values() if row.kind == "ours"]:
        parts = row.accepts[0] if isinstance(row.accepts, list) else row.accepts
        inner = parts if isinstance(parts, dict) else {}
        for value in VALUES_OF_NO_KEY:
            nested = [{key: value} for key in inner]
            given = [[one] for one in nested] if isinstance(row.accepts, list) else nested
            for odd in (value, *given):
                try:
                    translated(FILES[name] | {row.key: odd}, "their.yml", terms=Terms(tool=name))
                    ends["accepted"] += 1
                except UserError:
                    ends["refused"] += 1
    # A file that is refused for another reason would show nothing.
    assert ends["accepted"] and ends["refused"]


@pytest.mark.parametrize(
    ("name", "keys", "allowed"),
    [
        ("axolotl", {"learning_rate": "fast"}, "learning_rate: fast ... number of at least 0"),
        ("axolotl", {"datasets": "x"}, "datasets: x ... list of entries"),
        ("axolotl", {"special_tokens": True}, "special_tokens: true ... keys"),
        ("axolotl", {"datasets": [{"path": 3}]}, "datasets[0].path: 3 ... text"),
        ("axolotl", {"micro_batch_size": 1.5}, "micro_batch_size: 1.5 ... whole number"),
        ("axolotl", {"bf16": "perhaps"}, "bf16 ... true or false or auto or full"),
        ("llama-factory", {"lora_rank": 0}, "lora_rank: 0 ... at least 1"),
        ("llama-factory", {"packing": "neat"}, "packing: neat ... true or false"),
        ("llama-factory-v1", {"peft_config": {"r": [8]}}, "peft_config.r: [8] ... whole number"),
        ("trl-sft", {"warmup_ratio": 2}, "warmup_ratio: 2 ... at least 0 and of at most 1"),
        ("trl-dpo", {"beta": float("nan")}, "beta: NaN ... above 0"),
    ],
)
def test_a_value_of_another_type_is_refused_with_what_is_allowed(
    name: str, keys: dict[str, Any], allowed: str
) -> None:
    assert says(refusal(FILES[name], **keys), f"their.yml ... {allowed}")


def test_all_values_of_another_type_are_named_together() -> None:
    message = refusal(AXOLOTL, learning_rate="fast", num_epochs="many", seed=-1)
    assert says(message, "learning_rate", "num_epochs", "seed")


@pytest.mark.parametrize(
    ("name", "keys", "same"),
    [
        ("axolotl", {"learning_rate": "2e-4", "num_epochs": "1"}, {"learning_rate": 2e-4}),
        ("axolotl", {"val_set_size": "0", "adapter": "none"}, {"adapter": False}),
        ("axolotl", {"sample_packing": "true", "micro_batch_size": "2"},
         {"sample_packing": True, "micro_batch_size": 2}),
        ("axolotl", {"num_epochs": 2.0, "max_steps": -1}, {"num_epochs": 2}),
        ("axolotl", {"save_strategy": False}, {"save_strategy": "no"}),
        ("llama-factory", {"lora_target": ["q_proj", "v_proj"]}, {"lora_target": "q_proj, v_proj"}),
        ("trl-dpo", {"loss_type": "ipo"}, {"loss_type": ["ipo"]}),
        ("trl-sft", {"warmup_steps": "0.1", "bf16": "no"}, {"warmup_steps": 0.1, "bf16": False}),
    ],
)  # fmt: skip
def test_values_that_the_program_takes_in_another_form_mean_the_same(
    name: str, keys: dict[str, Any], same: dict[str, Any]
) -> None:
    assert keys_of(FILES[name], **keys) == keys_of(FILES[name], **same)


@pytest.mark.parametrize(
    ("file", "content", "place"),
    [
        ("data/dataset_info.json", {"own": {"file_name": 3}}, "own.file_name: 3"),
        ("data/dataset_info.json", {"own": "x"}, "own: x"),
        ("data/dataset_info.json", {"own": {"file_name": "x", "columns": ["a"]}}, "own.columns"),
        ("sets.yaml", {"own": 3}, "own: 3"),
        ("sets.yaml", {"own": {"path": ["a"]}}, "own.path"),
    ],
)
def test_files_that_a_file_names_have_types_too(file: str, content: Any, place: str) -> None:
    Path(file).write_text(json.dumps(content))
    name = FACTORY if file.endswith("json") else FACTORY_V1
    assert says(refusal(name), f"{file} ... {place}")


@pytest.mark.parametrize("content", [b"\xff\xfe{", b"[" * 100_000, b'{"a":', b""])
def test_a_damaged_data_file_does_not_keep_a_file_from_being_read(content: bytes) -> None:
    """Whoever reads the data names it; here it is as if it were not there."""

    def found() -> list[dict[str, Any]]:
        pairs = [{"path": "d.json", "type": "chatml.default"}]
        return [keys_of(SFT, dataset_name="d.json"), keys_of(AXOLOTL, rl="dpo", datasets=pairs)]

    expected = found()
    Path("d.json").write_bytes(content)
    assert found() == expected


def test_no_limit_of_gradients_is_written_out() -> None:
    assert keys_of(AXOLOTL, max_grad_norm=0)["train.max_norm"] is None


@pytest.mark.parametrize("name", FILES)
def test_a_file_is_known_by_its_keys(name: str) -> None:
    assert [reader.name for reader in readers_of(FILES[name])] == [name]


@pytest.mark.parametrize(
    ("keys", "records", "commands"),
    [
        ({}, None, ["sft", "dpo", "kto", "reward"]),
        ({"beta": 0.2}, None, ["dpo", "kto"]),
        ({"disable_dropout": True}, None, ["dpo", "kto", "reward"]),
        ({"undesirable_weight": 1.0}, None, ["kto"]),
        ({"beta": 0.2, "loss_type": "kto"}, None, ["kto"]),
        ({"beta": 0.2, "loss_type": ["ipo"]}, None, ["dpo"]),
        ({"loss_type": "nll"}, None, ["sft"]),
        ({}, {"chosen": "a", "rejected": "b"}, ["dpo", "kto", "reward"]),
        ({}, {"prompt": "a", "completion": "b", "label": True}, ["sft", "kto"]),
        ({}, {"text": "a"}, ["sft"]),
    ],
)
def test_a_file_of_trl_is_of_the_commands_that_have_its_keys_and_data(
    keys: dict[str, Any], records: dict[str, Any] | None, commands: list[str]
) -> None:
    file = TRL | keys
    if records is not None:
        Path("records.json").write_text(json.dumps([records]))
        file["dataset_name"] = "records.json"
    assert [reader.name for reader in readers_of(file)] == [f"trl-{name}" for name in commands]


def test_a_file_of_several_commands_is_asked_for_and_an_option_answers() -> None:
    assert says(refusal(TRL, beta=0.2), "TRL ... --tool trl-dpo ... --tool trl-kto")
    file = write(TRL | {"beta": 0.2})
    recipe = read_recipe([file], terms=Terms(tool="trl-kto"))
    assert recipe.objective is not None and recipe.objective["class_path"] == "kto"
    plain = read_recipe([file, write({"seed": 7}, "more.yml")], terms=Terms(tool="trl-dpo"))
    assert plain.seed == 7


def test_kto_and_reward_of_trl_have_its_numbers() -> None:
    kto = keys_of(KTO)
    assert kto["objective"] == {
        "class_path": "kto",
        "init_args": {"beta": 0.1, "desirable_weight": 1.5, "undesirable_weight": 1.0},
    }
    assert kto["reference"] == "org/base" and "reference" not in keys_of(KTO, use_peft=True)
    assert keys_of(KTO, use_peft=True)["lora_dropout"] == 0
    assert says(refusal(KTO, loss_type="apo_zero_unpaired"), "loss_type ... apo_zero_unpaired")
    reward = keys_of(REWARD, use_peft=True, lora_modules_to_save=["score"])
    assert reward["objective"] == {"class_path": "reward", "init_args": {"center_weight": 0.01}}
    assert reward["data"]["init_args"]["overlong"] == "drop"
    assert "lora_modules_to_save" not in reward
    for name in ("trl-kto", "trl-reward"):
        read_recipe([write(FILES[name])])


@pytest.mark.parametrize(
    "recipe",
    [
        "checkpoint_dir: checkpoints/x\ndata: {class_path: litgpt.data.Alpaca2k}\nlora_r: 32\n",
        "checkpoint_dir: checkpoints/x\ntrain: {global_batch_size: 8}\n",
    ],
)
def test_a_recipe_of_litgpt_is_ours(recipe: str) -> None:
    assert readers_of(yaml.safe_load(recipe)) == ()


@pytest.mark.parametrize("reader", READERS, ids=lambda reader: reader.name)
def test_every_row_names_keys_of_ours_and_says_why_it_has_none(reader: Reader) -> None:
    program = reader.opened
    known = {key.partition(".")[0] for key in key_types("lora")} | {"objective"}
    for row in program.rows.values():
        if row.kind == "ours":
            assert row.ours, row.key
        else:
            assert row.note and not row.ours, row.key
        for key in row.ours:
            assert key in key_types("lora") or key.partition(".")[0] in known, (row.key, key)


@pytest.mark.parametrize("name", FILES)
def test_a_recipe_says_every_default_of_the_other_program(name: str) -> None:
    """No default of ours may decide what is learned."""
    found = keys_of(FILES[name])
    for key in (
        "train.global_batch_size", "train.max_seq_length", "train.max_norm", "train.epochs",
        "train.lr_schedule", "train.lr_ends", "seed", "precision", "data",
        "train.decay_norms_and_biases",
    ):  # fmt: skip
        assert key in found, key
    assert found["train.lr_schedule"] == "constant" or "train.min_lr" in found
    arguments = found["optimizer"]["init_args"]
    assert arguments.keys() == {"lr", "weight_decay", "betas", "eps"}
    assert "val_split_fraction" in found["data"]["init_args"]
    assert any(key.startswith("train.lr_warmup_") for key in found)


@pytest.mark.parametrize(
    ("name", "defaults"),
    [
        ("axolotl", {"train.global_batch_size": 1, "train.epochs": 1, "train.max_seq_length": 512,
                     "train.lr_schedule": "cosine", "train.lr_warmup_run_fraction": 0.03,
                     "train.max_norm": 1.0, "lora_dropout": 0.0}),
        ("llama-factory", {"train.global_batch_size": 8, "train.epochs": 3, "lora_r": 8,
                           "train.max_seq_length": 2048, "train.lr_schedule": "linear",
                           "lora_alpha": 16, "lora_targets": "all-linear", "lora_dropout": 0.0}),
        ("llama-factory-v1", {"train.global_batch_size": 1, "train.epochs": 3,
                              "train.max_seq_length": 2048, "train.lr_schedule": "constant",
                              "train.decay_norms_and_biases": True, "precision": "32-true",
                              "train.max_norm": 1.0, "train.lr_warmup_steps": 0}),
        ("torchtune", {"train.global_batch_size": 1, "train.epochs": 1, "lora_r": 8,
                       "lora_alpha": 16, "train.max_norm": None, "train.max_seq_length": None,
                       "train.lr_schedule": "constant", "lora_dropout": 0.0,
                       "precision": "bf16-true", "train.decay_norms_and_biases": True}),
        ("trl-sft", {"train.global_batch_size": 8, "train.max_seq_length": 1024,
                     "train.lr_schedule": "linear", "memory.activation_checkpointing": True}),
        ("trl-dpo", {"train.global_batch_size": 8, "train.max_seq_length": 1024}),
        ("trl-kto", {"train.global_batch_size": 8, "train.max_seq_length": 1024}),
        ("trl-reward", {"train.global_batch_size": 8, "train.max_seq_length": 1024}),
    ],
)  # fmt: skip
def test_absent_keys_have_the_other_programs_defaults(name: str, defaults: dict[str, Any]) -> None:
    found = keys_of(FILES[name])
    assert {key: found.get(key) for key in defaults} == defaults


@pytest.mark.parametrize(
    ("name", "lr"),
    [
        ("llama-factory", 5e-5),
        ("llama-factory-v1", 1e-4),
        ("trl-sft", 2e-5),
        ("trl-dpo", 1e-6),
        ("trl-kto", 1e-6),
        ("trl-reward", 1e-4),
    ],
)
def test_a_default_rate_is_the_other_programs(name: str, lr: float) -> None:
    assert keys_of(FILES[name])["optimizer"]["init_args"]["lr"] == lr


@pytest.mark.parametrize(
    ("keys", "ours"),
    [
        ({"micro_batch_size": 2, "gradient_accumulation_steps": 4}, {"train.global_batch_size": 8}),
        ({"sample_packing": True, "sequence_len": 1024, "micro_batch_size": 2},
         {"train.global_batch_tokens": 2048, "train.micro_batch_tokens": 2048}),
        ({"val_set_size": 0.1, "evals_per_epoch": 4, "saves_per_epoch": 2},
         {"eval.interval_epochs": 0.25, "train.save_interval_epochs": 0.5}),
        ({"val_set_size": 0.1, "evals_per_epoch": 4, "max_steps": 100, "num_epochs": 1},
         {"eval.interval": 25}),
        ({"evals_per_epoch": 4, "val_set_size": 0},
         {"eval.interval": 0, "eval.final_validation": False}),
        ({"warmup_ratio": 0.1}, {"train.lr_warmup_run_fraction": 0.1}),
        ({"warmup_ratio": 0.1, "max_steps": 55}, {"train.lr_warmup_steps": 5}),
        ({"warmup_steps": 1}, {"train.lr_warmup_steps": 2}),
        ({"load_in_4bit": True, "adapter": "qlora"}, {"quantize": "bnb.nf4-dq"}),
        ({"load_in_8bit": True}, {"quantize": "bnb.int8"}),
        ({"optimizer": "adamw_bnb_8bit"}, {"optimizer": "bitsandbytes.optim.AdamW8bit"}),
        ({"optimizer": "adamw_torch_8bit"}, {"optimizer": "torchao.optim.AdamW8bit"}),
        ({"optimizer": "adamw_torch_4bit"}, {"optimizer": "torchao.optim.AdamW4bit"}),
        ({"rl": "dpo", "datasets": [{"path": "d", "type": "chat_template.default"}]},
         {"objective": "dpo"}),
        ({"adapter": None, "unfrozen_parameters": ["^lm_head", "layers.3"]},
         {"train.only": "^(?:^lm_head)|^(?:layers.3)"}),
        ({"qat": QAT, "adapter": ..., "lora_target_linear": ...},
         {"qat.weights": "int4", "qat.activations": "int8", "qat.group_size": 32}),
        ({"qat": QAT | {"group_size": 256}, "adapter": ...}, {"qat.group_size": 256}),
        ({"fp8": True, "adapter": ...}, {"float8": True, "precision": "bf16-mixed"}),
        ({"reinit_weights": True, "adapter": ...}, {"train.from_scratch": True}),
        ({"bf16": "auto"}, {"precision": "bf16-mixed"}),
        ({"bf16": "auto", "adapter": None}, {"precision": "bf16-true"}),
        ({"cosine_min_lr_ratio": 0.1}, {"train.min_lr": 2e-5}),
        ({"lr_quadratic_warmup": True, "cosine_min_lr_ratio": 0.1},
         {"train.lr_warmup_curve": "quadratic", "train.min_lr": 0}),
        ({"peft_use_rslora": True}, {"lora_variant": "rslora"}),
        ({"lora_target_linear": ..., "lora_target_parameters": ["mlp.experts.down_proj"]},
         {"lora_targets": [], "lora_experts": True}),
        ({"model_config": {"output_router_logits": True}}, {"router_aux_loss_coef": "model"}),
        ({"rl": "orpo", "datasets": [{"path": "d", "type": "chat_template.argilla"}]},
         {"objective": "orpo"}),
        ({"rl": "kto", "datasets": [{"path": "d", "type": "llama3.ultra"}]}, {"objective": "kto"}),
        ({"datasets": ..., "pretraining_dataset": "d", "sample_packing": True, "max_steps": 9,
          "sequence_len": 1024}, {"train.global_batch_tokens": 1024, "data": "JSON"}),
        ({"revision_of_model": "2ee94b0"}, {"checkpoint_dir": "org/base@2ee94b0"}),
        ({"model_revision": "2ee94b0"}, {"checkpoint_dir": "org/base@2ee94b0"}),
        ({"overrides_of_model_config": {"output_router_logits": True}},
         {"router_aux_loss_coef": "model"}),
        ({"noisy_embedding_alpha": 5}, {"train.neftune_noise_alpha": 5}),
        ({"liger_use_token_scaling": True}, {"objective": "dft"}),
        ({"max_steps": 5000}, {"train.lr_warmup_steps": 100}),
        ({}, {"checkpoint.keep_last": 4, "eval.interval": 0}),
        ({"eval_strategy": "epoch", "val_set_size": 0.1}, {"eval.interval_epochs": 1}),
        ({"plugins": ["axolotl.integrations.lm_eval.LMEvalPlugin"]}, {"lora_r": 32}),
        ({"revision_of_model": "v1", "rl": "kto", "adapter": ..., "lora_target_linear": ...,
          "datasets": [{"path": "d", "type": "llama3.ultra"}]}, {"reference": "org/base@v1"}),
    ],
)  # fmt: skip
def test_keys_of_axolotl_become_ours(keys: dict[str, Any], ours: dict[str, Any]) -> None:
    found = keys_of(AXOLOTL, **keys)
    for key, value in ours.items():
        got = found[key]
        assert (got["class_path"] if isinstance(got, dict) else got) == pytest.approx(value), key


@pytest.mark.parametrize(
    ("file", "keys", "ours"),
    [
        (FACTORY, {"gradient_accumulation_steps": 8, "per_device_train_batch_size": 2},
         {"train.global_batch_size": 16}),
        (FACTORY, {"finetuning_type": "full", "pure_bf16": True}, {"precision": "bf16-true"}),
        (FACTORY, {"finetuning_type": "oft"}, {"peft": "oft", "lora_targets": "all-linear"}),
        (FACTORY, {"stage": "dpo", "pref_loss": "orpo"}, {"objective": "orpo"}),
        (FACTORY, {"quantization_bit": 4, "double_quantization": False}, {"quantize": "bnb.nf4"}),
        (FACTORY, {"use_dft_loss": True}, {"objective": "dft"}),
        (FACTORY, {"warmup_ratio": 0.1, "max_steps": 15}, {"train.lr_warmup_steps": 2}),
        (FACTORY_V1, {"peft_config": {"name": "lora"}},
         {"lora_r": 8, "lora_alpha": 16, "lora_dropout": 0.05, "lora_targets": "all-linear"}),
        (FACTORY_V1, {"dist_config": {"name": "fsdp2"}}, {"precision": "bf16-mixed"}),
        (FACTORY_V1, {"micro_batch_size": 2, "global_batch_size": 8},
         {"train.global_batch_size": 8, "train.micro_batch_size": 2}),
        (FACTORY_V1, {"batching_strategy": "dynamic_padding_free", "micro_batch_size": 2},
         {"train.global_batch_tokens": 4096, "train.micro_batch_size": None}),
        (FACTORY_V1, {"peft_config": {"name": "lora"}, "quant_config": {"name": "bnb"}},
         {"quantize": "bnb.nf4-dq"}),
        (FACTORY, {"lora_target": "q_proj, v_proj"},
         {"lora_targets": ["q_proj", "v_proj"], "lora_skip_missing": True}),
        (FACTORY, {"finetuning_type": "freeze"}, {"train.only": r"^\D*[.]{last 2}[.]"}),
        (FACTORY, {"finetuning_type": "freeze", "freeze_trainable_layers": -3,
                   "freeze_trainable_modules": "mlp,self_attn",
                   "freeze_extra_modules": "lm_head"},
         {"train.only": r"^\D*[.]{first 3}[.](?:mlp|self_attn)|lm_head"}),
        (FACTORY_V1, {"peft_config": {"name": "freeze", "freeze_trainable_layers": 4}},
         {"train.only": r"^\D*[.]{last 4}[.]"}),
        (FACTORY_V1, {"train_dataset": "pairs.yaml"}, {"objective": "dpo"}),
        (FACTORY_V1, {"train_dataset": "pairs.yaml", "pref_loss": "simpo"}, {"objective": "simpo"}),
        (SFT, {"use_peft": True, "lora_target_modules": "all-linear", "lora_r": 4},
         {"lora_r": 4, "lora_targets": "all-linear", "lora_alpha": 32}),
        (SFT, {"use_peft": True}, {"lora_targets": "peft-default"}),
        (SFT, {"packing": True, "max_length": 512}, {"train.global_batch_tokens": 4096}),
        (SFT, {"loss_type": "dft"}, {"objective": "dft"}),
        (DPO, {"loss_type": ["ipo"]}, {"objective": "dpo"}),
        (FACTORY, {"model_revision": "v1"}, {"checkpoint_dir": "org/base@v1"}),
        (FACTORY, {"model_revision": "main"}, {"checkpoint_dir": "org/base"}),
        (FACTORY, {"model_revision": "v1", "model_name_or_path": "a/b/c"},
         {"checkpoint_dir": "a/b/c"}),
        (SFT, {"model_revision": "v1"}, {"checkpoint_dir": "org/base@v1"}),
        (FACTORY, {"fp8": True, "finetuning_type": "full"}, {"float8": True}),
        (FACTORY, {"train_from_scratch": True, "finetuning_type": "full"},
         {"train.from_scratch": True}),
        (FACTORY, {"use_muon": True, "finetuning_type": "full"},
         {"optimizer": "torch.optim.Muon", "train.decay_norms_and_biases": True}),
        (FACTORY_V1, {"optim_config": {"name": "muon"}},
         {"optimizer": "torch.optim.Muon", "train.decay_norms_and_biases": True}),
    ],
)  # fmt: skip
def test_keys_of_the_others_become_ours(
    file: dict[str, Any], keys: dict[str, Any], ours: dict[str, Any]
) -> None:
    found = keys_of(file, **keys)
    for key, value in ours.items():
        got = found[key]
        assert (got["class_path"] if isinstance(got, dict) else got) == value, key


@pytest.mark.parametrize(
    ("keys", "options"),
    [
        ({"rl": "orpo"}, {"weight": 0.1}),
        ({"rl": "orpo", "orpo_alpha": 0.2}, {"weight": 0.2}),
        ({"rl": "orpo", "orpo_alpha": 0.2, "rl_beta": 0.3}, {"weight": 0.3}),
        ({"rl": "simpo", "cpo_alpha": 0, "rl_beta": 2.0, "simpo_gamma": 1.0},
         {"beta": 2.0, "margin": 0.5}),
        ({"rl": "dpo", "trl": {"beta": 0.4}, "rl_beta": 0.3}, {"loss": "sigmoid", "beta": 0.4}),
        ({"rl": "dpo"}, {"loss": "sigmoid", "beta": 0.1}),
        ({"rl": "dpo", "dpo_label_smoothing": 0.1},
         {"loss": "conservative", "beta": 0.1, "label_noise": 0.1}),
        ({"rl": "ipo", "dpo_label_smoothing": 0.1}, {"loss": "ipo", "beta": 0.1}),
    ],
)  # fmt: skip
def test_preferences_of_axolotl_have_the_numbers_that_it_takes(
    keys: dict[str, Any], options: dict[str, Any]
) -> None:
    pairs = [{"path": "d", "type": "chat_template.default"}]
    assert keys_of(AXOLOTL, datasets=pairs, **keys)["objective"]["init_args"] == options


def test_muon_of_llama_factory_is_that_of_torch_with_its_numbers() -> None:
    numbers = {"weight_decay": 0.1, "adam_beta2": 0.98, "learning_rate": 1e-4}
    found = keys_of(FACTORY, finetuning_type="full", use_muon=True, **numbers)["optimizer"]
    assert found["init_args"] == {"lr": 1e-4, "weight_decay": 0.1, "betas": [0.9, 0.98]}
    newer = keys_of(FACTORY_V1, optim_config={"name": "muon", "ns_steps": 6}, learning_rate=1e-5)
    assert newer["optimizer"]["init_args"] == {
        "lr": 1e-3, "weight_decay": 0.1, "momentum": 0.95, "nesterov": True, "ns_steps": 6,
        "betas": [0.9, 0.95],
    }  # fmt: skip


@pytest.mark.parametrize(
    ("file", "keys", "key"),
    [
        (AXOLOTL, {"warmup_ratio": 0.1}, "warmup_ratio"),
        (AXOLOTL, {}, "warmup_ratio"),
        (AXOLOTL, {"max_steps": 50}, "warmup_ratio"),
        (AXOLOTL, {"val_set_size": 0.1}, "val_set_size"),
        (FACTORY, {"val_size": 0.1}, "val_size"),
        (SFT, {"test_split_size": 0.1}, "test_split_size"),
    ],
)
def test_what_is_rounded_otherwise_is_told(
    file: dict[str, Any], keys: dict[str, Any], key: str
) -> None:
    assert any(difference.startswith(f"{key}:") for difference in translation(file, **keys).differs)


@pytest.mark.parametrize("name", FILES)
def test_records_to_train_on_are_not_those_to_validate_on(name: str) -> None:
    found = keys_of(FILES[name])
    assert (found["eval.interval"], found["eval.final_validation"]) == (0, False)


@pytest.mark.parametrize(
    ("file", "keys"),
    [
        (AXOLOTL, {"val_set_size": 0.1}),
        (FACTORY, {"val_size": 0.1}),
        (FACTORY, {"eval_dataset": "own"}),
        (SFT, {"eval_strategy": "steps"}),
    ],
)
def test_records_held_out_are_validated_on_at_the_end(
    file: dict[str, Any], keys: dict[str, Any]
) -> None:
    assert "eval.final_validation" not in keys_of(file, **keys)


def test_devices_of_axolotl_that_are_weighed_equally_are_told() -> None:
    def told(ranks: int) -> bool:
        differs = translation(AXOLOTL, ranks=ranks).differs
        return any("losses of devices" in difference for difference in differs)

    assert told(2) and not told(1)


def test_oft_of_llama_factory_has_its_own_keys_and_none_of_lora() -> None:
    oft = {"finetuning_type": "oft", "oft_block_size": 16, "oft_target": "q_proj,v_proj"}
    found = keys_of(FACTORY, **oft)
    assert found["peft"]["init_args"] == {"r": 0, "oft_block_size": 16}
    assert found["lora_targets"] == ["q_proj", "v_proj"]
    assert not {"lora_r", "lora_alpha", "lora_dropout", "lora_init"} & found.keys()


@pytest.mark.parametrize("name", FILES)
def test_devices_multiply_the_batch(name: str) -> None:
    one, four = (keys_of(FILES[name], ranks=ranks) for ranks in (1, 4))
    assert four["train.global_batch_size"] == 4 * one["train.global_batch_size"]


@pytest.mark.parametrize(
    ("name", "keys", "missing"),
    [
        ("axolotl", {"qat": {"weight_dtype": "int4"}}, "quantisation-aware training for int4"),
        (
            "axolotl",
            {"qat": {"weight_dtype": "nvfp4", "activation_dtype": "nvfp4"}},
            "nvfp4 weights and nvfp4 activations",
        ),
        ("axolotl", {"qat": QAT | {"fake_quant_after_n_steps": 9}, "adapter": ...}, "later step"),
        ("axolotl", {"qat": QAT | {"quantize_embedding": True}, "adapter": ...}, "embedding"),
        ("axolotl", {"qat": QAT}, "quantisation-aware training of adapters"),
        ("axolotl", {"unfrozen_parameters": ["^lm_head.*"]}, "trains nothing"),
        ("axolotl", {"unfrozen_parameters": [".*layers.3"]}, "trains a part"),
        ("axolotl", {"fp8": True}, "FP8 training of adapters"),
        ("llama-factory", {"fp8": True}, "FP8 training of adapters"),
        ("axolotl", {"lisa_n_layers": 4}, "LISA"),
        ("axolotl", {"optimizer": "muon"}, "Muon that leaves vectors untrained"),
        ("axolotl", {"kd_trainer": True}, "knowledge distillation"),
        ("axolotl", {"peft_autocast_adapter_dtype": False}, "adapters in 16 bits"),
        (
            "axolotl",
            {"rl": "simpo", "datasets": [{"path": "d", "type": "chat_template.default"}]},
            "further loss ... cpo_alpha 0",
        ),
        ("axolotl", {"processor_type": "AutoProcessor"}, "loss on images"),
        ("axolotl", {"plugins": ["some.where.Plugin"]}, "plugin some.where.Plugin"),
        ("axolotl", {"num_epochs": 1.5}, "a part of an epoch"),
        ("axolotl", {"model_config": {"sliding_window": 9}}, "changes of config.json"),
        ("axolotl", {"datasets": ..., "pretraining_dataset": "d"}, "one document to another"),
        ("axolotl", {"made_up": 3}, "does not know"),
        ("llama-factory", {"finetuning_type": "boft"}, "BOFT"),
        ("llama-factory", {"use_galore": True}, "GaLore"),
        ("llama-factory", {"train_from_scratch": True}, "new weights"),
        ("llama-factory", {"dataset": "unheard"}, "not in data/dataset_info.json"),
        ("llama-factory-v1", {"train_dataset": "talks.yaml"}, "one sample for each turn"),
        (
            "llama-factory-v1",
            {"peft_config": {"name": "freeze", "freeze_trainable_layers": 0}},
            "no layer",
        ),
        ("llama-factory", {"use_muon": True}, "Muon for adapters"),
        (
            "llama-factory-v1",
            {"optim_config": {"name": "muon", "adamw_eps": 1e-6}},
            "another eps of AdamW",
        ),
        ("llama-factory-v1", {"optim_config": {"name": "lion"}}, "the optimizer lion"),
        ("axolotl", {"num_labels": 3}, "classification"),
        ("axolotl", {"model_type": "AutoModelForSequenceClassification"}, "classification"),
        ("llama-factory", {"stage": "cls"}, "the stage cls"),
        ("llama-factory", {"num_labels": 3}, "does not know"),
        ("llama-factory-v1", {"model_class": "cls"}, "classification"),
        ("trl-sft", {"train_sampling_strategy": "curriculum"}, "the order curriculum of samples"),
        ("trl-sft", {"dataset_streaming": True}, "streaming"),
        ("trl-dpo", {"f_divergence_type": "js_divergence"}, "divergence"),
    ],
)
def test_what_changes_what_is_learned_is_refused_by_name_or_accepted(
    name: str, keys: dict[str, Any], missing: str
) -> None:
    (key,) = keys.keys() - {"adapter", "datasets"}
    message = refusal(FILES[name], **keys)
    assert says(message, f"{key} ... {missing} ... --without {key}")
    accepted = translation(FILES[name], key, **keys)
    assert accepted.accepted == (key,) and not accepted.refused


@pytest.mark.parametrize(
    ("entry", "keys"),
    [
        ({"train_on_eos": "all"}, {}),
        ({"train_on_eos": "last"}, {}),
        ({"train_on_eot": "none"}, {}),
        ({"message_field_training": "train"}, {}),
        ({"roles_to_train": ["user"]}, {}),
        ({}, {"train_on_inputs": True}),
    ],
)
def test_turns_that_axolotl_trains_otherwise_are_refused(
    entry: dict[str, Any], keys: dict[str, Any]
) -> None:
    chats = {"path": "d.jsonl", "type": "chat_template"}
    assert translation(AXOLOTL, datasets=[chats | {"train_on_eos": "turn"}]).refused == ()
    (key,) = [f"datasets.{name}" for name in entry] or keys
    assert says(refusal(AXOLOTL, datasets=[chats | entry], **keys), f"{key}:")


def test_only_keys_of_the_file_can_be_accepted() -> None:
    assert says(refusal(AXOLOTL, "lora_rr"), "--without ... lora_rr ... lora_r")


@pytest.mark.parametrize(
    ("name", "keys"),
    [
        ("axolotl", {"wandb_project": "p", "use_mlflow": True, "hub_model_id": "me/x",
                     "trust_remote_code": True, "auto_resume_from_checkpoints": True}),
        ("llama-factory", {"report_to": "wandb", "push_to_hub": True, "hub_model_id": "me/x",
                           "trust_remote_code": True, "resume_from_checkpoint": "x"}),
        ("trl-sft", {"report_to": "all", "push_to_hub": True, "trust_remote_code": True,
                     "resume_from_checkpoint": True}),
    ],
)  # fmt: skip
def test_a_file_never_pushes_logs_resumes_or_trusts_code(name: str, keys: dict[str, Any]) -> None:
    found = keys_of(FILES[name], **keys)
    assert found == keys_of(FILES[name])
    assert not found.keys() & {"logger_name", "resume", "plugin"}
    kinds = {row.kind for key, _, row in translation(FILES[name], **keys).became if key in keys}
    assert kinds == {"no effect"}


SENDS = re.compile(
    "push|hub_|_hub|wandb|mlflow|comet|swanlab|trackio|tensorboard|otel|report_to|run_name|logging_dir"
    "|resume|restore|trust|remote_code|api_key|token$|secret|webhook"
)
"""Keys that could send, log to a service, resume or trust code."""
NO_SENDING = {"pad_token", "eos_token"}


@pytest.mark.parametrize("reader", READERS, ids=lambda reader: reader.name)
def test_no_key_can_send_log_resume_or_trust_code(reader: Reader) -> None:
    program = reader.opened
    for key in filter(SENDS.search, program.rows.keys() - NO_SENDING):
        assert program.rows[key].kind == "no effect", key
    for row in program.rows.values():
        heads = {key.partition(".")[0] for key in row.ours}
        assert not heads & {"logger_name", "log", "resume", "plugin", "access_token"}, row.key


@pytest.mark.parametrize("name", FILES)
def test_results_go_to_a_url_only_if_the_command_line_says_so(name: str) -> None:
    found = translation(FILES[name], output_dir="s3://bucket/run")
    assert "out_dir" not in found.recipe
    assert any(difference.startswith("output_dir:") for difference in found.differs)


@pytest.mark.parametrize("name", FILES)
def test_a_file_is_read_in_the_place_of_a_recipe(name: str) -> None:
    file = write(FILES[name])
    read = read_recipe(
        [file], [("train.max_steps", "7"), ("devices", "3")], method="lora", terms=Terms(devices=2)
    )
    _, recipe = converted(file, Terms(devices=2))
    assert read.train.max_steps == 7 and read.devices == 3
    assert read.train.global_batch_size == recipe.train.global_batch_size
    assert isinstance(read, LoraRecipe if name in ("axolotl", "llama-factory") else Recipe)
    assert read.method == recipe.method


def test_a_difference_is_accepted_only_of_a_file_of_another_program() -> None:
    file = write({"checkpoint_dir": "x"})
    with pytest.raises(UserError, match=key_words("--without qat")):
        read_recipe([file], terms=Terms(without=("qat",)))


def test_sizes_and_weights_of_data_sets_become_those_of_sources() -> None:
    found = translation(FACTORY_V1, train_dataset="sized.yaml")
    first, second = found.recipe["data"]["init_args"]["sources"]
    assert (first["samples"], second["weight"]) == (50, 2.0)
    assert any("repetitions" in difference for difference in found.differs)
    read_recipe([write(FACTORY_V1 | {"train_dataset": "sized.yaml"})])


def test_the_prompt_of_pre_training_is_a_document() -> None:
    for name, columns in (("documents", None), ("own", {"text": "instruction"})):
        options = keys_of(FACTORY, stage="pt", dataset=name)["data"]["init_args"]
        assert options.get("columns") == columns


@pytest.mark.parametrize(
    ("rl", "kind", "columns"),
    [
        ("dpo", "chat_template.default", None),
        ("dpo", "chatml.default", {"instruction": "prompt"}),
        ("dpo", "chatml", {"instruction": "prompt"}),
        ("ipo", "llama3.intel", {"instruction": "question"}),
        ("dpo", "chatml.icr", {"instruction": "input"}),
        ("simpo", "chatml.prompt_pairs", {"instruction": "prompt"}),
        ("dpo", "chatml.ultra", None),
        ("dpo", "llama3.argilla_chat", None),
        ("kto", "chatml.argilla", {"output": "completion"}),
        ("kto", "llama3.intel", {"instruction": "question", "output": "completion"}),
        ("kto", "llama3.ultra", {"instruction": "prompt", "output": "completion"}),
    ],
)
def test_texts_of_preferences_of_axolotl_are_rendered(
    rl: str, kind: str, columns: dict[str, str] | None
) -> None:
    file = AXOLOTL | {"rl": rl, "cpo_alpha": 0, "datasets": [{"path": "org/d", "type": kind}]}
    options = keys_of(file)["data"]["init_args"]
    head = kind.partition(".")[0]
    assert options["chat_template"] == ("tokenizer" if head == "chat_template" else head)
    assert options.get("columns") == columns
    told = any(difference.startswith("datasets.type: the question") for difference in
               translation(file).differs)  # fmt: skip
    assert told == (kind in ("chatml", "chatml.default"))


def test_the_question_of_pairs_is_the_first_that_a_file_has() -> None:
    Path("pairs.jsonl").write_text('{"question": "q", "chosen": "a", "rejected": "b"}')
    entry = {"path": "pairs.jsonl", "type": "chatml.default"}
    found = translation(AXOLOTL, rl="dpo", datasets=[entry])
    assert found.recipe["data"]["init_args"]["columns"] == {"instruction": "question"}
    assert not any(difference.startswith("datasets.type:") for difference in found.differs)


TASK = "Below is an instruction that describes a task"
WITH_INPUT = f"{TASK}, paired with an input that provides further context."
RESPOND = "Write a response that appropriately completes the request."
CHATML = "<|im_start|>system\n{}<|im_end|>\n<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize(
    ("kind", "with_input", "without"),
    [
        # As AlpacaPrompter of axolotl writes them (src/axolotl/prompters.py).
        ("alpaca:chat", f"SYSTEM: {WITH_INPUT} {RESPOND}\nUSER: add\n1, 2\nASSISTANT:",
         f"SYSTEM: {TASK}. {RESPOND}\nUSER: add\nASSISTANT:"),
        ("alpaca:phi",
         f"<|system|>\n{WITH_INPUT} {RESPOND}<|end|>\n<|user|>\nadd<|end|>1, 2<|assistant|>",
         f"<|system|>\n{TASK}. {RESPOND}<|end|>\n<|user|>\nadd<|end|>\n<|assistant|>\n"),
        ("alpaca:chatml", CHATML.format(f"{WITH_INPUT} {RESPOND}", "add\n1, 2"),
         CHATML.format(f"{TASK}. {RESPOND}", "add")),
        ("alpaca_chat.load_no_prompt", "USER: add\n1, 2\nASSISTANT:", "USER: add\nASSISTANT:"),
        ({"system_prompt": "S ", "field_input": "input", "format": "Q {instruction} {input} A",
          "no_input_format": "Q {instruction} A"}, "S Q add 1, 2 A", "S Q add A"),
    ],
)  # fmt: skip
def test_a_prompt_of_axolotl_may_be_another_one_without_an_input(
    kind: str | dict[str, str], with_input: str, without: str
) -> None:
    file = AXOLOTL | {"datasets": [{"path": "d.jsonl", "type": kind}]}
    found = translation(file)
    assert any("apart" in difference for difference in found.differs)
    recipe = read_recipe([write(file)])
    style = resolve_prompt_style(recipe.data["init_args"]["prompt_style"])
    assert style.apply(prompt="add", input="1, 2") == with_input
    assert style.apply(prompt="add", input="") == without


def test_types_of_instructions_of_axolotl_name_their_columns() -> None:
    def options(kind: str) -> dict[str, Any]:
        datasets = [{"path": "d.jsonl", "type": kind}]
        found: dict[str, Any] = keys_of(AXOLOTL, datasets=datasets)["data"]["init_args"]
        return found

    assert options("gpteacher")["columns"] == {"output": "response"}
    assert options("gpteacher")["prompt_style"] == "alpaca"
    asked = options("alpaca_chat.load_qa")
    assert asked["columns"] == {"instruction": "question", "output": "answer"}
    text = asked["prompt_style"]["without_input"]
    assert text.startswith("SYSTEM: Below is an instruction from a USER")
    assert text.endswith("the request.\n\n\nUSER: {instruction}\nASSISTANT:")
    entry = [{"path": "d.jsonl", "type": "alpaca:unheard"}]
    assert says(refusal(AXOLOTL, datasets=entry), "prompt format alpaca:unheard")


def test_a_file_of_a_hub_data_set_is_read_alone() -> None:
    def entry(files: Any) -> dict[str, Any]:
        return {"path": "org/data", "data_files": files, "type": "completion"}

    for files in ("x.jsonl.zst", ["x.jsonl.zst"]):
        options = keys_of(AXOLOTL, datasets=[entry(files)])["data"]["init_args"]
        assert (options["path"], options["data_files"]) == ("org/data", "x.jsonl.zst")
    assert says(refusal(AXOLOTL, datasets=[entry(["a.json", "b.json"])]), "several files")


@pytest.mark.parametrize(
    ("keys", "options"),
    [
        ({}, {"image_max_pixels": 589824, "image_min_pixels": 1024}),
        ({"image_max_pixels": 9999, "freeze_vision_tower": True}, {"image_max_pixels": 9999}),
        ({"dataset": "own"}, {"image_max_pixels": None, "image_min_pixels": None}),
        ({"dataset": "own", "image_max_pixels": 9999}, {"image_max_pixels": None}),
        ({"dataset": "own", "freeze_vision_tower": False}, {"image_max_pixels": None}),
    ],
)
def test_images_of_llama_factory_have_its_sizes(
    keys: dict[str, Any], options: dict[str, Any]
) -> None:
    found = keys_of(FACTORY | {"dataset": "seen"} | keys)["data"]["init_args"]
    assert {name: found.get(name) for name in options} == options


@pytest.mark.parametrize(
    ("keys", "parts"),
    [
        ({}, set()),
        ({"chat_template": "qwen2_vl", "lora_target_modules": ["q_proj", "o_proj"]}, set()),
        ({"adapter": ..., "lora_target_modules": ...}, {"images.projector", "images.tower"}),
        ({"adapter": ..., "lora_target_modules": ..., "freeze_mm_modules": True}, set()),
    ],
)
def test_parts_that_axolotl_trains_are_trained(keys: dict[str, Any], parts: set[str]) -> None:
    recipe = keys_of(AXOLOTL, **{**SEEING, **keys})
    known = ("images.projector", "images.tower", "train.freeze")
    assert {key for key in known if recipe.get(key)} == parts
    assert recipe["data"]["init_args"]["train_on"] == "assistant"


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"lora_target_linear": True}, "adapters in parts that see"),
        ({"lora_target_modules": ["q_proj"]}, "adapters in parts that see"),
        ({"image_size": 512}, "images of another size"),
        ({"rl": "orpo"}, "images in preference pairs"),
        ({"chat_template": "llava"}, "the loss on images"),
    ],
)
def test_what_axolotl_does_otherwise_with_images_is_refused(
    keys: dict[str, Any], words: str
) -> None:
    assert says(refusal(AXOLOTL, **{**SEEING, **keys}), words)


@pytest.mark.parametrize(
    ("keys", "parts"),
    [
        ({}, set()),
        ({"freeze_vision_tower": False}, {"images.tower"}),
        ({"freeze_multi_modal_projector": False}, {"images.projector"}),
        (
            {"freeze_multi_modal_projector": False, "freeze_vision_tower": False},
            {"images.projector", "images.tower"},
        ),
        ({"dataset": "own", "freeze_vision_tower": False}, set()),
        (
            {"freeze_multi_modal_projector": False, "freeze_language_model": True},
            {"images.projector", "train.freeze"},
        ),
    ],
)
def test_parts_that_llama_factory_trains_whole_are_trained(
    keys: dict[str, Any], parts: set[str]
) -> None:
    recipe = keys_of(FACTORY | {"dataset": "seen", "finetuning_type": "full"} | keys)
    known = ("images.projector", "images.tower", "train.freeze")
    assert {key for key in known if recipe.get(key)} == parts


@pytest.mark.parametrize(
    ("key", "keys"),
    [
        ("freeze_vision_tower", {"freeze_vision_tower": False}),
        ("freeze_multi_modal_projector", {"freeze_multi_modal_projector": False}),
        ("freeze_language_model", {"freeze_language_model": True}),  # with LoRA
        ("image_do_pan_and_scan", {"image_do_pan_and_scan": True}),
        ("crop_to_patches", {"crop_to_patches": True}),
        ("media_dir", {"media_dir": "elsewhere"}),
        ("dataset", {"dataset": "far"}),
        ("dataset", {"dataset": "otherwise"}),
        ("dataset", {"dataset": "heard"}),
        ("stage", {"stage": "dpo"}),
    ],
)
def test_what_llama_factory_does_otherwise_with_images_is_refused(
    key: str, keys: dict[str, Any]
) -> None:
    message = refusal(FACTORY | {"dataset": "seen"} | keys)
    assert says(message, f"{key}:", f"--without {key}")
    assert not translation(FACTORY | {"dataset": "seen"} | keys, key).refused


@pytest.mark.parametrize(
    ("keys", "options"),
    [
        ({"min_sample_len": 64}, {"min_tokens": 64}),
        ({"dataset_exact_deduplication": True}, {"drop_equal": True}),
        (
            {"datasets": [{"path": "d", "type": "chat_template", "drop_system_message": True}]},
            {"drop_system": True},
        ),
        ({"min_sample_len": 64, "reward_model": True}, {"min_tokens": None}),
    ],
)
def test_keys_of_axolotl_become_options_of_data(
    keys: dict[str, Any], options: dict[str, Any]
) -> None:
    found = keys_of(AXOLOTL, "datasets", **keys)["data"]["init_args"]
    assert {name: found.get(name) for name in options} == options


def test_a_version_with_a_slash_in_its_name_is_refused() -> None:
    assert says(refusal(AXOLOTL, revision_of_model="refs/pr/1"), "revision_of_model", "slash")


def test_a_directory_of_data_sets_may_be_on_the_hub(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def download(repository: str, file: str, *, repo_type: str) -> str:
        if (repository, repo_type) != ("org/sets", "dataset"):
            raise FileNotFoundError(repository)
        return str(here / "data" / file)

    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
    found = keys_of(FACTORY, dataset_dir="REMOTE:org/sets", max_samples=5)["data"]["init_args"]
    assert (found["path"], found["data_files"], found["split"]) == (
        "org/sets", "own.json", "train[:5]")  # fmt: skip
    message = refusal(FACTORY, dataset_dir="REMOTE:org/gone")
    assert says(message, "dataset ... own ... REMOTE:org/gone/dataset_info.json ... dataset_dir")
    assert "own is not in" not in message
    online = keys_of(FACTORY, dataset_dir="ONLINE", dataset="org/a, org/b")["data"]["init_args"]
    assert [source["path"] for source in online["sources"]] == ["org/a", "org/b"]


@pytest.mark.parametrize("keys", [{}, {"dataset_dir": None}])
def test_a_missing_list_of_data_sets_is_named_with_the_entry_of_the_file(
    keys: dict[str, Any], tmp_path: Path
) -> None:
    (tmp_path / "data/dataset_info.json").unlink()
    message = refusal(FACTORY, dataset="mine", **keys)
    assert says(message, f"dataset ... mine ... {tmp_path}/data/dataset_info.json ... dataset_dir")
    # What the message offers is possible, also where the file leaves the folder to its default.
    assert says(message, "--without dataset.")
    assert keys_of(FACTORY, "dataset", dataset="mine", **keys)["data"]


def test_data_sets_of_llama_factory_are_found_by_name() -> None:
    options = keys_of(FACTORY, dataset="own, chats")["data"]["init_args"]
    assert [source["path"] for source in options["sources"]] == ["data/own.json", "data/chats.json"]
    assert options["sources"][1]["columns"] == {"messages": "talk"}
