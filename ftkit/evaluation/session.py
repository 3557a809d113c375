"""An inference session: a loaded result on a device, with prompts in and text out."""

import dataclasses
import sys
import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass

import torch

from ftkit.data.records.media import Prompt, Prompter, media_row
from ftkit.errors import UserError, is_out_of_memory
from ftkit.evaluation.loading import Loaded, load_result, plan_use, with_extra_weights
from ftkit.evaluation.prompting import (
    Question,
    check_system,
    prompt_text,
    prompting_for,
    with_input,
)
from ftkit.evaluation.result import Result
from ftkit.models.generation import Context, Sampling, TextStream, answer_in_tokens
from ftkit.models.pretrained.tokenizer import Tokenizer
from ftkit.recipe.options import AnswerOptions, UseOptions
from ftkit.recipe.plan import Plan
from ftkit.recipe.recipe import Quantization
from ftkit.strategies.distributed import make_device
from ftkit.strategies.strategy import compute_dtype, make_strategy, parameter_dtype, set_arithmetic
from ftkit.utils.console.display import Display
from ftkit.utils.imports import silence_libraries
from ftkit.utils.registry import imported


@dataclass(frozen=True, kw_only=True)
class Session:
    """A loaded result with its device and precision."""

    loaded: Loaded
    plan: Plan
    device: torch.device
    quantize: Quantization | None
    rounding: str | None
    """Format of its weights in words, if they are quantised or rounded."""
    context: Context
    """Context manager for every call of the model."""
    result: Result
    """What was loaded."""
    base: str | None
    """Where its base model is, if not where the run had it."""

    def see(self, kinds: Collection[str]) -> None:
        """Load what computes media of some kinds, once there are any.

        Raises:
            UserError: the base model is needed for it, and not there; or the model needs media.
        """
        base = self.loaded.base
        base.architecture.require_media(kinds, base.name)
        for kind in kinds:
            whole = with_extra_weights(self.loaded.base, self.result, self.base, "--base")
            place = media_row(kind).encoder_place
            self.loaded.model.body.add_encoder(place, whole.rest)


def plan_session(result: Result, options: UseOptions) -> tuple[Plan, Quantization | None]:
    """Choose device, precision and quantization, and set the arithmetic of this process.

    Raises:
        UserError: this machine does not support them.
    """
    accelerator = None if options.accelerator == "auto" else options.accelerator
    plan = plan_use(result, accelerator, options.precision)
    quantize = result.quantize
    if options.quantize is not None:
        # The word none undoes the quantisation of the run; without the option it stays.
        quantize = None if options.quantize == "none" else options.quantize
    set_arithmetic(plan)
    silence_libraries()
    return plan, quantize


def start_session(result: Result, options: UseOptions) -> Session:
    """Load a result; standard error shows progress if that takes long.

    Raises:
        UserError: something is missing, does not fit together, or is too large for the device.
    """
    plan, quantize = plan_session(result, options)
    rounded = result.rounding if options.quantize is None else None
    device = make_device(plan.accelerator)
    with (
        Display(None, stream=sys.stderr) as display,
        display.phase(f"loading {result.name}", brief=True) as phase,
    ):
        for notice in plan.notices:
            display.warning(notice)
        try:
            loaded = load_result(
                result,
                device=device,
                dtype=parameter_dtype(plan),
                compute_dtype=compute_dtype(plan),
                quantize=quantize,
                rounds=rounded is not None,
                base=options.base,
                progress=phase.advance,
            )
        except Exception as error:
            # Libraries raise different types for it.
            if not is_out_of_memory(error):
                raise
            raise UserError(
                f"{result.name} does not fit into the memory of {device} in {plan.precision}. "
                "Try --quantize bnb.nf4, --precision bf16-true or --accelerator cpu."
            ) from None
    return Session(
        loaded=loaded,
        plan=plan,
        device=device,
        quantize=quantize,
        rounding=rounded or quantize,
        # Autocast where the run computed in mixed precision.
        context=make_strategy(plan).precision.forward_context,
        result=result,
        base=options.base,
    )


@dataclass
class Answer:
    """An answer, complete once all of its pieces have been taken."""

    text: str = ""
    tokens: int = 0
    seconds: float = 0.0

    @property
    def speed_text(self) -> str:
        """Tokens, time and speed as a text."""
        speed = self.tokens / self.seconds if self.seconds else 0.0
        return f"{self.tokens:,} tokens in {self.seconds:.1f} s, {speed:.1f} tokens/s"


