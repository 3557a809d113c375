"""Results are prompted as in training, by ftkit and by transformers alike."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from answers import OWN, PROMPT, alpaca, expected_answer, typed
from conversions import export, merge
from messages import key_words, says
from results import Ended
from tiny import make_llama
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from ftkit.cli.app import run
from ftkit.data.rendering import InstructionRenderer
from ftkit.errors import UserError
from ftkit.evaluation.loading import load_result
from ftkit.evaluation.prompting import Prompting, Question, question_of
from ftkit.evaluation.result import find_result
from ftkit.models.chat_templates.prompt_styles import resolve_prompt_style
from ftkit.models.pretrained.base_model import open_base

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

CHAT_FILES = ("chat_template.jinja", "generation_config.json")


def written(ended: dict[str, Ended], tmp_path: Path) -> dict[str, Path]:
    """Directories that hold results, by what they are."""
    lora, full = ended["lora"], ended["full"]
    return {
        "adapter": lora.final,
        "adapter of a checkpoint": lora.checkpoint / "adapter",
        "model": full.final,
        "merged": merge(lora.out_dir, tmp_path / "merged"),
        "merged from a checkpoint": merge(lora.checkpoint, tmp_path / "merged-2"),
        "exported": export(full.checkpoint, "hf", tmp_path / "hf"),
        "exported for LitGPT": export(full.out_dir, "litgpt", tmp_path / "lit"),
        "exported adapter": export(lora.out_dir, "peft", tmp_path / "peft"),
        "exported twice": export(tmp_path / "merged", "hf", tmp_path / "hf-2"),
    }


def prompting(path: object) -> Prompting:
    cpu = torch.device("cpu")
    return load_result(find_result(str(path)), device=cpu, dtype=torch.float32).prompting


def without_chat_files(ended: Ended, to: Path) -> Path:
    """The run as earlier versions have written it."""
    copy = Path(shutil.copytree(ended.out_dir, to))
    for directory in (copy / "final", *copy.glob("checkpoints/step-*")):
        for place in (directory, directory / "adapter"):
            for name in CHAT_FILES:
                (place / name).unlink(missing_ok=True)
    return copy


# --- What is written ------------------------------------------------------------------------------


@pytest.mark.extensions
def test_transformers_gives_the_prompts_of_training_with_every_result(
    ended: dict[str, Ended], tmp_path: Path
) -> None:
    base = open_base(find_result(str(ended["lora"].out_dir)).base or "")
    style = resolve_prompt_style("alpaca")
    renderer = InstructionRenderer(base.tokenizer, style, mask_prompt=True)
    records = [
        {"instruction": PROMPT, "output": "red"},
        {"instruction": PROMPT, "input": "the moon", "output": "red"},
    ]
    for what, directory in written(ended, tmp_path).items():
        tokenizer = AutoTokenizer.from_pretrained(directory)
        for record in records:
            (rendering,) = renderer.render([record])
            user = {"role": "user", "content": PROMPT, "input": record.get("input")}
            answer = {"role": "assistant", "content": "red"}
            assert (
                tokens(tokenizer, [user], add_generation_prompt=True)
                == renderer.example(record).prompt
            ), what
            assert tokens(tokenizer, [user, answer]) == rendering.samples[0].ids, what
        settings = json.loads((directory / "generation_config.json").read_text())
        assert settings["eos_token_id"] == 1, what


def tokens(tokenizer: Any, messages: list[dict[str, Any]], **options: Any) -> list[int]:
    found: list[int] = tokenizer.apply_chat_template(messages, return_dict=False, **options)
    return found


@pytest.mark.extensions
def test_a_full_checkpoint_says_how_it_has_template(ended: dict[str, Ended]) -> None:
    checkpoint, final = ended["full"].checkpoint, ended["full"].final
    for name in CHAT_FILES:
        assert (checkpoint / name).read_bytes() == (final / name).read_bytes()
    assert not (checkpoint / "base" / "chat_template.jinja").exists()  # the base model has none


@pytest.mark.extensions
def test_the_report_says_how_the_run_made_prompts(ended: dict[str, Ended]) -> None:
    assert "alpaca" in ended["lora"].report.resolved.chat_template.lower()


# --- What is used ---------------------------------------------------------------------------------


@pytest.mark.extensions
@pytest.mark.parametrize("name", ["lora", "full"])
@pytest.mark.parametrize("where", ["out_dir", "final", "checkpoint"])
def test_a_result_is_prompted_by_the_files_it_carries(
    ended: dict[str, Ended], name: str, where: str
) -> None:
    found = prompting(getattr(ended[name], where))
    assert found.origin == "trained" and found.end_ids == {1}
    assert found.style.class_name == "Alpaca"
    user = {"role": "user", "content": PROMPT}
    assert found.template.render([user], add_generation_prompt=True) == f"<s>{alpaca(PROMPT)}"


@pytest.mark.extensions
def test_the_files_of_a_result_decide_and_not_its_recipe(
    ended: dict[str, Ended], tmp_path: Path
) -> None:
    for number, name in enumerate(("lora", "full")):
        copy = Path(shutil.copytree(ended[name].out_dir, tmp_path / name))
        (copy / "final" / "chat_template.jinja").write_text(OWN)
        found = prompting(copy)
        assert (found.origin, found.template.source, found.style) == ("trained", OWN, None)
        merged = tmp_path / str(number)
        if name == "lora":
            merge(copy, merged)
        else:
            export(copy, "hf", merged)
        assert AutoTokenizer.from_pretrained(merged).chat_template == OWN
        assert not (merged / "prompt_style.yaml").exists()
        assert prompting(merged).template.source == OWN


@pytest.mark.extensions
@pytest.mark.parametrize("name", ["lora", "full"])
def test_results_without_a_template_use_the_prompt_style_of_their_run(
    ended: dict[str, Ended], name: str, tmp_path: Path
) -> None:
    old = without_chat_files(ended[name], tmp_path / "old")
    found = prompting(old)
    assert (found.origin, found.style.class_name) == ("trained", "Alpaca")
    out = tmp_path / "out"
    if name == "lora":
        merge(old, out)
    else:
        export(old, "hf", out)
    assert (out / "chat_template.jinja").read_text() == found.template.source


@pytest.mark.extensions
def test_an_old_result_does_not_use_the_template_of_its_base_model(
    ended: dict[str, Ended], tmp_path: Path
) -> None:
    old = without_chat_files(ended["full"], tmp_path / "old")
    (old / "final" / "chat_template.jinja").write_text(OWN)
    report = json.loads((old / "report.json").read_text())
    del report["resolved"]["chat_template"]
    (old / "report.json").write_text(json.dumps(report))
    assert prompting(old).style.class_name == "Alpaca"


@pytest.mark.extensions
def test_an_adapter_alone_is_prompted_by_the_files_it_carries(
    ended: dict[str, Ended], tmp_path: Path
) -> None:
    alone = Path(shutil.copytree(ended["lora"].final, tmp_path / "adapter"))
    user = {"role": "user", "content": PROMPT}
    text = prompting(alone).template.render([user], add_generation_prompt=True)
    assert text == f"<s>{alpaca(PROMPT)}"


# --- Models that nothing was trained with ---------------------------------------------------------


@pytest.fixture(scope="module")
def instructed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that came with a chat template and two end tokens, with room for a conversation."""
    directory = tmp_path_factory.mktemp("base") / "instructed"
    make_llama(directory, max_position_embeddings=1024, initializer_range=0.3)
    (directory / "chat_template.jinja").write_text(OWN)
    settings = json.loads((directory / "generation_config.json").read_text())
    (directory / "generation_config.json").write_text(
        json.dumps(settings | {"eos_token_id": [1, 20]})
    )
    return directory


