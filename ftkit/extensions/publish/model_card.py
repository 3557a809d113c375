"""Model card: README.md of a result, made from the report of its run.

It names no directory of the machine that it was made on: others are to read it.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import yaml

from ftkit.data.records.paths import is_hub_name
from ftkit.models.pretrained.model_files import CARD, licence_files
from ftkit.models.pretrained.places import hub_name
from ftkit.recipe.adapter_types import LORA, type_title
from ftkit.recipe.hubs import split_version
from ftkit.recipe.implementations import HF, layout_in
from ftkit.recipe.objectives import ScoreLabels, scores_of
from ftkit.recipe.recipe import Component
from ftkit.redaction import redacted
from ftkit.runs.report.metrics import perplexity
from ftkit.runs.report.report import Report, Resolved
from ftkit.runs.report.table import memory_text, term_title, term_values_text
from ftkit.utils.console.formatting import (
    bytes_text,
    duration_text,
    from_to_text,
    loss_text,
    number_text,
    percent_text,
)
from ftkit.utils.files import write_durably
from ftkit.utils.yaml_files import parse_yaml

if TYPE_CHECKING:
    from ftkit.evaluation.result import Result

_FENCE = "---"
_SFT = Component(class_path="sft", init_args={})
"""Objective of reports of earlier versions, which name none."""


@dataclass(frozen=True, kw_only=True)
class BaseOrigin:
    """The base model of a run."""

    name: str
    """Public name, without directories of this machine."""
    on_hub: str | None = None
    """ORG/NAME; None: it is not known to be there."""
    licence: str | None = None
    """Licence named by its card, such as apache-2.0; None: not named."""
    licence_files: tuple[str, ...] = ()
    """Names of those that lie beside it."""

    @classmethod
    def of(cls, name: str, directory: Path | None) -> "BaseOrigin":
        """Describe a base model.

        Args:
            name: as a recipe names it.
            directory: where its files are; None: nowhere.
        """
        found = hub_name(name)
        # Of all versions: a card's head names no other.
        on_hub = None if found is None else split_version(found)[0]
        files = [] if directory is None or not directory.is_dir() else licence_files(directory)
        licence = None if directory is None else card_metadata(directory / CARD).get("license")
        # A path would name a directory of this machine: its last part is enough.
        short = name if name.startswith(("embedded:", "random:")) else Path(name).name
        return cls(
            name=on_hub or short,
            on_hub=on_hub,
            licence=licence if isinstance(licence, str) else None,
            licence_files=tuple(file.name for file in files),
        )


@dataclass(frozen=True, kw_only=True)
class DataOrigin:
    """The training data of a run."""

    names: tuple[str, ...]
    """Data sets of the hub, names of files, or the kind of data."""
    on_hub: tuple[str, ...] = ()
    """Names that are data sets of the hub."""

    @classmethod
    def of(cls, data: Mapping[str, Any]) -> "DataOrigin":
        """Describe the data of a recipe, as reports store it."""
        given = data.get("init_args") or {}
        sources = given.get("sources") or [given]
        # Only some kinds of data have a path; LitGPT's other sets are known by their class.
        paths = [str(path) for s in sources if (path := s.get("path") or s.get("json_path"))]
        if not paths:
            return cls(names=(str(data["class_path"]).rpartition(".")[2],))
        on_hub = tuple(path for path in paths if is_hub_name(path) and ":" not in path)
        kept = [p if p in on_hub or p.startswith("embedded:") else Path(p).name for p in paths]
        return cls(names=tuple(kept), on_hub=on_hub)


def card_metadata(file: Path) -> dict[str, Any]:
    """Metadata in the head of a model card; {} if missing or unreadable."""
    try:
        head, fence, _ = file.read_text(encoding="utf-8").removeprefix(_FENCE).partition("\n---")
        found = parse_yaml(head) if fence else None
    except (OSError, ValueError, yaml.YAMLError):
        return {}
    return found if isinstance(found, dict) else {}


CardKind = Literal["adapter", "hf", "litgpt", "gguf"]
"""Kinds of results: a PEFT adapter, a whole model in one of two layouts, or a GGUF file."""
HERE = '"."'
"""Placeholder for the result's name in its card, until it has a name on the hub."""
_PROJECT = "ftkit"
_LIBRARIES: dict[CardKind, str] = {
    "adapter": "peft",
    "hf": "transformers",
    "litgpt": "litgpt",
    "gguf": "gguf",
}
_KINDS = {
    ("adapter", True): "A LoRA adapter",
    ("hf", True): "A LoRA adapter, merged into its base model",
    ("litgpt", True): "A LoRA adapter, merged into its base model, in LitGPT's layout",
    ("gguf", True): "A LoRA adapter as a GGUF file, for llama.cpp",
    ("hf", False): "A full fine-tune",
    ("gguf", False): "A full fine-tune as a GGUF file, for llama.cpp and Ollama",
    ("litgpt", False): "A full fine-tune, in LitGPT's layout",
}
"""Descriptions by kind of the result, and whether LoRA made it."""
_ASKED = {
    "instruction": "Name three colours.",
    "completion": "The opposite of dry is",
    "text": "Once upon a time",
}
"""What is asked of a model that was trained on such records; of others it is `_GREETING`. Never a
record itself, which may be nobody else's business: cards are published."""
_GREETING = "Hello!"
_INPUT = "red, small, blue, green, loud"
"""What is asked about, where records have an input beside their instruction."""
_ANSWER = """
messages = [{"role": "user", "content": "Hello!"}]
inputs = tokenizer.apply_chat_template(
    messages, add_generation_prompt=True, return_dict=True, return_tensors="pt"
)
answer = model.generate(**inputs, max_new_tokens=100)[0, inputs.input_ids.shape[1] :]
print(tokenizer.decode(answer, skip_special_tokens=True))
```
"""
_USAGE: dict[CardKind, str] = {
    "adapter": f"""With PEFT, which finds the base model:

```python
from peft import AutoPeftModelForCausalLM
from transformers import AutoTokenizer

name = {HERE}
model = AutoPeftModelForCausalLM.from_pretrained(name)
tokenizer = AutoTokenizer.from_pretrained(name)
{_ANSWER.lstrip()}""",
    "hf": f"""With transformers:

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

name = {HERE}
model = AutoModelForCausalLM.from_pretrained(name)
tokenizer = AutoTokenizer.from_pretrained(name)
{_ANSWER.lstrip()}""",
    "litgpt": f"""With LitGPT, on a local copy:

```python
from litgpt import LLM

name = {HERE}
print(LLM.load(name).generate("Hello!"))
```
""",
    "gguf": """With llama.cpp: `llama-cli -m model-*.gguf`, of an adapter
`llama-cli -m BASE.gguf --lora adapter-*.gguf`. With Ollama: `ollama create NAME -f Modelfile`,
where there is one.
""",
}
"""Code or commands that use the result, by its kind."""
_USAGE_OF_WHOLE: dict[CardKind, str] = {
    "adapter": f"""With PEFT, on the whole model:

```python
from peft import PeftConfig, PeftModel
from transformers import AutoModelForImageTextToText, AutoTokenizer

name = {HERE}
base = PeftConfig.from_pretrained(name).base_model_name_or_path
model = PeftModel.from_pretrained(AutoModelForImageTextToText.from_pretrained(base), name)
tokenizer = AutoTokenizer.from_pretrained(name)
{_ANSWER.lstrip()}""",
    "hf": _USAGE["hf"].replace("AutoModelForCausalLM", "AutoModelForImageTextToText"),
}
"""The same of a language model within a multimodal one: by its class for text alone, transformers
would load other names or none."""
_ANSWER_TO_IMAGE = """
content = [
    {"type": "image", "path": "picture.png"},
    {"type": "text", "text": "What is this?"},
]
inputs = processor.apply_chat_template(
    [{"role": "user", "content": content}],
    tokenize=True,
    add_generation_prompt=True,
    return_dict=True,
    return_tensors="pt",
)
answer = model.generate(**inputs, max_new_tokens=100)[0, inputs["input_ids"].shape[1] :]
print(processor.decode(answer, skip_special_tokens=True))
```
"""
_USAGE_WITH_IMAGES: dict[CardKind, str] = {
    "adapter": f"""With PEFT, about an image (processors of some models need torchvision):

```python
from peft import PeftConfig, PeftModel
from transformers import AutoModelForImageTextToText, AutoProcessor, AutoTokenizer
from transformers import GenerationConfig

name = {HERE}
base = PeftConfig.from_pretrained(name).base_model_name_or_path
model = PeftModel.from_pretrained(AutoModelForImageTextToText.from_pretrained(base), name)
model.generation_config = GenerationConfig.from_pretrained(name)
processor = AutoProcessor.from_pretrained(base)
processor.tokenizer = AutoTokenizer.from_pretrained(name)
processor.chat_template = processor.tokenizer.chat_template
{_ANSWER_TO_IMAGE.lstrip()}""",
    "hf": f"""With transformers, about an image (processors of some models need torchvision):

```python
from transformers import AutoModelForImageTextToText, AutoProcessor

name = {HERE}
model = AutoModelForImageTextToText.from_pretrained(name)
processor = AutoProcessor.from_pretrained(name)
{_ANSWER_TO_IMAGE.lstrip()}""",
}
"""The same where the training data had images."""
_HEARING = ("qwen2_audio",)
"""Values of model_type of models that hear and do not see, which that class does not load."""
_OF_HEARING = "AutoModelForMultimodalLM"
_ANSWER_TO_AUDIO = """
rate = processor.feature_extractor.sampling_rate
samples, own_rate = soundfile.read("sound.wav", dtype="float32", always_2d=True)
audio = soxr.resample(samples.mean(axis=1), own_rate, rate)
content = [{"type": "audio"}, {"type": "text", "text": "What is this?"}]
text = processor.apply_chat_template(
    [{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True
)
inputs = processor(text=text, audio=[audio], sampling_rate=rate, return_tensors="pt")
answer = model.generate(**inputs, max_new_tokens=100)[0, inputs["input_ids"].shape[1] :]
print(processor.decode(answer, skip_special_tokens=True))
```
"""
_USAGE_WITH_AUDIO: dict[CardKind, str] = {
    "adapter": f"""With PEFT, about audio:

```python
import soundfile
import soxr
from peft import PeftConfig, PeftModel
from transformers import {_OF_HEARING}, AutoProcessor, AutoTokenizer
from transformers import GenerationConfig

name = {HERE}
base = PeftConfig.from_pretrained(name).base_model_name_or_path
model = PeftModel.from_pretrained({_OF_HEARING}.from_pretrained(base), name)
model.generation_config = GenerationConfig.from_pretrained(name)
processor = AutoProcessor.from_pretrained(base)
processor.tokenizer = AutoTokenizer.from_pretrained(name)
processor.chat_template = processor.tokenizer.chat_template
{_ANSWER_TO_AUDIO.lstrip()}""",
    "hf": f"""With transformers, about audio:

```python
import soundfile
import soxr
from transformers import {_OF_HEARING}, AutoProcessor

name = {HERE}
model = {_OF_HEARING}.from_pretrained(name)
processor = AutoProcessor.from_pretrained(name)
{_ANSWER_TO_AUDIO.lstrip()}""",
}
"""The same where the training data had audio."""
_SCORE = """
messages = [
    {"role": "user", "content": "Hello!"},
    {"role": "assistant", "content": "Hello! How can I help?"},
]
text = tokenizer.apply_chat_template(messages, tokenize=False)
inputs = tokenizer(text, add_special_tokens=False, return_tensors="pt")
print(model(**inputs).logits[0, 0].item())
```
"""
_CLASSES = """
inputs = tokenizer("Hello!", return_tensors="pt")
print(model(**inputs).logits[0].tolist())
```
"""
_RELEVANCE = """
messages = [
    {"role": "query", "content": "Which animal barks?"},
    {"role": "document", "content": "A dog barks."},
]
text = tokenizer.apply_chat_template(messages, tokenize=False)
inputs = tokenizer(text, add_special_tokens=False, return_tensors="pt")
print(model(**inputs).logits[0, 0].item())
```
"""
_USAGE_OF_SCORES: dict[CardKind, str] = {
    "adapter": f"""With PEFT, which finds the base model:

```python
from peft import AutoPeftModelForSequenceClassification
from transformers import AutoTokenizer

name = {HERE}
model = AutoPeftModelForSequenceClassification.from_pretrained(name, num_labels=1)
tokenizer = AutoTokenizer.from_pretrained(name)
{_SCORE.lstrip()}""",
    "hf": f"""With transformers:

```python
from transformers import AutoModelForSequenceClassification, AutoTokenizer

name = {HERE}
model = AutoModelForSequenceClassification.from_pretrained(name)
tokenizer = AutoTokenizer.from_pretrained(name)
{_SCORE.lstrip()}""",
}
"""The same of reward models."""
_USAGE_OF_VECTORS: dict[CardKind, str] = {
    "adapter": f"""With PEFT, which finds the base model:

```python
import torch
from peft import AutoPeftModelForFeatureExtraction
from transformers import AutoTokenizer

name = {HERE}
model = AutoPeftModelForFeatureExtraction.from_pretrained(name)
tokenizer = AutoTokenizer.from_pretrained(name)
states = model(**tokenizer("Hello!", return_tensors="pt")).last_hidden_state[0]
vector = torch.nn.functional.normalize(STATE, dim=0)
print(vector.tolist())
```
""",
    "hf": f"""With sentence-transformers:

```python
from sentence_transformers import SentenceTransformer

model = SentenceTransformer({HERE})
queries, documents = model.encode(["Hello?"]), model.encode(["Hello!", "Goodbye."])
print(model.similarity(queries, documents))
```
""",
}
"""The same of embedding models, with the state that is the vector of a text."""
_PLACES = ("out_dir", "access_token", "resume")
"""Keys of a recipe that say nothing about a result."""


