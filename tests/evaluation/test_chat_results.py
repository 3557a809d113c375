"""Results of chats: trained in a template, they are prompted in it by ftkit and by transformers."""

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from answers import OWN, expected_answer, typed
from conversions import export, merge
from rank_jobs import Case, Outcome, make_run
from tiny import WORDS, make_llama
from transformers import AutoTokenizer

from ftkit.cli.app import run
from ftkit.evaluation.prompting import prompting_of
from ftkit.evaluation.result import find_result
from ftkit.models.chat_templates.template import resolve_chat_template
from ftkit.models.pretrained.base_model import open_base

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


def conversation(rng: random.Random) -> dict[str, Any]:
    """A conversation of two turns, half of them with a system message."""
    messages = [{"role": "system", "content": "say words"}] * rng.randint(0, 1)
    for _ in range(2):
        question, said = (" ".join(rng.choices(WORDS, k=3)) for _ in range(2))
        messages += [{"role": "user", "content": question}, {"role": "assistant", "content": said}]
    return {"messages": messages}


RECORDS = [conversation(random.Random(seed)) for seed in range(40)]
RECORD: dict[str, Any] = {
    "messages": [
        {"role": "system", "content": "say words"},
        {"role": "user", "content": "red cat"},
        {"role": "assistant", "content": "blue dog"},
        {"role": "user", "content": "green sun"},
        {"role": "assistant", "content": "moon"},
    ]
}


ASKED = (
    "{{ bos_token }}{% for message in messages %}{{ message.role }}: "
    "{% if message.role == 'assistant' %}{{ mood or 'moon' }} {% endif %}{{ message.content }}"
    "{{ eos_token }}\n{% endfor %}{% if add_generation_prompt %}assistant: {{ mood or 'moon' }} "
    "{% endif %}"
)
"""A template with an argument."""


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that came with a chat template and two end tokens."""
    directory = make_llama(tmp_path_factory.mktemp("base") / "instructed")
    (directory / "chat_template.jinja").write_text(OWN)
    settings = json.loads((directory / "generation_config.json").read_text())
    settings["eos_token_id"] = [1, 20]
    (directory / "generation_config.json").write_text(json.dumps(settings))
    return directory


@pytest.fixture(scope="module")
def trained(base: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Outcome]:
    """Runs on chats and on documents, by what they are."""
    directory = tmp_path_factory.mktemp("data")
    chats, texts = directory / "chats.jsonl", directory / "texts.jsonl"
    chats.write_text("".join(json.dumps(record) + "\n" for record in RECORDS))
    asked = directory / "asked.jinja"
    asked.write_text(ASKED)
    lines = (json.dumps({"text": " ".join(WORDS * 3)}) + "\n" for _ in range(40))
    texts.write_text("".join(lines))
    common = (("checkpoint_dir", str(base)), ("data.mask_prompt", None))
    on_chats = (*common, ("data.json_path", str(chats)))
    on_texts = (*common, ("data.json_path", str(texts)))
    cases = {
        "named": Case("single", "lora", changes=(*on_chats, ("data.chat_template", "zephyr"))),
        "own": Case("single", "full", changes=on_chats),
        "asked": Case(
            "single",
            "full",
            changes=(
                *on_chats,
                ("data.chat_template", str(asked)),
                ("data.chat_template_kwargs.mood", "sun"),
            ),
        ),
        "documents": Case("single", "lora", changes=on_texts),
    }
    outcomes = make_run(tmp_path_factory)(1, list(cases.values()))
    for outcome in outcomes.values():
        outcome.complete()
    return {name: outcomes[case] for name, case in cases.items()}


@pytest.fixture
def said(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Output of a command."""

    def run_(*argv: object) -> str:
        assert run([*map(str, argv), "--accelerator", "cpu"]) == 0
        return capsys.readouterr().out

    return run_


def written(outcome: Outcome, tmp_path: Path) -> list[Path]:
    """All directories that a run, `ftkit merge` and `ftkit export` make for other programs."""
    final = outcome.out_dir / "final"
    out = [tmp_path / name for name in "abc"]
    if (final / "adapter_config.json").exists():
        merge(outcome.out_dir, out[0])
        export(outcome.checkpoint, "peft", out[1])
        return [final, outcome.checkpoint / "adapter", *out[:2]]
    export(outcome.out_dir, "hf", out[0])
    export(outcome.checkpoint, "litgpt", out[1])
    export(outcome.checkpoint, "hf", out[2])
    return [final, *out]


