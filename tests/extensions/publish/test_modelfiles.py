"""Modelfiles: read by Ollama's rules they give the prompts of the chat template.

The rules are those of its parser, and of the part of Go's templates that ftkit writes.
"""

import dataclasses
import re
from collections.abc import Sequence

import pytest
from gguf_models import make_gguf_model

from ftkit.evaluation.prompting import prompting_of
from ftkit.evaluation.result import find_result
from ftkit.extensions.publish.gguf.metadata import vocabulary_metadata
from ftkit.extensions.publish.gguf.modelfile import modelfile
from ftkit.models.chat_templates.template import ChatTemplate
from ftkit.models.pretrained.base_model import BaseModel, companions, open_base

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
DEFAULT_SYSTEM = (
    "{% if messages[0].role != 'system' %}"
    "{{ '<|im_start|>system\nYou are a model.<|im_end|>\n' }}{% endif %}"
)
"""As SmolLM2 and Qwen 2.5 have it."""
WITHOUT_SYSTEM = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if m.role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    "{{ '<turn>' + ('model' if m.role == 'assistant' else m.role) + '\n' + m.content + '<end>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<turn>model\n' }}{% endif %}"
)
"""As Gemma 2 has it."""
INSTRUCTIONS = (
    "{% for m in messages %}{% if m.role == 'user' %}{{ bos_token + '[INST] ' + m.content + "
    "' [/INST]' }}{% elif m.role == 'assistant' %}{{ ' ' + m.content + eos_token }}"
    "{% else %}{{ raise_exception('no system') }}{% endif %}{% endfor %}"
)
"""As Mistral had it: no turn of an assistant begins with words."""
TEMPLATES = {
    "chatml": CHATML,
    "begun": "{{ bos_token }}" + CHATML,
    "with system": DEFAULT_SYSTEM + CHATML,
    "begun with system": "{{ bos_token }}" + DEFAULT_SYSTEM + CHATML,
    "without system": WITHOUT_SYSTEM,
    "instructions": INSTRUCTIONS,
    "quotes": CHATML.replace("m.content", "'\"' + m.content + '\"'"),
}
ALONE = {"without system", "instructions"}
"""Templates that take no system message."""
LEFT_OUT = {
    "only the last system counts": CHATML.replace("m.content", "(messages | last).content"),
    "a length": "{{ messages | length }}" + CHATML,
    "three quotes": CHATML.replace("m.content", '\'"""\' + m.content'),
    "Go's braces": CHATML.replace("m.content", "'{' + '{' + m.content"),
    "what cannot be printed": CHATML.replace("m.content", "'\u00a0' + m.content"),
}
SAID = [
    {"role": "user", "content": "Who?"},
    {"role": "assistant", "content": 'Me, "I"'},
    {"role": "user", "content": "What {now}?\nThis."},
]
SYSTEM = {"role": "system", "content": "Be brief."}


def commands(text: str) -> list[tuple[str, str]]:
    """Names and values, by the rules of ParseFile in Ollama's parser/parser.go.

    A value ends with its line, or with the quotes that it begins with; what cannot be printed is
    left out of it, but for white space.
    """
    found = []
    lines = iter(text.splitlines(keepends=True))
    for line in lines:
        if not line.strip() or line.startswith("#"):
            continue
        name, _, value = line.partition(" ")
        assert name in ("FROM", "TEMPLATE", "PARAMETER"), name
        if name == "PARAMETER":
            name, _, value = value.partition(" ")
            assert re.fullmatch(r"\w+", name, re.ASCII)
        while (unquoted := _unquoted(value.strip())) is None:
            value += next(lines)
        found.append((name, "".join(c for c in unquoted if c.isprintable() or c in "\n\t")))
    return found


def _unquoted(value: str) -> str | None:
    """Return the text without its quotes, or None while they are still open."""
    for quotes in ('"""', '"'):
        if value.startswith(quotes):
            size = len(quotes)
            is_closed = len(value) >= 2 * size and value.endswith(quotes)
            return value[size:-size] if is_closed else None
    return value


