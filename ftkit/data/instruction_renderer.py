"""Samples of instruction records: a prompt in a prompt style, an answer, and an end."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from ftkit.data.renderer import NO_OUTPUT, Example, Rendered, Renderer, Rendering
from ftkit.records.record import Record

if TYPE_CHECKING:
    from litgpt.prompts import PromptStyle
    from litgpt.tokenizer import Tokenizer


class InstructionRenderer(Renderer):
    """Ids and labels are those of litgpt.data.SFTDataset."""

    def __init__(
        self, tokenizer: "Tokenizer | None", prompt_style: "PromptStyle", *, mask_prompt: bool
    ) -> None:
        """Prepare.

        Args:
            tokenizer: of the base model; None: nothing but texts is asked for.
            prompt_style: how instruction and input become a prompt.
            mask_prompt: whether answers alone carry loss.
        """
        self._tokenizer, self._prompt_style = tokenizer, prompt_style
        self._mask_prompt = mask_prompt

    @property
    def stop_ids(self) -> frozenset[int]:
        assert self._tokenizer is not None
        return frozenset({self._tokenizer.eos_id})

    def text(self, record: Record) -> str:
        return self._prompt(record) + record["output"] if record["output"].strip() else ""

    def render(self, records: Sequence[Record]) -> Iterator[Rendering]:
        answered = [record for record in records if record["output"].strip()]
        prompts = iter(_encode(self._tokenizer, [self._prompt(record) for record in answered]))
        answers = iter(
            _encode(self._tokenizer, [record["output"] for record in answered], answer=True)
        )
        for record in records:
            if not record["output"].strip():
                yield Rendering(refused=NO_OUTPUT)
                continue
            prompt, answer = next(prompts), next(answers)
            first = len(prompt) if self._mask_prompt else 0
            ids = prompt + answer
            yield Rendering((Rendered(ids, ((first, len(ids)),)),))

    def example(self, record: Record) -> Example:
        assert self._tokenizer is not None
        return Example(
            prompt=self._tokenizer.encode(self._prompt(record)).tolist(),
            expected=record["output"],
            stop_ids=self.stop_ids,
            instruction=record["instruction"],
            input=record.get("input", ""),
        )

    def _prompt(self, record: Record) -> str:
        return self._prompt_style.apply(prompt=record["instruction"], **record)


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
        if not ids or ids[0] != tokenizer.bos_id:
            ids = [tokenizer.bos_id, *ids]
    elif ids and ids[0] == tokenizer.bos_id:
        ids = ids[1:]
    if ids and ids[-1] == tokenizer.eos_id:
        return ids[:-1]
    return [*ids, tokenizer.eos_id] if eos else ids
