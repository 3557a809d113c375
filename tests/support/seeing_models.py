"""Tiny models that see, with tokenizer and image processor, and what transformers makes of images.

Their weights are drawn, their templates are like those that such models have: one writes parts
alone, another one texts as well. What an image becomes in a text is asked of the method of
transformers' own processor: the processors themselves need torchvision.
"""

import importlib
import itertools
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import transformers
from peft import PeftModel
from PIL import Image
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

SPECIAL = [
    *("<s>", "</s>", "<pad>", "<|im_start|>", "<|im_end|>", "<image>", "<|image_pad|>"),
    *("<|video_pad|>", "<|vision_start|>", "<|vision_end|>", "<start_of_image>"),
    *("<image_soft_token>", "<end_of_image>", "<fake_token_around_image>", "<global-img>"),
    *("<|begin_of_image|>", "<|image|>", "<|end_of_image|>", "<img>", "</img>", "<IMG_CONTEXT>"),
    *("[IMG]", "[IMG_BREAK]", "[IMG_END]"),
    *(f"<row_{row}_col_{column}>" for row in range(1, 5) for column in range(1, 5)),
]
_TEXTS = ["what colour is the image red green blue both assistant user system the a it is"] * 10
_TEXT: dict[str, Any] = {
    "vocab_size": 400,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
    "head_dim": 8,
}
_VISION: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_heads": 2,
    "image_size": 16,
    "patch_size": 8,
}
_AXES: dict[str, Any] = {"rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2]}}
_LINEAR: dict[str, Any] = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "head_dim": 16,
    "rope_parameters": {
        "rope_type": "default",
        "mrope_section": [1, 1, 2],
        "partial_rotary_factor": 0.5,
    },
}
_QWEN3 = _VISION | {
    "depth": 2,
    "out_hidden_size": 32,
    "deepstack_visual_indexes": [0],
    "num_position_embeddings": 16,
}
_QWEN_TOKENS = {
    "image_token_id": "<|image_pad|>",
    "video_token_id": "<|video_pad|>",
    "vision_start_token_id": "<|vision_start|>",
    "vision_end_token_id": "<|vision_end|>",
}
_QWEN_MARK = "<|vision_start|><|image_pad|><|vision_end|>"
_SMALL = {"shortest_edge": 16 * 16, "longest_edge": 16 * 16 * 12}
_CROPPED = {"size": {"shortest_edge": 16}, "crop_size": {"height": 16, "width": 16}}
_PINS = [[16, 32], [32, 16], [32, 32]]


@dataclass(frozen=True, kw_only=True)
class _Kind:
    """A family of models that see."""

    mark: str
    """What its chat template writes for an image."""
    token: str
    """Token of a part of an image."""
    settings: dict[str, Any]
    tokens: dict[str, str]
    """Keys of settings that hold the id of a token."""
    processor: tuple[str, dict[str, Any]]
    """Class of its image processor, and arguments."""
    theirs: tuple[str, str] = ("", "")
    """Module of transformers, and class there, whose method writes what an image becomes."""
    attributes: dict[str, Any] = field(default_factory=dict)
    """What that method reads of its processor."""
    files: dict[str, Any] = field(default_factory=dict)
    """Content of processor_config.json."""
    options: dict[str, Any] = field(default_factory=dict)
    """What that class gives the image processor, beside its `images_kwargs`."""
    replaced: str = ""
    """Part of the mark that is replaced; "": the token."""
    nested: bool = False
    types: str = ""
    """Key under which the model is told which tokens are of images; "": none."""


