"""Prompt styles written as a text with places for instruction and input."""

from string import Formatter
from typing import Any

from litgpt.prompts import PromptStyle

from ftkit.errors import UserError

PLACES = ("instruction", "input", "sys_prompt")


class TextPrompt(PromptStyle):  # type: ignore[misc]
    """A prompt of one's own."""

    def __init__(self, text: str) -> None:
        """Take the text.

        Args:
            text: with {instruction}, and {input} and {sys_prompt} if wanted. {{ and }} stand for
                braces, a backslash and n, as shells hand them on, for a line end. Without {input},
                an input stands below the instruction.

        Raises:
            UserError: it has other places, or none for the instruction.
        """
        self.text = text
        text = text.replace("\\n", "\n")
        try:
            parts = [part[:4] for part in Formatter().parse(text)]
        except ValueError as error:
            raise UserError(
                f"data.prompt_style is {self.text!r}, whose braces do not match ({error}).\n"
                "Write {{ and }} for braces that are meant as such."
            ) from None
        self._parts = [(literal, place) for literal, place, _, _ in parts]
        for _, place, form, conversion in parts:
            if place is not None and (place not in PLACES or form or conversion):
                raise UserError(
                    f"data.prompt_style is {self.text!r}, but {{{place}}} is no place in a prompt; "
                    f"there are {', '.join(f'{{{known}}}' for known in PLACES)}.\n"
                    "Write {{ and }} for braces that are meant as such."
                )
        self._places = {place for _, place in self._parts}
        if "instruction" not in self._places:
            raise UserError(
                f"data.prompt_style is {self.text!r}, which has no place for the instruction.\n"
                'Try --data.prompt_style "Q: {instruction}\\nA: ".'
            )

    def apply(self, prompt: str, *, sys_prompt: str | None = None, **kwargs: Any) -> str:
        given = kwargs.get("input") or ""
        if given and "input" not in self._places:
            prompt = f"{prompt}\n\n{given}"
        values = {"instruction": prompt, "input": given, "sys_prompt": sys_prompt or ""}
        return "".join(text + (values[place] if place else "") for text, place in self._parts)
