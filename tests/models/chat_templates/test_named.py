from pathlib import Path

import pytest
from chats import write_chat_tokenizer

from ftkit.errors import UserError
from ftkit.models.chat_templates.template import NAMED, resolve_chat_template
from ftkit.models.pretrained.tokenizer import Tokenizer


def test_it_is_a_name_a_file_or_the_tokenizers(tmp_path: Path) -> None:
    tokenizer = Tokenizer(write_chat_tokenizer(tmp_path, chat_template="its {{ eos_token }}"))
    file = tmp_path / "own.jinja"
    file.write_text("mine {{ bos_token }}")
    assert resolve_chat_template("tokenizer", tokenizer).render([]) == "its </s>"
    assert resolve_chat_template(file, tokenizer).render([]) == "mine <s>"
    for name in NAMED:
        assert resolve_chat_template(name, tokenizer).name == name


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("chatlm", "data.chat_template is chatlm, .*\nTry --data.chat_template chatml"),
        ("nowhere.jinja", "the path of a jinja file"),
        ("tokenizer", "has no chat template, as those of base models.\n.* zephyr"),
        (5, "data.chat_template is 5"),
    ],
)
def test_anything_else_is_refused(value: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=message):
        resolve_chat_template(value, Tokenizer(write_chat_tokenizer(tmp_path)))


def test_a_file_that_is_no_text_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "own.jinja"
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(UserError, match=r"own.jinja is not UTF-8 text"):
        resolve_chat_template(file, Tokenizer(write_chat_tokenizer(tmp_path)))