def _pixtral_text(self: Any, inputs: Any, number: int) -> str:
    # As PixtralProcessor, whose module needs torchvision.
    height, width = (int(side) // self.patch_size for side in inputs["image_sizes"][number])
    rows = ["[IMG]" * width] * height
    return "[IMG_BREAK]".join(rows) + "[IMG_END]"


_TILES = {"image_token": "<image>", "image_seq_len": 4, "fake_image_token": SPECIAL[13]}
_TABLE: dict[str, _Kind] = {
    "llava": _Kind(
        mark="<image>\n",
        token="<image>",
        settings={
            "text_config": _TEXT | {"model_type": "llama"},
            "vision_config": _VISION | {"model_type": "clip_vision_model"},
            "image_seq_length": 4,
        },
        tokens={"image_token_id": "<image>"},
        processor=("CLIPImageProcessorPil", _CROPPED),
        theirs=("llava", "LlavaProcessor"),
        attributes={
            "patch_size": 8,
            "num_additional_image_tokens": 1,
            "vision_feature_select_strategy": "default",
        },
        files={
            "patch_size": 8,
            "num_additional_image_tokens": 1,
            "vision_feature_select_strategy": "default",
        },
    ),
    "gemma3": _Kind(
        mark="<start_of_image>",
        token="<image_soft_token>",
        settings={
            "text_config": _TEXT
            | {"sliding_window": 12, "layer_types": ["sliding_attention", "full_attention"]},
            "vision_config": _VISION | {"model_type": "siglip_vision_model", "image_size": 32},
            "mm_tokens_per_image": 4,
        },
        tokens={
            "image_token_index": "<image_soft_token>",
            "boi_token_index": "<start_of_image>",
            "eoi_token_index": "<end_of_image>",
        },
        processor=("Gemma3ImageProcessorPil", {"size": {"height": 32, "width": 32}}),
        theirs=("gemma3", "Gemma3Processor"),
        attributes={
            "full_image_sequence": "\n\n<start_of_image>"
            + "<image_soft_token>" * 4
            + "<end_of_image>\n\n"
        },
        replaced="<start_of_image>",
        types="token_type_ids",
    ),
    "qwen2_5_vl": _Kind(
        mark=_QWEN_MARK,
        token="<|image_pad|>",
        settings={
            "text_config": _TEXT | _AXES,
            "vision_config": _VISION
            | {
                "depth": 2,
                "out_hidden_size": 32,
                "fullatt_block_indexes": [1],
                "window_size": 32,
            },
        },
        tokens=_QWEN_TOKENS,
        processor=("Qwen2VLImageProcessorPil", {"size": _SMALL, "patch_size": 8}),
        theirs=("qwen2_5_vl", "Qwen2_5_VLProcessor"),
        attributes={"image_processor": SimpleNamespace(merge_size=2)},
        types="mm_token_type_ids",
    ),
    "idefics3": _Kind(
        mark="<image>",
        token="<image>",
        settings={
            "text_config": _TEXT | {"model_type": "llama"},
            "vision_config": _VISION | {"image_size": 32},
            "scale_factor": 2,
        },
        tokens={"image_token_id": "<image>"},
        processor=(
            "Idefics3ImageProcessorPil",
            {"size": {"longest_edge": 64}, "max_image_size": {"longest_edge": 32}},
        ),
        theirs=("idefics3", "Idefics3Processor"),
        attributes=_TILES | {"global_image_tag": "<global-img>"},
        nested=True,
    ),
    "smolvlm": _Kind(
        mark="<image>",
        token="<image>",
        settings={
            "text_config": _TEXT | {"model_type": "llama"},
            "vision_config": _VISION | {"image_size": 32},
            "scale_factor": 2,
        },
        tokens={"image_token_id": "<image>"},
        processor=(
            "SmolVLMImageProcessorPil",
            {"size": {"longest_edge": 64}, "max_image_size": {"longest_edge": 32}},
        ),
        theirs=("smolvlm", "SmolVLMProcessor"),
        attributes=_TILES | {"global_image_token": "<global-img>"},
        nested=True,
    ),
    "qwen2_vl": _Kind(
        mark=_QWEN_MARK,
        token="<|image_pad|>",
        settings={
            "text_config": _TEXT | _AXES,
            "vision_config": {
                "depth": 2,
                "embed_dim": 16,
                "hidden_size": 32,
                "num_heads": 2,
                "patch_size": 8,
            },
        },
        tokens=_QWEN_TOKENS,
        processor=("Qwen2VLImageProcessorPil", {"size": _SMALL, "patch_size": 8}),
        theirs=("qwen2_vl", "Qwen2VLProcessor"),
        attributes={"image_processor": SimpleNamespace(merge_size=2)},
        types="mm_token_type_ids",
    ),
    "qwen3_vl": _Kind(
        mark=_QWEN_MARK,
        token="<|image_pad|>",
        settings={"text_config": _TEXT | _AXES, "vision_config": _QWEN3},
        tokens=_QWEN_TOKENS,
        processor=("Qwen2VLImageProcessorPil", {"size": _SMALL, "patch_size": 8}),
        theirs=("qwen3_vl", "Qwen3VLProcessor"),
        attributes={"image_processor": SimpleNamespace(merge_size=2)},
        types="mm_token_type_ids",
    ),
    "qwen3_5": _Kind(
        mark=_QWEN_MARK,
        token="<|image_pad|>",
        settings={
            "text_config": _TEXT | _LINEAR,
            "vision_config": _QWEN3 | {"deepstack_visual_indexes": []},
        },
        tokens=_QWEN_TOKENS,
        processor=("Qwen2VLImageProcessorPil", {"size": _SMALL, "patch_size": 8}),
        theirs=("qwen3_vl", "Qwen3VLProcessor"),
        attributes={"image_processor": SimpleNamespace(merge_size=2)},
        types="mm_token_type_ids",
    ),
    "qwen3_vl_moe": _Kind(
        mark=_QWEN_MARK,
        token="<|image_pad|>",
        settings={
            "text_config": _TEXT
            | _AXES
            | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24},
            "vision_config": _QWEN3,
        },
        tokens=_QWEN_TOKENS,
        processor=("Qwen2VLImageProcessorPil", {"size": _SMALL, "patch_size": 8}),
        theirs=("qwen3_vl", "Qwen3VLProcessor"),
        attributes={"image_processor": SimpleNamespace(merge_size=2)},
        types="mm_token_type_ids",
    ),
    "glm4v": _Kind(
        mark="<|begin_of_image|><|image|><|end_of_image|>",
        token="<|image|>",
        settings={
            "text_config": _TEXT | _AXES,
            "vision_config": _VISION | {"depth": 2, "out_hidden_size": 32},
        },
        tokens={
            "image_token_id": "<|image|>",
            "video_token_id": "<|video_pad|>",
            "image_start_token_id": "<|begin_of_image|>",
            "image_end_token_id": "<|end_of_image|>",
        },
        processor=(
            "Glm4vImageProcessorPil",
            {"size": {"shortest_edge": 512, "longest_edge": 8192}, "patch_size": 8},
        ),
        theirs=("glm4v", "Glm4vProcessor"),
        attributes={"image_processor": SimpleNamespace(merge_size=2)},
        types="mm_token_type_ids",
    ),
    "gemma4": _Kind(
        mark="<|image|>",
        token="<|image|>",
        settings={
            "text_config": _TEXT
            | {
                "num_hidden_layers": 4,
                "global_head_dim": 16,
                "sliding_window": 12,
                "layer_types": ["sliding_attention", "full_attention"] * 2,
                "num_kv_shared_layers": 2,
                "hidden_size_per_layer_input": 12,
                "vocab_size_per_layer_input": 400,
                "use_bidirectional_attention": "vision",
                "pad_token_id": 0,
            },
            "vision_config": _VISION
            | {"head_dim": 8, "num_key_value_heads": 2, "pooling_kernel_size": 2},
            "audio_config": None,
        },
        tokens={
            "image_token_id": "<|image|>",
            "video_token_id": "<|video_pad|>",
            "audio_token_id": "<|vision_start|>",
            "boi_token_id": "<|begin_of_image|>",
            "eoi_token_id": "<|end_of_image|>",
        },
        processor=(
            "Gemma4ImageProcessorPil",
            {"patch_size": 8, "max_soft_tokens": 70, "pooling_kernel_size": 2},
        ),
        theirs=("gemma4", "Gemma4Processor"),
        attributes={"boi_token": "<|begin_of_image|>", "eoi_token": "<|end_of_image|>"},
        types="mm_token_type_ids",
    ),
    "internvl": _Kind(
        mark="<IMG_CONTEXT>\n",
        token="<IMG_CONTEXT>",
        settings={
            "text_config": _TEXT | {"model_type": "qwen2"},
            "vision_config": _VISION | {"image_size": [16, 16], "patch_size": [4, 4]},
        },
        tokens={"image_token_id": "<IMG_CONTEXT>"},
        processor=(
            "GotOcr2ImageProcessorPil",
            {"size": {"height": 16, "width": 16}, "max_patches": 4},
        ),
        theirs=("internvl", "InternVLProcessor"),
        attributes={
            "start_image_token": "<img>",
            "end_image_token": "</img>",
            "image_seq_length": 4,
        },
        files={"image_seq_length": 4},
    ),
    "mistral3": _Kind(
        mark="[IMG]",
        token="[IMG]",
        settings={
            "text_config": _TEXT | {"model_type": "mistral"},
            "vision_config": _VISION | {"model_type": "pixtral", "head_dim": 8, "image_size": 64},
            "spatial_merge_size": 2,
            "tie_word_embeddings": False,
        },
        tokens={"image_token_id": "[IMG]"},
        processor=(
            "PixtralImageProcessorPil",
            {"size": {"longest_edge": 48}, "patch_size": {"height": 8, "width": 8}},
        ),
        attributes={"patch_size": 16},
        options={"patch_size": 16},
        files={"patch_size": 8, "spatial_merge_size": 2},
    ),
    "llava_next": _Kind(
        mark="<image>\n",
        token="<image>",
        settings={
            "text_config": _TEXT | {"model_type": "mistral"},
            "vision_config": _VISION | {"model_type": "clip_vision_model"},
            "image_grid_pinpoints": _PINS,
        },
        tokens={"image_token_id": "<image>"},
        processor=("LlavaNextImageProcessorPil", _CROPPED | {"image_grid_pinpoints": _PINS}),
        theirs=("llava_next", "LlavaNextProcessor"),
        attributes={
            "patch_size": 8,
            "num_additional_image_tokens": 1,
            "vision_feature_select_strategy": "default",
            "image_processor": SimpleNamespace(image_grid_pinpoints=_PINS),
        },
        files={
            "patch_size": 8,
            "num_additional_image_tokens": 1,
            "vision_feature_select_strategy": "default",
        },
    ),
}
_TABLE["llava_onevision"] = _Kind(
    mark="<image>\n",
    token="<image>",
    settings={
        "text_config": _TEXT | {"model_type": "qwen2"},
        "vision_config": _VISION | {"model_type": "siglip_vision_model"},
        "image_grid_pinpoints": _PINS,
        "vision_aspect_ratio": "anyres_max_2",
    },
    tokens={"image_token_id": "<image>", "video_token_id": "<|video_pad|>"},
    processor=(
        "LlavaOnevisionImageProcessorPil",
        {"size": {"height": 16, "width": 16}, "image_grid_pinpoints": _PINS},
    ),
    theirs=("llava_onevision", "LlavaOnevisionProcessor"),
    attributes={
        "num_image_tokens": 4,
        "vision_feature_select_strategy": "full",
        "vision_aspect_ratio": "anyres_max_2",
        "image_processor": SimpleNamespace(image_grid_pinpoints=_PINS),
    },
    nested=True,
)
_TABLE["paligemma"] = _Kind(
    mark="<image>",
    token="<image>",
    settings={
        "text_config": _TEXT | {"model_type": "gemma"},
        "vision_config": _VISION | {"model_type": "siglip_vision_model", "projection_dim": 32},
        "projection_dim": 32,
    },
    tokens={"image_token_id": "<image>", "image_token_index": "<image>"},
    processor=(
        "SiglipImageProcessorPil",
        {"size": {"height": 16, "width": 16}, "image_seq_length": 4},
    ),
    theirs=("paligemma", "PaliGemmaProcessor"),
    attributes={"image_seq_length": 4},
)
PREFIXED = "paligemma"
"""Family whose prompts see themselves; each has an image, and no markers of turns."""
FIRST = ("llava", "gemma3", "qwen2_5_vl", "idefics3")
"""Families whose tests are the most."""
KINDS = tuple(kind for kind in _TABLE if kind != PREFIXED)
TABLED = (*KINDS, PREFIXED)
"""Families of the table in docs/images.md."""
MARKS = {name: kind.mark for name, kind in _TABLE.items()}
COLOURS = {"red": (230, 20, 20), "green": (20, 200, 20), "blue": (20, 20, 230)}


