"""ftkit generate and ftkit chat: answers of results, as text, as JSON and as files."""

import gzip
import io
import json
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from answers import PROMPT, alpaca, expected_answer, typed
from command import command_environment, command_line
from messages import message_of, says
from results import Ended
from runs import DEFAULT_SIGNALS, TIMEOUT_S

from ftkit.cli.app import run
from ftkit.evaluation.result import find_result
from ftkit.evaluation.session import Responder
from ftkit.recipe.recipe import Quantization


@pytest.fixture
def said(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[str, str]]:
    """Output of a command that succeeds: `out, err = said("generate", path, ...)`."""

    def run_(*argv: object) -> tuple[str, str]:
        assert run([*map(str, argv), "--accelerator", "cpu"]) == 0
        captured = capsys.readouterr()
        return captured.out, captured.err

    return run_


@pytest.fixture
def answered(said: Callable[..., tuple[str, str]]) -> Callable[..., dict[str, Any]]:
    """JSON that `ftkit generate` prints."""

    def run_(path: object, *argv: object) -> dict[str, Any]:
        out, _ = said("generate", path, "--max_new_tokens", 8, "--format", "json", *argv)
        return json.loads(out)

    return run_


def mistake(*argv: object) -> str:
    return message_of(run, [*map(str, argv)])


# --- One prompt -----------------------------------------------------------------------------------


@pytest.mark.extensions
@pytest.mark.parametrize("name", ["lora", "full"])
@pytest.mark.parametrize("where", ["out_dir", "checkpoint"])
def test_a_result_answers_in_the_prompt_style_of_its_run(
    ended: dict[str, Ended], said: Callable[..., tuple[str, str]], name: str, where: str
) -> None:
    path = getattr(ended[name], where)
    out, err = said("generate", path, "--prompt", PROMPT, "--max_new_tokens", 8)
    assert out == expected_answer(path, alpaca(PROMPT)) + "\n"
    assert err.startswith(f"{path}: ") and err.endswith(" tokens/s\n")


@pytest.mark.extensions
def test_a_qlora_result_answers_as_quantised_as_its_run_was(
    ended: dict[str, Ended], answered: Callable[..., dict[str, Any]]
) -> None:
    path = ended["qlora"].out_dir
    found = answered(path, "--prompt", PROMPT)
    assert found["answer"] == expected_answer(path, alpaca(PROMPT), "bnb.nf4-dq")
    plain = answered(path, "--prompt", PROMPT, "--quantize", "none")
    assert plain["answer"] == expected_answer(path, alpaca(PROMPT))


@pytest.mark.extensions
@pytest.mark.parametrize("kind", ["bnb.nf4", "bnb.int8-training"])
def test_any_result_can_be_quantised(
    ended: dict[str, Ended], answered: Callable[..., dict[str, Any]], kind: Quantization
) -> None:
    path = ended["full"].checkpoint
    found = answered(path, "--prompt", PROMPT, "--quantize", kind)
    known = kind.removesuffix("-training")
    assert found["answer"] == expected_answer(path, alpaca(PROMPT), known)


@pytest.mark.extensions
def test_input_goes_where_the_style_has_a_place_for_it(
    ended: dict[str, Ended], answered: Callable[..., dict[str, Any]]
) -> None:
    path = ended["lora"].out_dir
    found = answered(path, "--prompt", PROMPT, "--input", "the moon")
    assert found["answer"] == expected_answer(path, alpaca(PROMPT, "the moon"))
    assert found["input"] == "the moon"


@pytest.mark.extensions
def test_raw_text_and_other_styles(
    ended: dict[str, Ended], answered: Callable[..., dict[str, Any]]
) -> None:
    path = ended["lora"].out_dir
    raw = answered(path, "--prompt", PROMPT, "--raw")
    assert raw["answer"] == expected_answer(path, PROMPT)
    falcon = answered(path, "--prompt", PROMPT, "--prompt_style", "falcon")
    assert falcon["answer"] == expected_answer(path, f"{PROMPT}\nAnswer:")