def write_card(report: Report, base: Path | None, directory: Path) -> None:
    """Write the card of a result beside it.

    Args:
        report: of its run.
        base: directory of the base model; None: it is not known.
        directory: of the result.
    """
    kind: CardKind = "adapter" if report.method == "lora" else "hf"
    # A full fine-tune is saved in the layout of its base model.
    if layout_in(directory) != HF:
        kind = "litgpt"
    write_durably(directory / CARD, redacted(card_text(report, base, kind)))


def card_text(report: Report, base_directory: Path | None, kind: CardKind) -> str:
    """Text of a model card.

    Args:
        report: of the run that has made the result.
        base_directory: of the base model; None: it is not known.
        kind: what the result is now; an adapter may have been merged.
    """
    base = BaseOrigin.of(str(report.recipe["checkpoint_dir"]), base_directory)
    data = DataOrigin.of(report.recipe["data"])
    rows = "\n".join(f"| {label} | {_cell(text)} |" for label, text in _rows(report, base, data))
    # Not sorted: in the order of the recipe's own keys.
    recipe = yaml.safe_dump(_shareable(report.recipe), sort_keys=False, allow_unicode=True)
    scores = scores_of(report.recipe.get("objective", _SFT))
    media = None if report.resolved is None else report.resolved.heaviest_media
    is_whole = report.resolved is not None and report.resolved.kept_bytes
    special: Mapping[CardKind, str] = {}
    task = "text-generation"
    if scores is not None and scores.pooling is not None:
        state = "states.mean(0)" if scores.pooling == "mean" else "states[-1]"
        special = {kind: text.replace("STATE", state) for kind, text in _USAGE_OF_VECTORS.items()}
        task = "feature-extraction"
    elif scores is not None:
        special, task = _USAGE_OF_SCORES, "text-classification"
        if scores.is_relevance:
            task = "text-ranking"
        if not scores.is_reward:
            special = _usage_of_classes(scores, report)
    elif media is not None and media.kind == "audio":
        special, task = _USAGE_WITH_AUDIO, "audio-text-to-text"
    elif media is not None:
        special, task = _USAGE_WITH_IMAGES, "image-text-to-text"
    elif is_whole:
        special = _USAGE_OF_WHOLE
    usage = special.get(kind, _USAGE[kind])
    if not scores and media is None:
        usage = _asking(usage, report)
    if _model_type(base_directory) in _HEARING:
        usage = usage.replace("AutoModelForImageTextToText", _OF_HEARING)
    parts = [
        f"---\n{_head(kind, base, data, _type_of(report), task)}---\n",
        f"# {base.name}, fine-tuned on {', '.join(data.names)}\n",
        f"{_kind_text(kind, report)}, made with {_PROJECT}.\n",
        f"| | |\n|---|---|\n{rows}\n",
        f"## How to use it\n\n{usage}",
        f"## Recipe\n\n```yaml\n{recipe}```\n",
        f"## Licence\n\n{_licence_text(kind, base)}",
    ]
    return "\n".join(parts)