Record = Callable[[str, object], None]
"""Keeps a figure of docs/images.md, which scripts/image_families writes."""


def largest_difference(losses: Sequence[float], expected: Sequence[float]) -> float:
    """The largest relative difference of a step's loss."""
    return max(abs(one / other - 1) for one, other in zip(losses, expected, strict=True))


def save_model(kind: str, directory: Path, scale: int = 1, *, tower: int = 1) -> None:
    """Write a tiny model of a family.

    Args:
        kind: one of KINDS.
        directory: new.
        scale: of widths, and of the sides of images.
        tower: further scale of the width of the tower.
    """
    own, tokenizer = _TABLE[kind], _tokenizer(kind)
    tokenizer.save_pretrained(directory)
    ids = {key: tokenizer.convert_tokens_to_ids(token) for key, token in own.tokens.items()}
    torch.manual_seed(0)
    settings = _scaled(own.settings, scale)
    for key in _WIDTHS:
        if key in settings["vision_config"]:
            settings["vision_config"][key] *= tower
    config = transformers.AutoConfig.for_model(kind, **settings, **ids)
    model = transformers.AutoModelForImageTextToText.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn_like(parameter) * 0.1
            parameter.copy_(noise if parameter.ndim > 1 else parameter + noise)
    model.save_pretrained(directory)
    name, options = own.processor
    # Sizes of Qwen's and GLM's are areas.
    options = _scaled(options, scale**2 if name.startswith(("Qwen", "Glm")) else scale)
    getattr(transformers, name)(**options).save_pretrained(directory)
    if own.files:
        (directory / "processor_config.json").write_text(json.dumps(own.files))


