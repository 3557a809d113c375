"""Modelfiles: read by Ollama's rules they give the prompts of the chat template."""

import dataclasses

import pytest
from gguf_models import make_gguf_model
from modelfiles import commands, prompt

from ftkit.evaluation.prompting import prompting_of
from ftkit.evaluation.result import find_result
from ftkit.exchange.gguf.modelfile import modelfile
from ftkit.models.chat_templates.template import ChatTemplate
from ftkit.models.pretrained.base_model import BaseModel, open_base

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TOLD = (
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
    "told": TOLD + CHATML,
    "begun and told": "{{ bos_token }}" + TOLD + CHATML,
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


@pytest.fixture(scope="module", params=["smollm2", "mistral"])
def base(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> BaseModel:
    """Whose llama.cpp puts no BOS before a prompt, and whose does."""
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
    ("name", "told"),
    [(name, told) for name in TEMPLATES for told in (False, True) if not (told and name in ALONE)],
)
def test_ollama_makes_the_prompts_of_the_chat_template(
    base: BaseModel, name: str, told: bool, count: int
) -> None:
    found, template = written(base, TEMPLATES[name])
    assert found["FROM"] == "./m.gguf"
    messages = [SYSTEM, *SAID[:count]] if told else SAID[:count]
    expected = template.render(messages, add_generation_prompt=True)
    bos = base.tokenizer.special_tokens["bos_token"]
    if base.tokenizer.use_bos:  # llama.cpp puts it there
        expected = expected.removeprefix(bos)
    assert prompt(found["TEMPLATE"], messages) == expected


@pytest.mark.parametrize("name", LEFT_OUT)
def test_what_ollama_would_write_otherwise_is_left_to_the_reader(
    base: BaseModel, name: str
) -> None:
    assert written(base, LEFT_OUT[name])[0] == {"FROM": "./m.gguf"}