def prompt(template: str, messages: Sequence[dict[str, str]]) -> str:
    """Prompt that Ollama renders, by the part of Go's templates that ftkit writes."""
    with_system = any(message["role"] == "system" for message in messages)
    template = re.sub(
        r"\{\{ if not \.System \}\}(.*?)\{\{ end \}\}",
        lambda found: "" if with_system else found.group(1),
        template,
        flags=re.DOTALL,
    )
    begin, _, rest = template.partition("{{ range .Messages }}")
    turns, _, end = rest.rpartition("{{ end }}")
    roles = re.findall(r'\{\{ if eq \.Role "(\w+)" \}\}(.*?)\{\{ end \}\}', turns, re.DOTALL)
    assert turns == "".join(f'{{{{ if eq .Role "{r}" }}}}{text}{{{{ end }}}}' for r, text in roles)
    by_role = dict(roles)
    texts = [by_role.get(m["role"], "").replace("{{ .Content }}", m["content"]) for m in messages]
    made = "".join([begin, *texts, end])
    assert "{{" not in made
    return made


@pytest.fixture(scope="module", params=["smollm2", "mistral"])
def base(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> BaseModel:
    """A model for which llama.cpp puts no BOS before a prompt, and one for which it does."""
    return open_base(str(make_gguf_model(tmp_path_factory.mktemp("base") / "m", request.param)))


def written(base: BaseModel, source: str) -> tuple[dict[str, str], ChatTemplate]:
    """A Modelfile as Ollama reads it, without its stop parameters, and the template it is for."""
    template = ChatTemplate(source, "of a test", base.tokenizer.special_tokens)
    prompting = prompting_of(find_result(str(base.directory)), base)
    text = modelfile("m.gguf", base, dataclasses.replace(prompting, template=template))
    read = commands(text)
    assert ("stop", "</s>") in read
    return {name: value for name, value in read if name != "stop"}, template


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize(
    ("name", "with_system"),
    [
        (name, with_system)
        for name in TEMPLATES
        for with_system in (False, True)
        if not (with_system and name in ALONE)
    ],
)
def test_ollama_renders_the_prompts_of_the_chat_template(
    base: BaseModel, name: str, with_system: bool, count: int
) -> None:
    found, template = written(base, TEMPLATES[name])
    assert found["FROM"] == "./m.gguf"
    messages = [SYSTEM, *SAID[:count]] if with_system else SAID[:count]
    expected = template.render(messages, add_generation_prompt=True)
    bos = base.tokenizer.special_tokens["bos_token"]
    if base.tokenizer.use_bos:  # llama.cpp puts it there
        expected = expected.removeprefix(bos)
    assert prompt(found["TEMPLATE"], messages) == expected


@pytest.mark.parametrize("name", LEFT_OUT)
def test_a_template_that_ollama_cannot_express_is_left_to_the_reader(
    base: BaseModel, name: str
) -> None:
    assert written(base, LEFT_OUT[name])[0] == {"FROM": "./m.gguf"}


@pytest.mark.parametrize("begins", [True, False])
def test_bos_is_put_before_prompts_only_where_training_had_it(
    base: BaseModel, begins: bool
) -> None:
    source = "{{ bos_token }}" * begins + "{% for m in messages %}{{ m.content }}{% endfor %}"
    template = ChatTemplate(source, "of a test", base.tokenizer.special_tokens)
    prompting = prompting_of(find_result(str(base.directory)), base)
    trained = dataclasses.replace(prompting, template=template, origin="trained")
    assert trained.puts_bos(base.tokenizer) is (base.tokenizer.use_bos and begins)
    own = dataclasses.replace(trained, origin="model")
    assert own.puts_bos(base.tokenizer) is base.tokenizer.use_bos
    metadata = vocabulary_metadata(
        base.tokenizer,
        dict(companions(base)),
        base.settings,
        name=base.name,
        template=source,
        end_ids=(),
        puts_bos=trained.puts_bos(base.tokenizer),
    )
    assert metadata["tokenizer.ggml.add_bos_token"] is (base.tokenizer.use_bos and begins)
