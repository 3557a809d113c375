"""Samples of prompts and answers: instruction records in a prompt style, and completions."""

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import TYPE_CHECKING

from ftkit.data.records.record import Record
from ftkit.data.rendering.renderer import NO_OUTPUT, Example, Rendered, Renderer, Rendering
from ftkit.models.chat_templates.prompt_styles import DEFAULT, AnyStyle, template_of_style
from ftkit.models.chat_templates.template import ChatTemplate

if TYPE_CHECKING:
    from ftkit.models.pretrained.tokenizer import Tokenizer


class PromptedRenderer(Renderer):
    """A prompt, an answer, and an end: ids and labels are those of litgpt.data.SFTDataset."""

    def __init__(self, tokenizer: "Tokenizer | None", *, mask_prompt: bool) -> None:
        """Prepare.

        Args:
            tokenizer: of the base model; None: nothing but texts is asked for.
            mask_prompt: whether answers alone carry loss.
        """
        self._tokenizer, self._mask_prompt = tokenizer, mask_prompt

    @abstractmethod
    def prompt(self, record: Record) -> str:
        """What the model is given."""

    @abstractmethod
    def answer(self, record: Record) -> str:
        """What it should say."""

    @property
    def stop_ids(self) -> frozenset[int]:
        assert self._tokenizer is not None
        return frozenset({self._tokenizer.eos_id})

    def text(self, record: Record) -> str:
        answer = self.answer(record)
        return self.prompt(record) + answer if answer.strip() else ""

    def render(self, records: Sequence[Record]) -> Iterator[Rendering]:
        assert self._tokenizer is not None
        answered = [record for record in records if self.answer(record).strip()]
        prompts = iter(_encode(self._tokenizer, [self.prompt(record) for record in answered]))
        answers = iter(
            _encode(self._tokenizer, [self.answer(record) for record in answered], answer=True)
        )
        for record in records:
            if not self.answer(record).strip():
                yield Rendering(refused=NO_OUTPUT)
                continue
            prompt, answer = next(prompts), next(answers)
            first = len(prompt) if self._mask_prompt else 0
            ids = prompt + answer
            yield Rendering((Rendered(ids, ((first, len(ids)),)),))


class InstructionRenderer(PromptedRenderer):
    """Instruction and input in a prompt style, and the output."""

    def __init__(
        self, tokenizer: "Tokenizer | None", prompt_style: AnyStyle, *, mask_prompt: bool
    ) -> None:
        """Prepare.

        Args:
            tokenizer: of the base model; None: nothing but texts is asked for.
            prompt_style: how instruction and input become a prompt.
            mask_prompt: whether answers alone carry loss.
        """
        super().__init__(tokenizer, mask_prompt=mask_prompt)
        self._prompt_style = prompt_style

    @cached_property
    def template(self) -> ChatTemplate:
        assert self._tokenizer is not None
        return template_of_style(self._prompt_style, self._tokenizer)

    def prompt(self, record: Record) -> str:
        return self._prompt_style.apply(prompt=record["instruction"], **record)

    def answer(self, record: Record) -> str:
        return record["output"]

    def example(self, record: Record) -> Example:
        assert self._tokenizer is not None
        return Example(
            prompt=self._tokenizer.encode(self.prompt(record)).tolist(),
            expected=record["output"],
            stop_ids=self.stop_ids,
            record=record,
            instruction=record["instruction"],
            input=record.get("input", ""),
        )


class CompletionRenderer(PromptedRenderer):
    """Prompt and completion, taken as they are."""

    @cached_property
    def template(self) -> ChatTemplate:
        assert self._tokenizer is not None
        return template_of_style(DEFAULT, self._tokenizer)

    def prompt(self, record: Record) -> str:
        return record["prompt"]

    def answer(self, record: Record) -> str:
        return record["completion"]

    def example(self, record: Record) -> Example:
        assert self._tokenizer is not None
        prompt = record["prompt"]
        return Example(
            prompt=self._tokenizer.encode(prompt).tolist(),
            expected=record["completion"],
            stop_ids=self.stop_ids,
            record=record,
            instruction=prompt,
        )


def _encode(tokenizer: "Tokenizer", texts: list[str], *, answer: bool = False) -> list[list[int]]:
    """Token ids as litgpt.Tokenizer.encode gives them, many texts at once where that is safe.

    Args:
        tokenizer: of the base model.
        texts: prompts, or answers.
        answer: encode as an answer: with an end and without a start token.
    """
    bos = False if answer else None
    if tokenizer.backend != "huggingface" or tokenizer.processor.padding is not None:
        # A batch would be padded to its longest text.
        return [tokenizer.encode(text, bos=bos, eos=answer).tolist() for text in texts]
    encodings = tokenizer.processor.encode_batch_fast(texts)
    return [
        _mark_ends(encoding.ids, tokenizer, bos=tokenizer.use_bos and not answer, eos=answer)
        for encoding in encodings
    ]


def _mark_ends(ids: list[int], tokenizer: "Tokenizer", *, bos: bool, eos: bool) -> list[int]:
    """Add start and end token by the rules of litgpt.Tokenizer.encode, odd ones included.

    So an end token that is already there is removed, whether or not one is asked for.
    """
    if bos:
        assert tokenizer.bos_id is not None, "texts that begin with BOS have one"
        if not ids or ids[0] != tokenizer.bos_id:
            ids = [tokenizer.bos_id, *ids]
    elif ids and ids[0] == tokenizer.bos_id:
        ids = ids[1:]
    if ids and ids[-1] == tokenizer.eos_id:
        return ids[:-1]
    return [*ids, tokenizer.eos_id] if eos else ids
