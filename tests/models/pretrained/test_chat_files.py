"""What says beside a model how it is asked: the template and the end tokens that were trained."""

import json
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest
from tiny import make_llama
from transformers import AutoTokenizer, GenerationConfig

from ftkit.errors import UserError
from ftkit.models.pretrained.base_model import open_base, weights
from ftkit.models.pretrained.save import chat_files, save_hf, save_in_own_layout
from ftkit.models.pretrained.tokenizer import end_tokens

TRAINED = (
    "{{ bos_token }}{% for message in messages %}<{{ message.role }}>{{ message.content }}"
    "{{ eos_token }}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
OTHER = "{% for message in messages %}[{{ message.content }}]{% endfor %}"
MESSAGES = [{"role": "user", "content": "red"}, {"role": "assistant", "content": "cat"}]


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return make_llama(tmp_path / "tiny")


def write(directory: Path, name: str, **changes: Any) -> None:
    """Change what a settings file says."""
    file = directory / name
    settings = json.loads(file.read_text()) if file.exists() else {}
    file.write_text(json.dumps(settings | changes))


def saved(base: Path, out: Path, stop_ids: Collection[int] = (1,)) -> Path:
    model = open_base(str(base))
    save_hf(model, weights(model), out, others=chat_files(model, TRAINED, stop_ids))
    return out


def test_transformers_renders_what_was_trained_whatever_the_base_model_had(
    base: Path, tmp_path: Path
) -> None:
    for number, change in enumerate(
        [
            {},
            {"chat_template": OTHER},
            {"chat_template": [{"name": name, "template": OTHER} for name in ("default", "rag")]},
        ]
    ):
        write(base, "tokenizer_config.json", **change)
        tokenizer = AutoTokenizer.from_pretrained(saved(base, tmp_path / str(number)))
        text = tokenizer.apply_chat_template(MESSAGES, add_generation_prompt=True, tokenize=False)
        assert text == "<s><user>red</s><assistant>cat</s><assistant>"
    (base / "chat_template.jinja").write_text(OTHER)
    tokenizer = AutoTokenizer.from_pretrained(saved(base, tmp_path / "jinja"))
    assert tokenizer.chat_template == TRAINED


@pytest.mark.extensions
def test_other_programs_find_no_other_template(base: Path, tmp_path: Path) -> None:
    write(base, "tokenizer_config.json", chat_template=OTHER)
    write(base, "chat_template.json", chat_template=OTHER)
    out = saved(base, tmp_path / "out")
    for name in ("tokenizer_config.json", "chat_template.json"):
        assert json.loads((out / name).read_text())["chat_template"] == TRAINED
    model = open_base(str(base))
    save_in_own_layout(
        model,
        weights(model),
        tmp_path / "lit",
        others=chat_files(model, TRAINED, (1,)),
        layout="litgpt",
    )
    assert (tmp_path / "lit" / "chat_template.jinja").read_text() == TRAINED


def test_generation_ends_with_the_trained_tokens_and_is_else_as_it_was(
    base: Path, tmp_path: Path
) -> None:
    write(base, "generation_config.json", temperature=0.6, top_p=0.9, do_sample=True)
    out = saved(base, tmp_path / "out", stop_ids={7, 1})
    found = GenerationConfig.from_pretrained(out)
    assert found.eos_token_id == [1, 7]
    assert (found.temperature, found.top_p, found.bos_token_id) == (0.6, 0.9, 0)
    # Else transformers takes end tokens from config.json instead.
    assert "_from_model_config" not in json.loads((out / "generation_config.json").read_text())
    assert end_tokens(out) == {1, 7}


def test_a_model_without_generation_settings_gets_some(base: Path, tmp_path: Path) -> None:
    (base / "generation_config.json").unlink()
    write(base, "config.json", pad_token_id=3)
    found = json.loads((saved(base, tmp_path / "out") / "generation_config.json").read_text())
    assert found == {"bos_token_id": 0, "pad_token_id": 3, "eos_token_id": 1}


def test_end_tokens_are_those_of_the_settings(base: Path) -> None:
    assert end_tokens(base) == {1}
    write(base, "generation_config.json", eos_token_id=[5, 6])
    assert end_tokens(base) == {5, 6}
    (base / "generation_config.json").unlink()
    write(base, "config.json", eos_token_id=9)
    assert end_tokens(base) == {9}
    write(base, "config.json", eos_token_id=None)
    assert end_tokens(base) == frozenset()
    (base / "generation_config.json").write_text("[]")
    with pytest.raises(UserError, match="not a JSON object"):
        end_tokens(base)