_WIDTHS = ("hidden_size", "intermediate_size")
_SIDES = (
    *(*_WIDTHS, "head_dim", "out_hidden_size", "image_size", "window_size", "mrope_section"),
    *("height", "width", "longest_edge", "shortest_edge", "image_grid_pinpoints"),
    "projection_dim",
)
_AREAS = ("image_seq_length", "mm_tokens_per_image")


def _scaled(settings: Any, scale: int, key: str = "") -> Any:
    """Settings with other widths and sides of images."""
    if isinstance(settings, dict):
        return {name: _scaled(value, scale, name) for name, value in settings.items()}
    if isinstance(settings, list):
        return [_scaled(value, scale, key) for value in settings]
    if not isinstance(settings, int) or isinstance(settings, bool):
        return settings
    return settings * (scale if key in _SIDES else scale**2 if key in _AREAS else 1)


def template_of(kind: str) -> str:
    """The chat template of a model; those of LLaVA and Idefics take parts alone."""
    texts = "{% if m.content is string %}{{ m.content }}{% else %}"
    texts = "" if kind in ("llava", "idefics3") else texts
    return (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n"
        + texts
        + "{% for p in m.content %}{% if p.type == 'image' %}"
        + MARKS[kind].replace("\n", "\\n").join(("{{ '", "' }}"))
        + "{% else %}{{ p.text }}{% endif %}{% endfor %}"
        + ("{% endif %}" if texts else "")
        + "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )


def _tokenizer(kind: str) -> Any:
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator(_TEXTS, trainer)
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, bos_token="<s>", eos_token="<|im_end|>", pad_token="<pad>"
    )
    tokenizer.chat_template = template_of(kind)
    return tokenizer


