"""YAML that is damaged or explodes: one message, before anything is made of it."""

import os
import socket
import sys
from pathlib import Path

import pytest
import yaml
from messages import key_words

from ftkit.errors import UserError
from ftkit.utils.yaml_files import load_yaml, parse_yaml


def repeated(first: str, rest: str, levels: int = 30) -> str:
    """Lines that each name the one before ten times."""
    lines = [f"a0: &a0 {first}"]
    for level in range(1, levels):
        ten = ", ".join([f"*a{level - 1}"] * 10)
        lines.append(f"a{level}: &a{level} {rest.format(ten)}")
    return "\n".join(lines)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("a: " + "[" * 100_000, "nested too deeply"),
        ("a: " + "{a: " * 50_000, "nested too deeply"),
        ("\n".join(" " * level + "a:" for level in range(500)), "nested too deeply"),
        ("a: !!int foo", "'foo' ... int"),
        ("a: !!bool foo", "'foo' ... bool"),
        ("a: !!float foo", "cannot be read as float"),
        ("a: !!timestamp foo", "cannot be read as timestamp"),
        ("a: !!int ''", "cannot be read as int"),
        ("a: " + "9" * 5000, "cannot be read as int"),
        ("a: 0x" + "f" * 5000, "cannot be read as int"),
        ("a: 1" + ":1" * 100_000, "cannot be read as int"),
        ("a: 1" + ":1" * 400 + ".5", "cannot be read as float"),
        (repeated("{x: 1}", "{{<<: [{}]}}"), "more than 100,000 values"),
        (repeated("[1, 1]", "[{}]"), "more than 100,000 values"),
        ("a: &a\n  x: *a", "it holds itself"),
        ("a: &a [1, {b: *a}]", "it holds itself"),
        ("a: &a {<<: *a}", "it holds itself"),
        ("? [a]\n: 1", "a key must be a single word"),
    ],
)
def test_damaged_or_exploding_yaml_is_invalid(text: str, reason: str, tmp_path: Path) -> None:
    with pytest.raises(yaml.YAMLError, match=key_words(reason)):
        parse_yaml(text)
    file = tmp_path / "recipe.yaml"
    file.write_text(text)
    with pytest.raises(UserError, match=key_words(f"--config {file} ... YAML", reason)):
        load_yaml(file, "--config ")


def test_the_depth_is_bounded_whatever_pythons_own_limit_is() -> None:
    """`torch.compile` raises it."""
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(100_000)
    try:
        with pytest.raises(yaml.YAMLError, match="nested too deeply"):
            parse_yaml("[" * 2_000 + "]" * 2_000)
    finally:
        sys.setrecursionlimit(before)


def test_aliases_and_merge_keys_are_read() -> None:
    text = "a: &a {x: 1}\nb: {<<: *a, y: 2}\nc: [*a, *a]"
    assert parse_yaml(text) == {"a": {"x": 1}, "b": {"x": 1, "y": 2}, "c": [{"x": 1}, {"x": 1}]}
    assert parse_yaml("") is None


class TestFilesThatAreNone:
    def test_a_pipe_a_socket_a_device_and_a_directory_are_refused_unread(
        self, tmp_path: Path
    ) -> None:
        os.mkfifo(tmp_path / "pipe")
        with socket.socket(socket.AF_UNIX) as listening:
            listening.bind(str(tmp_path / "socket"))
            for path in (tmp_path / "pipe", tmp_path / "socket", Path("/dev/zero"), tmp_path):
                with pytest.raises(UserError, match=key_words(f"--config {path} ... regular file")):
                    load_yaml(path, "--config ")

    def test_a_file_that_is_too_large_for_a_recipe_is_refused(self, tmp_path: Path) -> None:
        file = tmp_path / "recipe.yaml"
        file.write_text("a: 1\n" * 2**20)
        with pytest.raises(UserError, match="which no recipe needs"):
            load_yaml(file)