def _usage_of_classes(scores: ScoreLabels, report: Report) -> Mapping[CardKind, str]:
    """The same of classifiers, regressions and rerankers."""
    count, code = len(scores.names), _CLASSES if report.shape == "text" else _SCORE
    code = code.replace("logits[0, 0].item()", "logits[0].tolist()")
    if scores.is_relevance:
        code = _RELEVANCE if report.shape == "text" else _SCORE
    return {
        kind: usage.replace("num_labels=1", f"num_labels={count}").replace(_SCORE.lstrip(), code)
        for kind, usage in _USAGE_OF_SCORES.items()
    }


def _asking(usage: str, report: Report) -> str:
    """Code that asks as the training data do: a model knows no other way."""
    text = _ASKED.get(report.shape or "", _GREETING)
    message = {"role": "user", "content": text}
    if report.shape == "instruction" and any(example.input for example in report.examples):
        message = {"role": "user", "content": "Which of these are colours?", "input": _INPUT}
    asked = json.dumps({"role": "user", "content": _GREETING})
    return usage.replace(asked, json.dumps(message)).replace(f'"{_GREETING}"', f'"{text}"')


def _model_type(base: Path | None) -> str | None:
    """model_type of a base model; None: it is not known."""
    file = None if base is None else base / "config.json"
    if file is None or not file.is_file():
        return None
    found = json.loads(file.read_text(encoding="utf-8")).get("model_type")
    return found if isinstance(found, str) else None