def draw_images(folder: Path, count: int, scale: int = 1) -> list[str]:
    """Draw pictures of one colour each, of mixed sizes; returns the names of the files."""
    folder.mkdir(parents=True, exist_ok=True)
    generator = np.random.default_rng(0)
    names = []
    for number in range(count):
        colour = [*COLOURS.values()][number % len(COLOURS)]
        height, width = (int(side) * scale for side in generator.integers(16, 60, 2))
        noise = generator.integers(-15, 15, (height, width, 3))
        pixels = np.clip(np.array(colour) + noise, 0, 255).astype(np.uint8)
        names.append(f"{number}.png")
        Image.fromarray(pixels).save(folder / names[-1])
    return names


def write_chats(
    file: Path, counts: tuple[int, ...] = (1, 2, 1, 0, 1, 3, 1, 1), scale: int = 1
) -> list[dict[str, Any]]:
    """Write chats about pictures beside them; returns the records.

    Args:
        file: of the records.
        counts: images of each record.
        scale: of the sides of images.
    """
    names = draw_images(file.parent / "images", sum(counts), scale)
    rows, at = [], 0
    for number, count in enumerate(counts):
        own = names[at : at + count]
        said = [[*COLOURS][(at + i) % len(COLOURS)] for i in range(count)]
        at += count
        question = "".join("<image>" for _ in own) + "what colour is it" + " it" * (number % 3)
        row: dict[str, Any] = {
            "messages": [
                {"role": "user", "content": question},
                {"role": "assistant", "content": f"it is {' and '.join(said or ['the a'])}"},
            ]
        }
        if own:
            row["images"] = [f"images/{name}" for name in own]
        rows.append(row)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return rows