def test_a_base_model_answers_too(tiny_base: Path, said: Callable[..., tuple[str, str]]) -> None:
    out, _ = said("generate", tiny_base, "--prompt", PROMPT, "--max_new_tokens", 8)
    assert out == expected_answer(tiny_base, PROMPT) + "\n"


@pytest.mark.extensions
def test_the_same_seed_draws_the_same_answer(
    ended: dict[str, Ended], answered: Callable[..., dict[str, Any]]
) -> None:
    drawn = ["--prompt", PROMPT, "--temperature", 2, "--top_k", 300, "--top_p", 0.99]
    path = ended["lora"].out_dir
    first = answered(path, *drawn)["answer"]
    assert answered(path, *drawn)["answer"] == first
    assert answered(path, *drawn, "--seed", 7)["answer"] != first


@pytest.mark.slow
def test_the_precision_is_that_of_the_run_or_of_the_option(
    ended: dict[str, Ended], said: Callable[..., tuple[str, str]]
) -> None:
    for options in ([], ["--precision", "bf16-true"]):
        out, _ = said("generate", ended["mixed"].out_dir, "--prompt", PROMPT, *options)
        assert out.strip()


@pytest.mark.extensions
def test_json_is_all_there_is_on_standard_output(
    ended: dict[str, Ended], answered: Callable[..., dict[str, Any]]
) -> None:
    found = answered(ended["lora"].out_dir, "--prompt", PROMPT)
    assert list(found) == ["instruction", "answer", "tokens", "seconds"]
    assert found["instruction"] == PROMPT and 0 < found["tokens"] <= 8


@pytest.mark.extensions
def test_the_base_model_can_answer_too(
    ended: dict[str, Ended],
    answered: Callable[..., dict[str, Any]],
    said: Callable[..., tuple[str, str]],
) -> None:
    path = ended["full"].out_dir
    base = find_result(str(path)).base
    found = answered(path, "--prompt", PROMPT, "--compare_base")
    assert found["answer"] == expected_answer(path, alpaca(PROMPT))
    assert found["base_answer"] == expected_answer(Path(base), alpaca(PROMPT))
    assert found["answer"] != found["base_answer"]
    options = ["--prompt", PROMPT, "--compare_base", "--max_new_tokens", 2]
    out, _ = said("generate", path, *options)
    first, *beside = out.splitlines()
    assert first == f"> {PROMPT}"
    heads = " ".join(beside)  # long paths are folded
    assert "base model" in heads and " result" in heads