def with_name(card: str, repo_id: str, base: str | None) -> str:
    """Return the card as it is published.

    Args:
        card: as it lies beside the result.
        repo_id: ORG/NAME of the result on the hub.
        base: ORG/NAME of its base model; None: the card says it, or nobody needs it.
    """
    card = card.replace(f"name = {HERE}\n", f'name = "{repo_id}"\n', 1)
    # The hub links a result to its base model by this key.
    if base is not None and not _names_base(card):
        # After the first fence, which opens the metadata.
        card = card.replace("---\n", f"---\nbase_model: {base}\n", 1)
    return card


def _names_base(card: str) -> bool:
    head = card.removeprefix("---").partition("\n---")[0]
    return "\nbase_model:" in head


def _head(kind: CardKind, base: BaseOrigin, data: DataOrigin, adapter: str, task: str) -> str:
    """The metadata that the hub reads."""
    fields: dict[str, Any] = {
        "base_model": base.on_hub,
        "datasets": list(data.on_hub) or None,
        "library_name": _LIBRARIES[kind],
        "license": base.licence,
        "pipeline_tag": task,
        "tags": [_PROJECT, *([adapter] if kind == "adapter" else [])],
    }
    known = {key: value for key, value in fields.items() if value is not None}
    return yaml.safe_dump(known, sort_keys=False)