@pytest.mark.extensions
@pytest.mark.parametrize("name", ["named", "own"])
def test_transformers_gives_the_tokens_of_training_with_every_result(
    trained: dict[str, Outcome], base: Path, name: str, tmp_path: Path
) -> None:
    from ftkit.extensions.chats.rendering import ChatRenderer

    ours = open_base(str(base)).tokenizer
    template = resolve_chat_template("zephyr" if name == "named" else "tokenizer", ours)
    renderer = ChatRenderer(ours, template, train_on="assistant")
    (rendering,) = renderer.render([RECORD])
    *_, sample = rendering.samples
    messages = RECORD["messages"]
    for directory in written(trained[name], tmp_path):
        theirs: Any = AutoTokenizer.from_pretrained(directory)
        whole = theirs.apply_chat_template(messages, return_dict=False)
        prompt = theirs.apply_chat_template(
            messages[:-1], add_generation_prompt=True, return_dict=False
        )
        assert prompt == renderer.example(RECORD).prompt == sample.ids[: sample.trained[-1][0]]
        assert theirs.decode(whole) == theirs.decode(sample.ids)
        # A prompt that ends in a space has it as a token, which the whole joins with the answer.
        assert (whole == sample.ids) is (name == "named")
        assert (directory / "chat_template.jinja").read_text() == template.source
        settings = json.loads((directory / "generation_config.json").read_text())
        assert settings["eos_token_id"] == 1
        assert not (directory / "prompt_style.yaml").exists()


def text_of(messages: list[dict[str, str]], name: str) -> str:
    """A conversation as the template of a run writes it, ready for an answer."""
    if name in ("own", "asked"):
        said = "".join(f"{m['role']}: {m['content']}</s>\n" for m in messages)
        text = f"<s>{said}assistant: "
        return text.replace("assistant: ", "assistant: sun ") if name == "asked" else text
    return "".join(f"<|{m['role']}|>\n{m['content']}</s>\n" for m in messages) + "<|assistant|>\n"


@pytest.mark.extensions
@pytest.mark.parametrize("name", ["named", "own", "asked"])
@pytest.mark.parametrize("where", ["out_dir", "checkpoint"])
def test_generate_and_chat_prompt_as_in_training(
    trained: dict[str, Outcome],
    said: Callable[..., str],
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    where: str,
) -> None:
    path = getattr(trained[name], where)
    system, user = {"role": "system", "content": "sun"}, {"role": "user", "content": "red"}
    words = ["--system", "sun", "--max_new_tokens", 8]
    first = expected_answer(path, text_of([system, user], name), bos=False)
    assert said("generate", path, "--prompt", "red", *words) == f"{first}\n"
    typed(monkeypatch, "red", "cat")
    answer = {"role": "assistant", "content": first.strip()}
    turns = [system, user, answer, {"role": "user", "content": "cat"}]
    second = expected_answer(path, text_of(turns, name), bos=False)
    assert said("chat", path, *words) == f"{first}\n{second}\n"


@pytest.mark.extensions
@pytest.mark.parametrize("name", ["named", "own", "documents"])
@pytest.mark.parametrize("where", ["out_dir", "checkpoint"])
def test_evaluate_comes_to_the_numbers_of_the_run(
    trained: dict[str, Outcome], said: Callable[..., str], name: str, where: str
) -> None:
    outcome = trained[name]
    found = json.loads(said("evaluate", getattr(outcome, where), "--format", "json"))
    assert found["loss"] == pytest.approx(outcome.validation_losses[-1], rel=1e-5)
    matches = outcome.report.exact_match
    assert found["exact_match"] == {"records": matches.samples, "share": matches.after}


@pytest.mark.extensions
def test_a_chat_that_left_its_run_is_evaluated_in_its_template(
    trained: dict[str, Outcome],
    said: Callable[..., str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    outcome = trained["named"]
    data = find_result(str(outcome.out_dir)).recipe.data["init_args"]
    moved = [
        merge(outcome.out_dir, tmp_path / "merged"),
        export(outcome.out_dir, "peft", tmp_path / "adapter"),
    ]
    capsys.readouterr()
    words = ["--data", "JSON", "--data.json_path", data["json_path"], "--exact_match", 0]
    losses = [
        json.loads(said("evaluate", path, *words, "--format", "json"))["loss"]
        for path in (outcome.out_dir, *moved)
    ]
    assert losses[1:] == pytest.approx([losses[0]] * 2, rel=1e-4)


@pytest.mark.extensions
def test_documents_leave_the_model_its_template(trained: dict[str, Outcome], base: Path) -> None:
    final = trained["documents"].out_dir / "final"
    assert (final / "chat_template.jinja").read_text() == OWN
    settings = json.loads((final / "generation_config.json").read_text())
    assert settings["eos_token_id"] == [1, 20]
    found = prompting_of(find_result(str(final)), open_base(str(base)))
    assert (found.template.source, found.origin) == (OWN, "trained")
