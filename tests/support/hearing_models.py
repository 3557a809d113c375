"""A tiny model that hears, with tokenizer and feature extractor, and what transformers makes of it.

Its weights are drawn, and its template writes audio as that of Qwen2-Audio does.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import soundfile
import soxr
import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers.models.qwen2_audio.processing_qwen2_audio import Qwen2AudioProcessor

RATE, SECONDS = 16_000, 2
"""Samples per second, and the longest audio, that the model takes."""
_SPECIAL = [
    *("<s>", "</s>", "<pad>", "<|im_start|>", "<|im_end|>"),
    *("<|audio_bos|>", "<|AUDIO|>", "<|audio_eos|>"),
]
_MARK = "Audio: <|audio_bos|><|AUDIO|><|audio_eos|>\n"
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for p in m.content %}{% if p.type == 'audio' %}"
    + _MARK.replace("\n", "\\n").join(("{{ '", "' }}"))
    + "{% else %}{{ p.text }}{% endif %}{% endfor %}{% endif %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def save_model(directory: Path, scale: int = 1, seconds: int = SECONDS) -> None:
    """Write the model.

    Args:
        directory: new.
        scale: of widths.
        seconds: the longest audio.
    """
    tokenizer = _tokenizer()
    tokenizer.save_pretrained(directory)
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(
        "qwen2_audio",
        text_config={
            "model_type": "qwen2",
            "vocab_size": 400,
            "hidden_size": 32 * scale,
            "intermediate_size": 48 * scale,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 2048,
            "bos_token_id": 0,
            "eos_token_id": 1,
            "pad_token_id": 2,
        },
        audio_config={
            "d_model": 16 * scale,
            "encoder_ffn_dim": 24 * scale,
            "encoder_layers": 2,
            "encoder_attention_heads": 2,
            "num_mel_bins": 16,
            # Two frames of 10 ms become one position.
            "max_source_positions": 50 * seconds,
        },
        audio_token_index=tokenizer.convert_tokens_to_ids("<|AUDIO|>"),
        tie_word_embeddings=False,
    )
    model = transformers.AutoModelForMultimodalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn_like(parameter) * 0.1
            parameter.copy_(noise if parameter.ndim > 1 else parameter + noise)
    model.save_pretrained(directory)
    transformers.WhisperFeatureExtractor(
        feature_size=16, sampling_rate=RATE, chunk_length=seconds
    ).save_pretrained(directory)


def _tokenizer() -> Any:
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=_SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = ["what tone is this high low both assistant user system the a it is"] * 10
    made.train_from_iterator(texts, trainer)
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, bos_token="<s>", eos_token="<|im_end|>", pad_token="<pad>"
    )
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def tone(number: int) -> tuple[np.ndarray[Any, Any], int]:
    """[samples, channels] of a high or a low tone with noise, and samples per second."""
    rate = (16_000, 44_100, 8_000)[number % 3]
    channels = 1 + number % 2
    seconds = 0.3 + 0.25 * (number % 7)
    generator = np.random.default_rng(number)
    times = np.arange(int(rate * seconds)) / rate
    waves = np.sin(2 * np.pi * (880 if number % 2 else 220) * times)[:, None]
    return 0.3 * waves + generator.normal(0, 0.05, (len(times), channels)), rate


def write_chats(
    file: Path, counts: tuple[int, ...] = (1, 2, 1, 0, 1, 3, 1, 1), suffix: str = "wav"
) -> list[dict[str, Any]]:
    """Write chats about tones beside them; returns the records.

    Args:
        file: of the records.
        counts: tones of each record.
        suffix: of the names of the files: wav or flac.
    """
    folder = file.parent / suffix
    folder.mkdir(parents=True, exist_ok=True)
    rows, at = [], 0
    for number, count in enumerate(counts):
        own = [f"{suffix}/{at + place}.{suffix}" for place in range(count)]
        for place, name in enumerate(own):
            samples, rate = tone(at + place)
            # Whole numbers: libsndfile rounds others for FLAC in another way than for WAV.
            whole = (samples * 32_767).astype(np.int16)
            soundfile.write(file.parent / name, whole, rate, subtype="PCM_16")
        said = ["high" if (at + place) % 2 else "low" for place in range(count)]
        at += count
        row: dict[str, Any] = {
            "messages": [
                {"role": "user", "content": "<audio>" * count + "what tone is" + " it" * number},
                {"role": "assistant", "content": f"it is {' and '.join(said or ['the a'])}"},
            ]
        }
        if own:
            row["audios"] = own
        rows.append(row)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return rows


class PlainLoop:
    """Training by transformers alone: its processor and model, sample by sample."""

    def __init__(self, directory: Path, folder: Path) -> None:
        """Load the model, of which the language model is trained."""
        self._folder = folder
        self._processor = Qwen2AudioProcessor(
            transformers.WhisperFeatureExtractor.from_pretrained(directory),
            transformers.AutoTokenizer.from_pretrained(directory),
            chat_template=TEMPLATE,
        )
        self.model = transformers.Qwen2AudioForConditionalGeneration.from_pretrained(
            directory, attn_implementation="eager"
        ).eval()
        for name, parameter in self.model.named_parameters():
            parameter.requires_grad_("language_model" in name or "lm_head" in name)

    def losses(
        self, rows: list[dict[str, Any]], steps: int, rate: float, eps: float
    ) -> list[float]:
        """Train on all rows in each step; returns the losses."""
        trained = [p for p in self.model.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=rate, weight_decay=0.0, eps=eps)
        losses = []
        for _ in range(steps):
            total = self._sum(rows)
            total.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(total.detach()))
        return losses

    @torch.no_grad()
    def loss(self, rows: list[dict[str, Any]]) -> float:
        """The loss on some rows, per label token."""
        return float(self._sum(rows))

    def _sum(self, rows: list[dict[str, Any]]) -> torch.Tensor:
        samples = [self.sample(row) for row in rows]
        sums = [
            torch.nn.functional.cross_entropy(
                self.model(**inputs).logits[0, :-1].float(), labels[0, 1:], reduction="sum"
            )
            for inputs, labels in samples
        ]
        return torch.stack(sums).sum() / sum(int((own != -100).sum()) for _, own in samples)

    @torch.no_grad()
    def answer(self, row: dict[str, Any], longest: int) -> str:
        """The answer to the question of a row, by the most probable tokens, up to its end."""
        inputs, labels = self.sample(row)
        made = inputs | {"input_ids": inputs["input_ids"][:, : int((labels == -100).sum()) - 1]}
        tokenizer, said = self._processor.tokenizer, list[int]()
        for _ in range(longest):
            made["attention_mask"] = torch.ones_like(made["input_ids"])
            token = int(self.model(**made).logits[0, -1].argmax())
            if token in (tokenizer.eos_token_id, self.model.config.text_config.eos_token_id):
                break
            said.append(token)
            made["input_ids"] = torch.cat([made["input_ids"], torch.tensor([[token]])], dim=1)
        return str(tokenizer.decode(said, skip_special_tokens=True))

    def sample(self, row: dict[str, Any]) -> tuple[dict[str, Any], torch.Tensor]:
        """Inputs of the model and labels of a row."""
        question, answer = (message["content"] for message in row["messages"])
        heard = [self._heard(path) for path in row.get("audios", ())]
        prompt = f"<|im_start|>user\n{question.replace('<audio>', _MARK)}<|im_end|>\n"
        prompt += "<|im_start|>assistant\n"
        made = [
            self._given(text, heard)
            for text in (prompt, f"{prompt}{answer}<|im_end|>", f"{prompt}{answer}<|im_end|>\n")
        ]
        first, end = (one["input_ids"].size(1) for one in made[:2])
        ids = made[2]["input_ids"]
        labels = torch.full_like(ids, -100)
        labels[:, first:end] = ids[:, first:end]
        return made[2], labels

    def _given(self, text: str, heard: list[Any]) -> dict[str, Any]:
        if not heard:
            return dict(self._processor(text=[text], return_tensors="pt"))
        options = {"sampling_rate": RATE, "return_tensors": "pt"}
        return dict(self._processor(text=[text], audio=heard, **options))

    def _heard(self, path: str) -> Any:
        samples, rate = soundfile.read(self._folder / path, dtype="float32", always_2d=True)
        mono = samples.mean(axis=1)
        return mono if rate == RATE else soxr.resample(mono, rate, RATE)
