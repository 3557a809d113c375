"""Commands that read a run, a checkpoint, a result or a model, given its url."""

from collections.abc import Callable
from pathlib import Path

import pytest
from object_servers import SECRET, Bucket, Proxy

from ftkit.cli import app

ASKED = ("--prompt", "red", "--max_new_tokens", 4, "--accelerator", "cpu")


@pytest.mark.parametrize(
    "asked",
    [
        pytest.param(("/checkpoints/step-00000004",), id="a checkpoint", marks=pytest.mark.slow),
        pytest.param(("", "/final"), id="others", marks=pytest.mark.matrix),
    ],
)
def test_commands_that_read_accept_a_url_as_a_directory(
    run: Callable[..., str],
    s3: Proxy,
    bucket: Bucket,
    tiny_base: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    asked: tuple[str, ...],
) -> None:
    """And says of it what it says of a copy; the base model lies at a url, too."""
    for path in tiny_base.iterdir():
        bucket.write(f"read/base/{path.name}", path.read_bytes())
    url, base = "s3://bucket/read/run", "s3://bucket/read/base"
    run("a", url, "--checkpoint_dir", base)
    copy = bucket.fetch("read/run", tmp_path / "copy")
    heard = []

    def said(*words: object) -> str:
        assert app.run([str(word) for word in words]) == 0
        out, err = capsys.readouterr()
        heard.append(out + err)
        return out

    def equal(command: str, inside: str, *more: object) -> str:
        answers = [said(*command.split(), f"{place}{inside}", *more) for place in (url, copy)]
        assert answers[0].replace(url, "RUN") == answers[1].replace(str(copy), "RUN")
        assert answers[0]
        return answers[0]

    for inside in asked:
        equal("generate", inside, *ASKED)
    equal("evaluate", "", "--exact_match", 0, "--accelerator", "cpu", "--format", "json")

    def written(command: str, inside: str, *more: object) -> None:
        outs = [tmp_path / f"{command}-{name}" for name in ("url", "copy")]
        for place, out in zip((url, copy), outs, strict=True):
            said(command, f"{place}{inside}", "--out", out, *more)
        weights = [sorted(out.glob("*.safetensors")) for out in outs]
        assert weights[0] and [path.read_bytes() for path in weights[0]] == [
            path.read_bytes() for path in weights[1]
        ]

    written("merge", "")
    written("export", "/checkpoints/step-00000004", "--format", "peft")
    said("export", base, "--format", "litgpt", "--out", tmp_path / "litgpt")
    assert (tmp_path / "litgpt/lit_model.pth").exists()
    names = said("compare", url, copy).splitlines()[0].split()
    assert sorted(names) == sorted(["run", url, "copy"])
    listed = said("checkpoints", "list", url, "--format", "json")
    assert [f"{url}/checkpoints/step-0000000{step}" in listed for step in (2, 4, 5)] == [True] * 3
    assert "complete" in said("checkpoints", "show", url)
    assert said("checkpoints", "verify", url).count("intact") == 3
    steps = [f"{url}/checkpoints/step-0000000{step}" for step in (2, 4)]
    said("checkpoints", "diff", *steps)
    assert not any(SECRET in text for text in heard)