class Responder:
    """Answers prompts with a result."""

    def __init__(self, session: Session, options: AnswerOptions) -> None:
        """Choose prompts and options.

        Args:
            session: the loaded result.
            options: of prompts and sampling.

        Raises:
            UserError: there is no such prompt style or chat template, or it has no place for
                --system.
        """
        self._session, self._options = session, options
        base, prompting = session.loaded.base, session.loaded.prompting
        self.prompting = prompting_for(prompting, options, base)
        """Template and end tokens; None: texts are used as prompts unchanged."""
        self.tokenizer: Tokenizer = base.tokenizer
        self.context_length = base.architecture.context_length
        """Most tokens of prompt and answer together."""
        if self.prompting is not None and options.system is not None:
            check_system(self.prompting.template, options.system)
        # Raw text still ends where the model was trained to end, but not at the stops of a prompt
        # style.
        ends = self.prompting or dataclasses.replace(prompting, style=None)
        self._stop_ids = ends.stop_ids(self.tokenizer)

    @property
    def notice(self) -> str | None:
        """Notice about the template, where no option chose it."""
        if self.prompting is None or self.prompting.origin != "model":
            return None
        return (
            f"{self._session.loaded.base.name} is prompted in its own chat template; "
            "--chat_template, --prompt_style and --raw change that"
        )

    def prompt_of(self, question: Question) -> Prompt:
        """Encode a question.

        Raises:
            UserError: the chat template does not accept it, or the model takes no such media.
        """
        prompt = self._encoded(question)
        self.tokenizer.require_embedded(prompt.ids, "The prompt")
        return prompt

    def _encoded(self, question: Question) -> Prompt:
        if self.prompting is None or not question.messages:
            return _of_text(self.tokenizer.encode(question.text).tolist())
        template = self.prompting.template
        prompter: Prompter | None = None
        kinds = [medium["kind"] for medium in question.media][:1]
        self._session.see(kinds)
        for kind in kinds:
            recipe = self._session.result.recipe
            options = {} if recipe is None else recipe.data["init_args"]
            made = imported(media_row(kind).prompter_place)
            prompter = made(template, self.tokenizer, options)
            template = prompter.template
        # As in training: a prompt style takes the input apart, other templates as part of the
        # message.
        if self.prompting.style is None:
            question = with_input(question, template)
        text = prompt_text(question, template, self._options.system)
        if prompter is not None:
            return prompter.encode(text, question.media)
        ids, _ = self.tokenizer.encode_rendered(text)
        return _of_text(ids)

    def stream(self, prompt: Prompt, answer: Answer) -> Iterator[str]:
        """Yield the answer to a prompt piece by piece.

        Args:
            prompt: from `prompt_of`.
            answer: filled with text, tokens and time.

        Raises:
            UserError: the prompt leaves no room for an answer.
        """
        # At least one token must fit behind the prompt.
        length = len(prompt.ids)
        if not 0 < length < self.context_length:
            size = f"{length:,} tokens long" if length else "empty"
            raise UserError(
                f"The prompt is {size}, but must have from 1 to {self.context_length - 1:,}, so "
                "that there is room for an answer. Try another --prompt."
            )
        options = self._options
        tokens = answer_in_tokens(
            self._session.loaded.model,
            torch.tensor(prompt.ids),
            stop_ids=self._stop_ids,
            max_new_tokens=options.max_new_tokens,
            sampling=Sampling(
                temperature=options.temperature,
                top_k=options.top_k,
                top_p=options.top_p,
                seed=options.seed,
            ),
            context=self._session.context,
            media=prompt.read if prompt.media else None,
        )
        stream = TextStream(self.tokenizer)
        start = time.perf_counter()
        for token in tokens:
            piece = stream.add(token)
            answer.text += piece
            answer.tokens += 1
            # After each token, because the caller may stop the stream at any of them.
            answer.seconds = time.perf_counter() - start
            if piece:
                yield piece
        # The answer may end within a character of several tokens.
        if rest := stream.rest():
            answer.text += rest
            yield rest

    def answer(self, prompt: Prompt) -> Answer:
        """Return the whole answer to a prompt."""
        answer = Answer()
        for _ in self.stream(prompt, answer):
            pass
        return answer


def _of_text(ids: list[int]) -> Prompt:
    """A prompt without media."""
    return Prompt(ids, (), lambda _: {})