def _rows(report: Report, base: BaseOrigin, data: DataOrigin) -> Iterator[tuple[str, str]]:
    recipe, resolved, loss = report.recipe, report.resolved, report.loss
    url = f"[{base.on_hub}](https://huggingface.co/{base.on_hub})"
    yield "Base model", url if base.on_hub else base.name
    yield "Method", _method(report)
    train = report.data.get("train")
    yield "Data", ", ".join(data.names) + (f", {train.used:,} records used" if train else "")
    if report.progress is not None:
        done = report.progress
        yield "Trained", f"{done.steps:,} steps, {done.epochs:.3g} epochs, {done.samples:,} samples"
    if resolved is not None:
        optimizer = recipe.get("optimizer", {})
        rate = optimizer.get("init_args", {}).get("lr")
        schedule = recipe.get("train", {}).get("lr_schedule")  # earlier versions had the one
        yield (
            "Each step",
            f"{_step_text(resolved)} of at most {resolved.max_seq_length:,} "
            f"tokens, {str(resolved.optimizer).rpartition('.')[2]}"
            + (f", learning rate {rate:g}" if isinstance(rate, int | float) else "")
            + (f", {schedule}" if schedule else ""),
        )
    if weights := _weights(report):
        yield "Weights", weights
    if loss is not None:
        yield "Training loss", from_to_text(loss.first, loss.last, loss_text)
        # Of the result, which need not be the last step.
        if (found := report.validation_loss) is not None:
            text = from_to_text(loss.validation_first, found, loss_text)
            of_step = f" at step {report.result.step:,}" if report.result else ""
            of_loss = "" if loss.perplexity is None else f", perplexity {perplexity(found):.2f}"
            yield "Validation loss", f"{text}{of_step}{of_loss}"
    for name, term in report.terms.items():
        yield term_title(name).capitalize(), term_values_text(term)
    if (match := report.exact_match) is not None:
        text = from_to_text(match.before, match.after, percent_text)
        yield "Exact match", f"{text} of {match.samples:,} validation records" if text else ""
    for score in report.scores:
        text = from_to_text(score.before, score.after, number_text)
        by = f", by `{score.file}`" if score.file else ""
        yield score.title, f"{text} on {score.samples:,} validation records{by}"
    if resolved is not None:
        where = f"{resolved.world_size or 1} x {resolved.device or resolved.accelerator}"
        yield "Hardware", ", ".join(filter(None, (where, resolved.strategy, resolved.precision)))
    if report.peak_memory is not None:
        yield "Peak memory", memory_text(report.peak_memory)
    if report.step_memory is not None:
        yield "Memory of a step", bytes_text(report.step_memory.fullest.peak_bytes)
    if report.throughput is not None:
        yield "Throughput", f"{number_text(report.throughput.tokens_per_s)} tokens/s"
    if report.phases_s is not None and report.phases_s.total is not None:
        # The report's times cover the last session alone.
        sessions = "last session: " * (report.resumed is not None)
        yield "Time", sessions + duration_text(report.phases_s.total)
    yield "Versions", ", ".join(f"{name} {text}" for name, text in report.versions.items())


