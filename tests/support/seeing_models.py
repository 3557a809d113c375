"""Tiny models that see, with tokenizer and image processor, and what transformers makes of images.

Their weights are drawn, their templates are like those that such models have: one writes parts
alone, another one texts as well.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from PIL import Image
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

SPECIAL = [
    *("<s>", "</s>", "<pad>", "<|im_start|>", "<|im_end|>", "<image>", "<|image_pad|>"),
    *("<|video_pad|>", "<|vision_start|>", "<|vision_end|>", "<start_of_image>"),
    *("<image_soft_token>", "<end_of_image>", "<fake_token_around_image>", "<global-img>"),
    *(f"<row_{row}_col_{column}>" for row in range(1, 5) for column in range(1, 5)),
]
_TEXTS = ["what colour is the image red green blue both assistant user system the a it is"] * 10
_MARKS = {
    "llava": "<image>\n",
    "gemma3": "<start_of_image>",
    "qwen2_5_vl": "<|vision_start|><|image_pad|><|vision_end|>",
    "idefics3": "<image>",
}
KINDS = tuple(_MARKS)
_TOKENS = {
    "llava": "<image>",
    "gemma3": "<image_soft_token>",
    "qwen2_5_vl": "<|image_pad|>",
    "idefics3": "<image>",
}
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
_WIDTHS = ("hidden_size", "intermediate_size")
COLOURS = {"red": (230, 20, 20), "green": (20, 200, 20), "blue": (20, 20, 230)}


def save_model(kind: str, directory: Path, scale: int = 1, *, tower: int = 1) -> None:
    """Write a tiny model of a family.

    Args:
        kind: one of KINDS.
        directory: new.
        scale: of widths, and of the sides of images.
        tower: further scale of the width of the tower.
    """
    tokenizer = _tokenizer(kind)
    tokenizer.save_pretrained(directory)
    torch.manual_seed(0)
    model = transformers.AutoModelForImageTextToText.from_config(
        _config(kind, tokenizer, scale, tower)
    )
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn_like(parameter) * 0.1
            parameter.copy_(noise if parameter.ndim > 1 else parameter + noise)
    model.save_pretrained(directory)
    _image_processor(kind, scale).save_pretrained(directory)
    if kind == "llava":
        settings: dict[str, Any] = {"patch_size": 8, "num_additional_image_tokens": 1}
        settings |= {"vision_feature_select_strategy": "default"}
        (directory / "processor_config.json").write_text(json.dumps(settings))


def _template(kind: str) -> str:
    # LLaVA's and Idefics' templates take parts alone.
    texts = (
        ""
        if kind in ("llava", "idefics3")
        else "{% if m.content is string %}{{ m.content }}{% else %}"
    )
    return (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n"
        + texts
        + "{% for p in m.content %}{% if p.type == 'image' %}"
        + _MARKS[kind].replace("\n", "\\n").join(("{{ '", "' }}"))
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
    tokenizer.chat_template = _template(kind)
    return tokenizer


def _config(kind: str, tokenizer: Any, scale: int, tower: int) -> Any:
    ids = tokenizer.convert_tokens_to_ids
    text = _TEXT | {key: _TEXT[key] * scale for key in (*_WIDTHS, "head_dim")}
    vision = _VISION | {key: _VISION[key] * scale * tower for key in _WIDTHS}
    vision["image_size"] *= scale
    if kind == "llava":
        return transformers.AutoConfig.for_model(
            kind,
            text_config=text | {"model_type": "llama"},
            vision_config=vision | {"model_type": "clip_vision_model"},
            image_token_id=ids("<image>"),
            image_seq_length=4 * scale**2,
        )
    if kind == "gemma3":
        layers = ["sliding_attention", "full_attention"]
        return transformers.AutoConfig.for_model(
            kind,
            text_config=text | {"sliding_window": 12, "layer_types": layers},
            vision_config=vision | {"model_type": "siglip_vision_model", "image_size": 32 * scale},
            mm_tokens_per_image=4 * scale**2,
            image_token_index=ids("<image_soft_token>"),
            boi_token_index=ids("<start_of_image>"),
            eoi_token_index=ids("<end_of_image>"),
        )
    if kind == "idefics3":
        return transformers.AutoConfig.for_model(
            kind,
            text_config=text | {"model_type": "llama"},
            vision_config=vision | {"image_size": 32 * scale},
            image_token_id=ids("<image>"),
            scale_factor=2,
        )
    axes: dict[str, Any] = {"rope_type": "default", "mrope_section": [scale, scale, 2 * scale]}
    windows: dict[str, Any] = {"depth": 2, "out_hidden_size": 32 * scale, "window_size": 32 * scale}
    windows |= {"fullatt_block_indexes": [1]}
    return transformers.AutoConfig.for_model(
        kind,
        text_config=text | {"rope_parameters": axes},
        vision_config=vision | windows,
        image_token_id=ids("<|image_pad|>"),
        video_token_id=ids("<|video_pad|>"),
        vision_start_token_id=ids("<|vision_start|>"),
        vision_end_token_id=ids("<|vision_end|>"),
    )


def _image_processor(kind: str, scale: int) -> Any:
    side = 16 * scale
    if kind == "llava":
        crop = {"height": side, "width": side}
        return transformers.CLIPImageProcessorPil(size={"shortest_edge": side}, crop_size=crop)
    if kind == "gemma3":
        return transformers.Gemma3ImageProcessorPil(size={"height": 2 * side, "width": 2 * side})
    if kind == "idefics3":
        return transformers.Idefics3ImageProcessorPil(
            size={"longest_edge": 4 * side}, max_image_size={"longest_edge": 2 * side}
        )
    size = {"shortest_edge": side**2, "longest_edge": side**2 * 12}
    return transformers.Qwen2VLImageProcessorPil(size=size, patch_size=8)


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


class PlainLoop:
    """Training by transformers alone: its image processor and model, sample by sample."""

    def __init__(self, kind: str, directory: Path, folder: Path) -> None:
        """Load the model; its language model is trained."""
        self._kind, self._folder = kind, folder
        self._tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
        self._images = transformers.AutoImageProcessor.from_pretrained(directory, backend="pil")
        self.model = transformers.AutoModelForImageTextToText.from_pretrained(
            directory, attn_implementation="eager"
        ).eval()
        for name, parameter in self.model.named_parameters():
            parameter.requires_grad_(
                "language_model" in name or "lm_head" in name or "text_model" in name
            )

    def losses(
        self, rows: list[dict[str, Any]], steps: int, rate: float, eps: float
    ) -> list[float]:
        """Train on all rows in each step; returns the losses."""
        trained = [p for p in self.model.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=rate, weight_decay=0.0, eps=eps)
        samples = [self.sample(row) for row in rows]
        total = sum(int((labels != -100).sum()) for _, labels in samples)
        losses = []
        for _ in range(steps):
            loss_sum = 0.0
            for inputs, labels in samples:
                logits = self.model(**inputs).logits[0, :-1].float()
                loss = torch.nn.functional.cross_entropy(
                    logits, labels[0, 1:], ignore_index=-100, reduction="sum"
                )
                (loss / total).backward()
                loss_sum += float(loss.detach()) / total
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss_sum)
        return losses

    def sample(self, row: dict[str, Any]) -> tuple[dict[str, Any], torch.Tensor]:
        """Inputs of the model and labels of a row."""
        question, answer = (message["content"] for message in row["messages"])
        images = [Image.open(self._folder / path).convert("RGB") for path in row.get("images", ())]
        found: dict[str, Any] = {}
        if images:
            nested = self._kind == "idefics3"
            options = {"return_row_col_info": True} if nested else {}
            given: Any = [images] if nested else images
            found = dict(self._images(images=given, return_tensors="pt", **options))
        prompt = f"<|im_start|>user\n{self._with_images(question, found)}<|im_end|>\n"
        prompt += "<|im_start|>assistant\n"
        ids = self._ids(prompt)
        whole = self._ids(f"{prompt}{answer}<|im_end|>\n")
        end = len(self._ids(f"{prompt}{answer}<|im_end|>"))
        labels = torch.full((1, len(whole)), -100)
        labels[0, len(ids) : end] = torch.tensor(whole[len(ids) : end])
        inputs = {"input_ids": torch.tensor([whole])}
        for key in ("pixel_values", "image_grid_thw", "pixel_attention_mask"):
            if key in found:
                inputs[key] = found[key]
        is_image = (inputs["input_ids"] == self._id(_TOKENS[self._kind])).int()
        if self._kind == "gemma3":
            inputs["token_type_ids"] = is_image
        if self._kind == "qwen2_5_vl":
            inputs["mm_token_type_ids"] = is_image
        inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
        return inputs, labels

    def _id(self, token: str) -> int:
        found = self._tokenizer.convert_tokens_to_ids(token)
        assert isinstance(found, int)
        return found

    def _ids(self, text: str) -> list[int]:
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])

    def _with_images(self, text: str, found: dict[str, Any]) -> str:
        """A text with what stands for its images, as the family's processor writes it."""
        mark, token = _MARKS[self._kind], _TOKENS[self._kind]
        first, *rest = text.split("<image>")
        made = first
        for number, piece in enumerate(rest):
            if self._kind == "gemma3":
                own = f"\n\n<start_of_image>{token * 4}<end_of_image>\n\n"
            elif self._kind == "idefics3":
                rows, columns = (int(found[key][0][number]) for key in ("rows", "cols"))
                fake, own = "<fake_token_around_image>", ""
                for row in range(rows):
                    for column in range(columns):
                        own += f"{fake}<row_{row + 1}_col_{column + 1}>{token * 4}"
                    own += "\n"
                own += ("\n" if rows else "") + f"{fake}<global-img>{token * 4}{fake}"
            elif self._kind == "qwen2_5_vl":
                count = int(found["image_grid_thw"][number].prod()) // 4
                own = mark.replace(token, token * count)
            else:
                own = mark.replace(token, token * 4)
            made += own + piece
        return made