@pytest.mark.extensions
def test_columns_show_the_white_space_that_counts(
    ended: dict[str, Ended], said: Callable[..., tuple[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = iter([" Take\n\tit ", ""])
    monkeypatch.setattr("ftkit.evaluation.session.TextStream.add", lambda self, token: "")
    monkeypatch.setattr("ftkit.evaluation.session.TextStream.rest", lambda self: next(texts))
    options = ["--prompt", PROMPT, "--max_new_tokens", 1, "--compare_base"]
    out, _ = said("generate", ended["full"].out_dir, *options)
    *_, first, second = out.splitlines()
    assert first.split() == [r"\sTake\n", "(empty)"] and second.split() == [r"\tit\s"]


@pytest.mark.extensions
def test_text_that_would_move_the_cursor_is_not_shown(
    ended: dict[str, Ended], said: Callable[..., tuple[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ftkit.evaluation.session.TextStream.add", lambda self, token: "\x1b[2Ja")
    monkeypatch.setattr("ftkit.evaluation.session.TextStream.rest", lambda self: "")
    path = ended["lora"].out_dir
    options = ["--prompt", PROMPT, "--max_new_tokens", 1]
    assert said("generate", path, *options)[0] == "\x1b[2Ja\n"
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    assert said("generate", path, *options)[0] == "a\n"


# --- Many prompts ---------------------------------------------------------------------------------


@pytest.mark.extensions
def test_prompts_come_from_lines_and_answers_go_to_a_file(
    ended: dict[str, Ended],
    said: Callable[..., tuple[str, str]],
    answered: Callable[..., dict[str, Any]],
    tmp_path: Path,
) -> None:
    path = ended["lora"].out_dir
    prompts, out = tmp_path / "prompts.txt", tmp_path / "answers.jsonl"
    prompts.write_text(f"{PROMPT}\n\n  the sun \r\n")
    options = ["--prompts", prompts, "--max_new_tokens", 8]
    printed, err = said("generate", path, *options, "--out", out)
    assert printed == "" and err.endswith(f"2 answers in {out}\n")
    entries = [json.loads(line) for line in out.read_text().splitlines()]
    assert [entry["instruction"] for entry in entries] == [PROMPT, "the sun"]
    assert entries[0]["answer"] == answered(path, "--prompt", PROMPT)["answer"]
    shown, _ = said("generate", path, *options)
    assert shown == "".join(f"> {e['instruction']}\n{e['answer']}\n\n" for e in entries)


@pytest.mark.extensions
def test_prompts_come_from_records_which_need_no_output(
    ended: dict[str, Ended], answered: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    path = ended["lora"].out_dir
    records = [{"instruction": PROMPT, "input": "the moon"}, {"instruction": "b", "output": "c"}]
    prompts = tmp_path / "records.jsonl"
    prompts.write_text("".join(json.dumps(record) + "\n" for record in records))
    first, second = answered(path, "--prompts", prompts)
    assert first["answer"] == expected_answer(path, alpaca(PROMPT, "the moon"))  # type: ignore[index]
    assert second["output"] == "c"  # type: ignore[index]


@pytest.mark.extensions
def test_lines_of_prompts_may_be_compressed(
    ended: dict[str, Ended], answered: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    prompts = tmp_path / "prompts.txt.gz"
    prompts.write_bytes(gzip.compress(f"the sun\n{PROMPT}\n".encode()))
    entries: Any = answered(ended["lora"].out_dir, "--prompts", prompts)
    assert [entry["instruction"] for entry in entries] == ["the sun", PROMPT]


@pytest.mark.extensions
def test_an_answer_does_not_hang_on_the_prompts_before(
    ended: dict[str, Ended], answered: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text(f"something else\n{PROMPT}\n")
    path, drawn = ended["lora"].out_dir, ["--temperature", 1]
    _, second = answered(path, "--prompts", prompts, *drawn)
    assert second["answer"] == answered(path, "--prompt", PROMPT, *drawn)["answer"]  # type: ignore[index]


@pytest.mark.extensions
def test_a_file_of_answers_is_only_replaced_with_overwrite(
    ended: dict[str, Ended], said: Callable[..., tuple[str, str]], tmp_path: Path
) -> None:
    out = tmp_path / "answers.jsonl"
    out.write_text("precious")
    options = ["generate", ended["lora"].out_dir, "--prompt", PROMPT, "--out", out]
    assert says(mistake(*options), f"--out {out} ... --overwrite")
    assert out.read_text() == "precious"
    said(*options, "--overwrite", "--max_new_tokens", 1)
    assert json.loads(out.read_text())["instruction"] == PROMPT


# --- Mistakes -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--prompt", "a", "--prompts", "b"], "exclude each other"),
        (["--prompt", "red \udcff"], "--prompt is not text in utf-8: character 5"),
        (["--prompt", "a", "--input", "\udcff"], "--input is not text"),
        (["--prompt", "a", "--system", "\udcff"], "--system is not text"),
        (["--prompts", "none.txt"], "--prompts none.txt"),
        (["--prompt", "a", "--out", "none/a"], "there is no directory none"),
        (["--prompt", "a", "--raw", "--input", "b"], "Leave out --input or --raw"),
        (["--prompt", "a", "--raw", "--prompt_style", "alpaca"], "exclude each other"),
        (["--prompt", "a", "--top_k", "5"], "Try --temperature 0.8 with it"),
        (["--prompt", "a", "--temperature", "nan"], "a number of at least 0"),
        (["--prompt", "a", "--max_new_tokens", "0"], "a whole number of at least 1"),
        (["--prompt", "a", "--seed", str(2**63)], "below 2**63"),
        (["--prompt", "a", "--quantize", "nf4"], "Try --quantize bnb.nf4"),
    ],
)
def test_a_mistake_names_what_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: list[Any], words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    assert words in mistake("generate", "out", *options)


def test_a_missing_result_is_named() -> None:
    assert says(mistake("generate", "./none", "--prompt", "a"), "none does not exist")


def test_a_prompt_has_to_leave_room_for_an_answer(tiny_base: Path) -> None:
    words = ["--prompt", "word " * 300, "--raw", "--accelerator", "cpu"]
    message = mistake("generate", tiny_base, *words)
    assert says(message, "1 to 255")


def test_a_base_model_has_none_to_compare_with(tiny_base: Path) -> None:
    message = mistake("generate", tiny_base, "--prompt", "a", "--compare_base")
    assert says(message, "which base model")


# --- Chat -----------------------------------------------------------------------------------------


@pytest.mark.extensions
def test_chat_answers_line_by_line_and_remembers(
    ended: dict[str, Ended], said: Callable[..., tuple[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = ended["lora"].out_dir
    typed(monkeypatch, PROMPT, "", "the sun")
    out, err = said("chat", path, "--max_new_tokens", 8)
    first = expected_answer(path, alpaca(PROMPT))
    turn = "### Instruction:\nthe sun\n\n### Response:\n"
    second = expected_answer(path, f"{alpaca(PROMPT)}{first.strip()}</s>{turn}")
    assert out == f"{first}\n{second}\n"
    assert "no history" not in err
    # The answers alone can be piped, and are beside their questions where both are seen.
    assert f"> {PROMPT}\n> the sun\n" in err


@pytest.mark.extensions
def test_chat_says_that_it_remembers_nothing_without_a_template(
    ended: dict[str, Ended], said: Callable[..., tuple[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = ended["lora"].out_dir
    typed(monkeypatch, PROMPT, "the sun")
    out, err = said("chat", path, "--max_new_tokens", 8, "--raw")
    assert out == "".join(expected_answer(path, line) + "\n" for line in (PROMPT, "the sun"))
    assert says(err, "no history")


LLAMA3 = ["--prompt_style", "llama3", "--max_new_tokens", 4]


def llama3(*turns: str) -> str:
    def said_by(role: str, text: str) -> str:
        return f"<|start_header_id|>{role}<|end_header_id|>\n\n{text}<|eot_id|>"

    texts = [said_by("system", "You are a helpful assistant.")]
    texts += [
        said_by("assistant" if i % 2 else "user", turn.strip()) for i, turn in enumerate(turns)
    ]
    end = "<|start_header_id|>assistant<|end_header_id|>\n\n"
    return f"<|begin_of_text|>{''.join(texts)}{end}"


@pytest.fixture(scope="module")
def roomy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with room for a conversation."""
    from tiny import make_llama

    directory = tmp_path_factory.mktemp("base") / "roomy"
    return make_llama(directory, max_position_embeddings=1024, initializer_range=0.3)


def two_turns(path: Path) -> list[str]:
    """The answers of a base model to "red" and then to "blue", which depends on the first turn."""
    first = expected_answer(path, llama3("red"), longest=4)
    second = expected_answer(path, llama3("red", first, "blue"), longest=4)
    assert second != expected_answer(path, llama3("blue"), longest=4)
    return [first, second]


@pytest.mark.extensions
def test_chat_remembers_where_the_style_has_a_place_for_it(
    roomy: Path, said: Callable[..., tuple[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    typed(monkeypatch, "red", "blue")
    out, err = said("chat", roomy, *LLAMA3)
    assert out == "".join(f"{answer}\n" for answer in two_turns(roomy))
    assert "no history" not in err


@pytest.mark.extensions
def test_chat_forgets_the_oldest_turns_where_room_ends(
    roomy: Path, said: Callable[..., tuple[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = ["word " * 60, "sun " * 60, "moon " * 60, "tree"]
    typed(monkeypatch, *lines)
    out, _ = said("chat", roomy, *LLAMA3)
    assert len(out.splitlines()) >= len(lines)


@pytest.mark.extensions
def test_a_line_that_is_too_long_leaves_a_chat_its_history(
    roomy: Path, said: Callable[..., tuple[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    typed(monkeypatch, "red", "word " * 1100, "blue")
    out, err = said("chat", roomy, *LLAMA3)
    assert out == "".join(f"{answer}\n" for answer in two_turns(roomy))
    assert "The prompt is " in err


@pytest.mark.extensions
def test_a_line_that_is_not_its_json_leaves_a_chat_its_history(
    roomy: Path, said: Callable[..., tuple[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = ['{"prompt": 5}', '{"prompt": "\\ud800"}', '{"text": "red"}', '["prompt"]', "red", "5"]
    typed(monkeypatch, '{"prompt": "red"}', *wrong, '{"prompt": "blue"}')
    out, _ = said("chat", roomy, *LLAMA3, "--format", "json")
    first, second = two_turns(roomy)
    head, *lines = [json.loads(line) for line in out.splitlines()]
    assert head == {"history": True}
    assert [line.get("answer") for line in lines] == [first, *[None] * len(wrong), second]
    assert all(text in line["error"] for text, line in zip(wrong, lines[1:-1], strict=True))


def test_an_error_of_an_answer_is_not_said_to_be_one_of_the_json(
    roomy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> Any:
        raise ValueError("broken")

    monkeypatch.setattr(Responder, "stream", broken)
    typed(monkeypatch, '{"prompt": "red"}')
    with pytest.raises(ValueError, match="broken"):
        run(["chat", str(roomy), "--format", "json", "--accelerator", "cpu"])


@pytest.mark.extensions
def test_a_line_that_is_not_text_leaves_a_chat_its_history(
    roomy: Path, said: Callable[..., tuple[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def chat(*options: str, write: bytes) -> tuple[str, str]:
        lines = b"".join(write % text + b"\n" for text in (b"red", b"\xff", b"blue"))
        stdin = io.TextIOWrapper(io.BytesIO(lines), encoding="utf-8")
        monkeypatch.setattr("sys.stdin", stdin)
        return said("chat", roomy, *LLAMA3, *options)

    first, second = two_turns(roomy)
    out, err = chat(write=b"%s")
    assert out == f"{first}\n{second}\n" and "utf-8" in err
    out, _ = chat("--format", "json", write=b'{"prompt": "%s"}')
    lines = [json.loads(line) for line in out.splitlines()]
    assert [line.get("answer") for line in lines[1:]] == [first, None, second]
    assert "udcff" in lines[2]["error"]


@pytest.mark.slow
def test_ctrl_c_stops_an_answer_and_not_the_chat(roomy: Path, tmp_path: Path) -> None:
    words = ["chat", roomy, "--max_new_tokens", 1000, "--accelerator", "cpu", "--raw"]
    slow = (
        f"{DEFAULT_SIGNALS}\nimport time\nfrom ftkit.models.generation import Sampling\n"
        "choose = Sampling.choose\n"
        "def slowly(self, *rest):\n    time.sleep(0.05)\n    return choose(self, *rest) or 5\n"
        "Sampling.choose = slowly\n"
    )
    process = subprocess.Popen(
        command_line(*words, before=slow),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=tmp_path,
        env=command_environment(),
    )
    try:
        assert process.stdin and process.stdout
        process.stdin.write(b"red\n")
        process.stdin.flush()
        assert process.stdout.read(1)
        process.send_signal(signal.SIGINT)
        start = time.monotonic()
        out, err = process.communicate(b"", timeout=TIMEOUT_S)
        assert process.returncode == 0, err
        assert time.monotonic() - start < 30
        assert b"(stopped)" in err and out.endswith(b"\n")
    finally:
        process.kill()
        process.communicate()