@pytest.fixture
def said(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[str, str]]:
    """Output of a command."""

    def run_(*argv: object) -> tuple[str, str]:
        words = [*map(str, argv), "--accelerator", "cpu", "--max_new_tokens", "8"]
        assert run(words) == 0
        captured = capsys.readouterr()
        return captured.out, captured.err

    return run_


@pytest.mark.extensions
def test_a_model_with_a_template_uses_it_and_says_so(
    instructed: Path, said: Callable[..., tuple[str, str]]
) -> None:
    out, err = said("generate", instructed, "--prompt", PROMPT)
    expected = expected_answer(instructed, f"user: {PROMPT}</s>\nassistant: ", stop_ids=[1, 20])
    assert out == f"{expected}\n"
    assert says(err, "instructed ... its own chat template ... --chat_template")
    found = prompting(instructed)
    assert found.origin == "model" and found.end_ids == {1, 20}


@pytest.mark.extensions
@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--raw"], PROMPT),
        (["--prompt_style", "alpaca"], alpaca(PROMPT)),
        (["--prompt_style", "falcon"], f"{PROMPT}\nAnswer:"),
        (["--chat_template", "tokenizer"], f"user: {PROMPT}</s>\nassistant: "),
        (
            ["--system", "red sun"],
            f"system: red sun</s>\nuser: {PROMPT}</s>\nassistant: ",
        ),
    ],
)
def test_a_named_way_to_prompt_is_used(
    instructed: Path, said: Callable[..., tuple[str, str]], options: list[str], text: str
) -> None:
    out, err = said("generate", instructed, "--prompt", PROMPT, *options)
    assert out == expected_answer(instructed, text, stop_ids=[1, 20]) + "\n"
    assert ("its own chat template" in err) == ("--system" in options)