def _weights(report: Report) -> str:
    """Description of the result's weights, unless they are simply those of the last step."""
    chosen, decay = report.result, report.recipe.get("train", {}).get("ema_decay")
    parts = (
        chosen and f"of step {chosen.step:,}, which had the lowest validation loss",
        decay is not None and f"exponential moving average over the steps, decay {decay:g}",
    )
    return "; ".join(part for part in parts if part)


def _type_of(report: Report) -> str:
    """Name of the type of adapter; earlier versions had LoRA alone."""
    name: str = report.recipe.get("peft", {}).get("class_path", LORA)
    return name


def _kind_text(kind: CardKind, report: Report) -> str:
    text = _KINDS[kind, report.method == "lora"]
    name = _type_of(report)
    return text if name == LORA else text.replace("LoRA", f"PEFT ({type_title(name)})")


def _method(report: Report) -> str:
    recipe, resolved = report.recipe, report.resolved
    text = "full fine-tuning"
    if resolved is not None and resolved.rounding is not None:
        text += f", {resolved.rounding}"
    if report.method == "lora":
        stored = recipe.get("quantize")
        variant = recipe.get("lora_variant", "lora")
        kind = "LoRA" if variant == "lora" else f"LoRA ({variant})"
        text = f"{kind}, rank {recipe.get('lora_r')}, alpha {recipe.get('lora_alpha')}"
        if (name := _type_of(report)) != LORA:
            title = type_title(name)
            text = ", ".join([title, *(f"{k} {v}" for k, v in recipe["peft"]["init_args"].items())])
        text += f", on a base model stored as {stored}" if stored else ""
    if resolved is None or not resolved.parameters or resolved.trainable_parameters is None:
        return text
    trained, every = map(number_text, (resolved.trainable_parameters, resolved.parameters))
    return f"{text}; {trained} of {every} parameters trained"


def _licence_text(kind: CardKind, base: BaseOrigin) -> str:
    says = f"its card says {base.licence}" if base.licence else "its licence is not known"
    if base.licence_files:
        says += f", and its terms are in {', '.join(base.licence_files)}"
        # Licence files go with weights: an adapter holds none of its base model, and names it.
        says += " beside this file" * (kind != "adapter")
    return f"The terms of the base model hold for what was made from it: {says}.\n"


def _cell(text: str) -> str:
    """Escape a text for a cell of a Markdown table."""
    # A record's or file's name could otherwise add cells or HTML to a published page.
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")


def _shareable(recipe: dict[str, Any]) -> dict[str, Any]:
    """A recipe without directories of this machine."""
    return {key: _named(value) for key, value in recipe.items() if key not in _PLACES}


def _named(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _named(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_named(item) for item in value]
    if isinstance(value, str) and value.startswith(("/", "~")):
        return Path(value).name
    return value


def card_files(result: "Result", base: Path | None, kind: CardKind) -> dict[str, bytes]:
    """Model card of an output, by file name; {} if nothing is known about its run.

    Args:
        result: what it is made of.
        base: directory of the base model; None: it is not known.
        kind: what it becomes.
    """
    from ftkit.evaluation.result import report_of

    report = report_of(result)
    return {} if report is None else {CARD: card_text(report, base, kind).encode()}


def _step_text(resolved: Resolved) -> str:
    if resolved.global_batch_tokens is not None:
        return f"at most {resolved.global_batch_tokens:,} tokens in sequences"
    return f"{resolved.global_batch_size:,} sequences"
