"""Modelfiles as Ollama reads them: its parser's rules, and the part of Go's templates in use."""

import re
from collections.abc import Sequence


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
    """None: the quotes are still open."""
    for quotes in ('"""', '"'):
        if value.startswith(quotes):
            size = len(quotes)
            is_closed = len(value) >= 2 * size and value.endswith(quotes)
            return value[size:-size] if is_closed else None
    return value


def prompt(template: str, messages: Sequence[dict[str, str]]) -> str:
    """What Ollama makes of a conversation; of Go's templates, what ftkit writes is known."""
    told = any(message["role"] == "system" for message in messages)
    template = re.sub(
        r"\{\{ if not \.System \}\}(.*?)\{\{ end \}\}",
        lambda found: "" if told else found.group(1),
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