@pytest.mark.extensions
def test_a_template_can_be_a_file_or_a_text(
    instructed: Path, said: Callable[..., tuple[str, str]], tmp_path: Path
) -> None:
    file = tmp_path / "mine.jinja"
    file.write_text("{{ bos_token }}{{ messages[0].content }}?")
    for given in (file, file.read_text()):
        out, _ = said("generate", instructed, "--prompt", PROMPT, "--chat_template", given)
        assert out == expected_answer(instructed, f"{PROMPT}?", stop_ids=[1, 20]) + "\n"


@pytest.mark.extensions
def test_an_input_stands_below_the_instruction_where_the_template_has_no_place_for_it(
    instructed: Path, said: Callable[..., tuple[str, str]], tmp_path: Path
) -> None:
    words = ["generate", instructed, "--prompt", PROMPT, "--input", "the moon"]
    text = f"user: {PROMPT}\n\nthe moon</s>\nassistant: "
    assert said(*words)[0] == expected_answer(instructed, text, stop_ids=[1, 20]) + "\n"
    file = tmp_path / "mine.jinja"
    file.write_text("{{ bos_token }}{{ messages[0].input }}: {{ messages[0].content }}")
    out, _ = said(*words, "--chat_template", file)
    assert out == expected_answer(instructed, f"the moon: {PROMPT}", stop_ids=[1, 20]) + "\n"


@pytest.mark.extensions
def test_prompts_are_records_of_any_shape(
    instructed: Path, said: Callable[..., tuple[str, str]], tmp_path: Path
) -> None:
    user, assistant = {"role": "user", "content": "red"}, {"role": "assistant", "content": "cat"}
    turn = "user: red</s>\nassistant: "
    for record, text in (
        ({"messages": [user]}, turn),
        ({"messages": [user, assistant]}, turn),
        ({"messages": [user, assistant, user]}, f"{turn}cat</s>\n{turn}"),
        ({"conversations": [{"from": "human", "value": "red"}]}, turn),
        ({"prompt": "red"}, "red"),
        ({"text": "red"}, "red"),
    ):
        prompts = tmp_path / "prompts.jsonl"
        prompts.write_text(json.dumps(record) + "\n")
        out, _ = said("generate", instructed, "--prompts", prompts, "--format", "json")
        (entry,) = json.loads(out)
        assert entry["answer"] == expected_answer(instructed, text, stop_ids=[1, 20]), record
    table = tmp_path / "prompts.csv"
    table.write_text("instruction\nred\n")
    out, _ = said("generate", instructed, "--prompts", table, "--format", "json")
    assert json.loads(out)[0]["answer"] == expected_answer(instructed, turn, stop_ids=[1, 20])


@pytest.mark.extensions
def test_an_unknown_template_is_refused_with_a_remedy(instructed: Path, tiny_base: Path) -> None:
    words = ["generate", "--prompt", PROMPT, "--accelerator", "cpu"]
    with pytest.raises(
        UserError, match=key_words("chat_template is chtml ... --chat_template chatml")
    ):
        run([*words, str(instructed), "--chat_template", "chtml"])
    with pytest.raises(UserError, match=key_words("no chat template ... --chat_template zephyr")):
        run([*words, str(tiny_base), "--chat_template", "tokenizer"])
    with pytest.raises(UserError, match=key_words("--prompt_style and --chat_template")):
        run([*words, str(tiny_base), "--chat_template", "zephyr", "--prompt_style", "alpaca"])