def write_pairs(file: Path, counts: tuple[int, ...]) -> list[dict[str, Any]]:
    """As `write_chats`, of eight chats of which any two tell by their tokens which they are."""
    rows = write_chats(file, counts)
    # Of no other two is the sum the same (Mian and Chowla).
    for count, row in zip((1, 2, 4, 8, 13, 21, 31, 45), rows, strict=True):
        row["messages"][0]["content"] += " it" * (20 * count)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return rows


class PlainLoop:
    """Training by transformers alone: its image processor and model, sample by sample."""

    def __init__(
        self,
        kind: str,
        directory: Path,
        folder: Path,
        adapter: Path | None = None,
        beside: tuple[str, ...] = (),
    ) -> None:
        """Load the model, with an adapter that PEFT reads.

        Its language model is trained, and what has one of the names in `beside`.
        """
        self._kind, self._folder = kind, folder
        self._tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
        self._images = transformers.AutoImageProcessor.from_pretrained(directory, backend="pil")
        self.model = transformers.AutoModelForImageTextToText.from_pretrained(
            directory, attn_implementation="eager"
        ).eval()
        if adapter is not None:
            self.model = PeftModel.from_pretrained(self.model, adapter).eval()
        for name, parameter in self.model.named_parameters():
            names = ("language_model", "lm_head", "text_model", *beside)
            parameter.requires_grad_(any(one in name for one in names))

    def losses(
        self, rows: list[dict[str, Any]], steps: int, rate: float, eps: float
    ) -> list[float]:
        """Train on all rows in each step; returns the losses."""
        return self.losses_of([rows] * steps, rate, eps)

    def losses_of(
        self,
        steps: Sequence[list[dict[str, Any]]],
        rate: float,
        eps: float,
        weight_decay: float = 0.0,
        after_step: Callable[[], None] = lambda: None,
    ) -> list[float]:
        """Train on some rows in each step; returns the losses."""
        trained = [p for p in self.model.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=rate, weight_decay=weight_decay, eps=eps)
        losses = []
        for rows in steps:
            samples = [self.sample(row) for row in rows]
            total = sum(int((labels != -100).sum()) for _, labels in samples)
            loss_sum = 0.0
            for inputs, labels in samples:
                logits = self.model(**inputs).logits[0, :-1].float()
                loss = torch.nn.functional.cross_entropy(
                    logits, labels[0, 1:], ignore_index=-100, reduction="sum"
                )
                # A row without images has none of what alone may be trained.
                if loss.requires_grad:
                    (loss / total).backward()
                loss_sum += float(loss.detach()) / total
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss_sum)
            after_step()
        return losses

    @torch.no_grad()
    def loss(self, rows: list[dict[str, Any]]) -> float:
        """The loss on some rows, per label token."""
        samples = [self.sample(row) for row in rows]
        sums = (
            torch.nn.functional.cross_entropy(
                self.model(**inputs).logits[0, :-1].float(), labels[0, 1:], reduction="sum"
            )
            for inputs, labels in samples
        )
        return float(sum(sums)) / sum(int((labels != -100).sum()) for _, labels in samples)

    @torch.no_grad()
    def answer(self, row: dict[str, Any], longest: int) -> str:
        """The answer to the question of a row, computed anew for each token."""
        question = row | {"messages": [row["messages"][0], {"role": "assistant", "content": ""}]}
        inputs, labels = self.sample(question)
        length = labels.shape[1] - 2  # without the end of the empty answer, and the line behind it
        ids = inputs["input_ids"][:, :length]
        for _ in range(longest):
            logits = self.model(**self.given(inputs, ids)).logits
            ids = torch.cat([ids, logits[:, -1:].argmax(-1)], dim=1)
        return self.decode(ids[0, length:].tolist())

    def by_tokens(self, rows: list[dict[str, Any]]) -> dict[int, list[dict[str, Any]]]:
        """Any two rows of `write_pairs`, by the input tokens of both."""
        lengths = [len(self.sample(row)[0]["input_ids"][0]) - 1 for row in rows]
        pairs = {
            lengths[i] + lengths[k]: [rows[i], rows[k]] for k in range(len(rows)) for i in range(k)
        }
        assert len(pairs) == len(rows) * (len(rows) - 1) // 2
        return pairs

    def sample(self, row: dict[str, Any]) -> tuple[dict[str, Any], torch.Tensor]:
        """Inputs of the model and labels of a row."""
        question, answer = (message["content"] for message in row["messages"])
        own = _TABLE[self._kind]
        images = [Image.open(self._folder / path).convert("RGB") for path in row.get("images", ())]
        found: dict[str, Any] = {}
        if images:
            given: Any = [images] if own.nested else images
            options = getattr(_theirs(own), "images_kwargs", {}) | own.options
            found = dict(self._images(images=given, **(options | {"return_tensors": "pt"})))
        if self._kind == PREFIXED:
            # As PaliGemmaProcessor, which puts the beginning behind the last image.
            *pieces, text = question.split("<image>")
            seen = "".join(f"{piece}<image>" for piece in pieces)
            prompt = f"{self._with_images(seen, found)}<s>{text}\n"
            ends = "<|im_end|>", "<|im_end|>"
        else:
            prompt = f"<|im_start|>user\n{self._with_images(question, found)}<|im_end|>\n"
            prompt += "<|im_start|>assistant\n"
            ends = "<|im_end|>", "<|im_end|>\n"
        ids = self._ids(prompt)
        upto, whole = (self._ids(f"{prompt}{answer}{end}") for end in ends)
        end = len(upto)
        labels = torch.full((1, len(whole)), -100)
        labels[0, len(ids) : end] = torch.tensor(whole[len(ids) : end])
        inputs = {"input_ids": torch.tensor([whole])}
        for key in _OF_MODEL:
            if key in found:
                inputs[key] = found[key]
        given = self.given(inputs, inputs["input_ids"])
        if self._kind == PREFIXED:
            given["token_type_ids"] = (labels != -100).int()
        return given, labels

    def given(self, inputs: dict[str, Any], ids: torch.Tensor) -> dict[str, Any]:
        """Inputs of the model for the same images and other tokens, [1, tokens]."""
        own = _TABLE[self._kind]
        made = inputs | {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        if own.types:
            made[own.types] = (ids == self._id(own.token)).int()
        return made

    def decode(self, ids: list[int]) -> str:
        """Text of an answer, up to its end."""
        ends = {self._id("<|im_end|>"), int(_TEXT["eos_token_id"])}
        own = list(itertools.takewhile(lambda token: token not in ends, ids))
        return str(self._tokenizer.decode(own, skip_special_tokens=True))

    def _id(self, token: str) -> int:
        found = self._tokenizer.convert_tokens_to_ids(token)
        assert isinstance(found, int)
        return found

    def _ids(self, text: str) -> list[int]:
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])

    def _with_images(self, text: str, found: dict[str, Any]) -> str:
        """A text with what stands for its images, as the family's processor writes it."""
        own = _TABLE[self._kind]
        theirs = _theirs(own)
        written: Callable[..., str] = getattr(theirs, "replace_image_token", _pixtral_text)
        methods = {name: getattr(theirs, name, None) for name in _METHODS}
        stub = SimpleNamespace(**({"image_token": own.token} | own.attributes))
        for method, function in methods.items():
            if function is not None:
                setattr(stub, method, function.__get__(stub))
        first, *rest = text.split("<image>")
        made = first
        for number, piece in enumerate(rest):
            image = written(stub, found, number)
            made += own.mark.replace(own.replaced or own.token, image, 1) + piece
        return made


def _theirs(kind: _Kind) -> Any:
    """The class of transformers that joins texts and images; None: its module needs torchvision."""
    module, name = kind.theirs
    if not module:
        return None
    place = f"transformers.models.{module}.processing_{module}"
    return getattr(importlib.import_module(place), name)


_OF_MODEL = (
    *("pixel_values", "pixel_attention_mask", "image_grid_thw", "image_sizes"),
    *("image_position_ids", "batch_num_images"),
)
"""What an image processor returns for the model."""
_METHODS = ("_get_number_of_features", "_get_unpadded_features")
"""Methods that the text of an image depends on."""