@pytest.mark.extensions
def test_the_end_of_a_turn_ends_an_answer_whatever_the_settings_say(
    instructed: Path, tmp_path: Path
) -> None:
    copy = Path(shutil.copytree(instructed, tmp_path / "model"))
    tokenizer = Tokenizer.from_file(str(copy / "tokenizer.json"))
    tokenizer.add_special_tokens([tokenizer.id_to_token(30)])
    tokenizer.save(str(copy / "tokenizer.json"))
    template = OWN.replace("{{ eos_token }}", tokenizer.id_to_token(30))
    (copy / "chat_template.jinja").write_text(template)
    assert prompting(copy).end_ids == {1, 20, 30}


@pytest.mark.extensions
def test_a_system_prompt_is_never_silently_left_out(instructed: Path, tmp_path: Path) -> None:
    words = ["generate", str(instructed), "--prompt", PROMPT, "--system", "red"]
    with pytest.raises(UserError, match=key_words("--system ... chat template ... leaves out")):
        run([*words, "--prompt_style", "falcon"])
    file = tmp_path / "strict.jinja"
    file.write_text(
        "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    )
    with pytest.raises(UserError, match=key_words("no system")):
        run([*words, "--chat_template", str(file)])
    with pytest.raises(UserError, match=key_words("--raw and --system")):
        run([*words, "--raw"])
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "red"}')
    words = ["generate", str(instructed), "--prompts", str(prompts)]
    with pytest.raises(UserError, match=key_words("plain texts")):
        run([*words, "--system", "red"])
    prompts.write_text('{"messages": [{"role": "user", "content": "red"}]}')
    with pytest.raises(UserError, match=key_words("conversations ... --raw")):
        run([*words, "--raw"])


# --- Chat -----------------------------------------------------------------------------------------


@pytest.mark.extensions
def test_chat_remembers_in_any_template(
    instructed: Path, said: Callable[..., tuple[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    typed(monkeypatch, "red", "blue")
    out, err = said("chat", instructed, "--system", "sun")
    begin = "system: sun</s>\nuser: red</s>\nassistant: "
    first = expected_answer(instructed, begin, stop_ids=[1, 20])
    text = f"{begin}{first.strip()}</s>\nuser: blue</s>\nassistant: "
    second = expected_answer(instructed, text, stop_ids=[1, 20])
    assert out == f"{first}\n{second}\n"
    assert "its own chat template" in err and "no history" not in err


@pytest.mark.extensions
def test_chat_keeps_the_system_prompt_when_it_forgets_the_oldest_turns(
    instructed: Path, said: Callable[..., tuple[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts: list[str] = []

    def noted(self: Any, question: Question) -> Any:
        prompt = plain(self, question)
        prompts.append(self.tokenizer.processor.decode(prompt.ids))
        return prompt

    from ftkit.evaluation.session import Responder

    plain = Responder.prompt_of
    monkeypatch.setattr(Responder, "prompt_of", noted)
    typed(monkeypatch, "word " * 150, "sun " * 150, "moon " * 150, "tree")
    said("chat", instructed, "--system", "green")
    assert "word" not in prompts[-1] and "tree" in prompts[-1]
    assert prompts[-1].startswith("system: green")


# --- Questions ------------------------------------------------------------------------------------


def test_a_question_is_a_record_up_to_its_last_answer() -> None:
    user, answer = ({"role": role, "content": role} for role in ("user", "assistant"))
    assert question_of({"messages": [user, answer]}).messages == (user,)
    assert question_of({"messages": [user, answer, user]}).messages == (user, answer, user)
    tool = {"role": "tool", "content": "3"}
    found = question_of({"messages": [user, answer, tool, answer], "tools": [{"name": "add"}]})
    assert (found.messages, found.tools) == ((user, answer, tool), [{"name": "add"}])
    found = question_of({"instruction": "a", "input": "b", "sys_prompt": "c", "output": "d"})
    assert found.messages == (
        {"role": "system", "content": "c"},
        {"role": "user", "content": "a", "input": "b"},
    )
    for key in ("prompt", "text"):
        assert question_of({key: "once"}) == Question(text="once")
    found = question_of({"instruction": "a", "history": [["q", "r"]]})
    assert [message["content"] for message in found.messages] == ["q", "r", "a"]
