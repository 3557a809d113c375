"""``scripts/benchmark images``: ftkit beside TRL on images, in turns, round by round."""

import argparse
import dataclasses
import json
import os
import random
import shutil
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarking.command import Figures, begun, keep, not_counted
from benchmarking.figures import (
    WARM_UP_STEPS,
    Measured,
    by_program,
    largest_difference,
    median_of,
    padding_of,
    paired_ratio,
    steps_of,
)
from benchmarking.ftkit_run import IMPORTS, LEARNING_RATE, SEED, run_ftkit
from benchmarking.tables import draw_bars, gib, in_a_cell, number, table
from benchmarking.watch import own_bytes, watch
from benchmarking.workload import (
    SIZES,
    SPECIAL_TOKENS,
    VOCABULARY,
    Record,
    alpaca_lengths,
    in_file_order,
    make_records,
    once,
    order_of_ftkit,
    write_data,
)
from ftkit.runs.report.report import read_report
from ftkit.utils.hardware import hardware
from ftkit.utils.json_values import from_json

ENVIRONMENTS = Path(".venv") / "benchmarks"
ENVIRONMENT = "trl-images"
HERE = Path(__file__).parent / "peers"
TRL_IMPORTS = (
    "import peft, trl, transformers.models.llava.modeling_llava\nfrom trl import SFTTrainer"
)
LORA_RANK, LORA_ALPHA = 8, 16
QKV = r".*language_model.*\.(q_proj|v_proj)"
"""Layers that ftkit adapts by default, in the names of transformers' LLaVA."""
TRL_SETTINGS: dict[str, dict[str, Any]] = {
    "trl": {},
    "trl no recomputation": {"gradient_checkpointing": False},
}
"""Settings of SFTConfig. "trl" has its defaults, which recompute activations; rows without padding
are refused with images."""
PROGRAMS = ("ftkit", *TRL_SETTINGS)
METHODS = ("full", "lora")
EQUAL = 1e-5
"""Largest relative difference of losses of a full fine-tune from TRL's."""
MOST_LOADING = 0.05
"""Largest share of a step in which ftkit waits for data."""
COLUMNS = (
    "program", "samples/s", "x trl", "x trl no recomputation", "step", "waiting for data",
    "processor time", "x trl", "x trl no recomputation",
    "peak memory", "x trl", "x trl no recomputation", "first loss", "last loss",
    "largest loss difference from ftkit",
)  # fmt: skip
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'user' %}<|user|> {% for p in m.content %}"
    "{% if p.type == 'image' %}<image> {% else %}{{ p.text }} {% endif %}{% endfor %}"
    "{% else %}<|assistant|> {% generation %}{% if m.content is string %}{{ m.content }}"
    "{% else %}{{ m.content[0].text }}{% endif %} </s>{% endgeneration %}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|> {% endif %}"
)


@dataclass(frozen=True, kw_only=True)
class Scene:
    """A LLaVA and its images."""

    text: str
    """One of SIZES, its language model."""
    layers: int
    """Layers of the tower, a CLIP."""
    width: int
    side: int
    """Pixels of the side of what the tower sees, in patches of 16."""
    picture_width: int
    """Pixels of the pictures."""
    picture_height: int
    micro_batch_size: int
    global_batch_size: int
    steps: int


USUAL = Scene(
    text="llama-34m",
    layers=12,
    width=384,
    side=224,
    picture_width=1152,
    picture_height=896,
    micro_batch_size=4,
    global_batch_size=8,
    steps=10,
)
"""Pictures of a megapixel; the tower has the shapes of a ViT-S/16 of 22 million parameters."""
TINY = Scene(
    text="llama-1m",
    layers=1,
    width=32,
    side=32,
    picture_width=96,
    picture_height=64,
    micro_batch_size=2,
    global_batch_size=4,
    steps=4,
)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this command."""
    parser.add_argument("--rounds", type=int, default=3, help="each with every program in turn")
    parser.add_argument(
        "--programs", nargs="+", choices=PROGRAMS, default=list(PROGRAMS), metavar="NAME",
        help=f"{', '.join(PROGRAMS)}; default: all",
    )  # fmt: skip
    parser.add_argument(
        "--environments", type=Path, default=ENVIRONMENTS,
        help=f"where TRL is installed; default: {ENVIRONMENTS}",
    )  # fmt: skip


def measure(options: argparse.Namespace) -> Figures:
    """Measure all runs on the CPU, in turns; the file is written after each."""
    from benchmarking.peers.environments import python_of, versions_of

    usual = TINY if options.tiny else USUAL
    scene = dataclasses.replace(usual, steps=options.steps or usual.steps)
    figures = begun(options, {"runs": []})
    done = {(row["round"], row["method"], row["program"]) for row in figures["runs"]}
    python = None
    if set(options.programs) - {"ftkit"}:
        python = python_of(ENVIRONMENT, options.environments.absolute())
        figures["versions"] = versions_of(python)
    figures |= {
        "scene": dataclasses.asdict(scene),
        "warm_up_steps": WARM_UP_STEPS,
        "hardware": dataclasses.asdict(hardware()),
    }
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        models = (options.models or place / "models").absolute()
        models.mkdir(parents=True, exist_ok=True)
        model = once(
            models / f"llava-{scene.text}-{scene.layers}-{scene.width}-{scene.side}",
            lambda made: make_model(made, scene),
        )
        records = make_conversations(place / "pictures", scene)
        imports = {"ftkit": own_bytes(Path(sys.executable), IMPORTS, place)}
        if python is not None:
            of_trl = own_bytes(python, TRL_IMPORTS, place)
            imports |= dict.fromkeys(TRL_SETTINGS, of_trl)
        for number_ in range(options.rounds):
            for method in METHODS:
                for program in options.programs:
                    if (number_, method, program) in done:
                        continue
                    scratch = place / "run"
                    scratch.mkdir()
                    row: Figures = {"round": number_, "method": method, "program": program}
                    if program == "ftkit":
                        run = _of_ftkit(scene, method, model, records, scratch, options.limit_s)
                        row["waiting"] = None if run.failure else _waiting(scratch / "out")
                    else:
                        assert python is not None
                        words = _trl_words(program, scene, method, model, records, scratch)
                        run = _of_trl([python, *words], scratch, options.limit_s)
                    shutil.rmtree(scratch)
                    run = dataclasses.replace(run, imports_bytes=imports[program])
                    row["measured"] = dataclasses.asdict(run)
                    row["load_average"] = os.getloadavg()[0]
                    figures["runs"].append(row)
                    print(f"{method}: {program}: {_line(run)}", flush=True)
                    keep(figures, options)
    return figures


def make_model(directory: Path, scene: Scene) -> None:
    """Write a LLaVA of random weights with its tokenizer and processor."""
    import torch
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers

    marks = ("<image>", "<|user|>", "<|assistant|>")
    words = {word: place for place, word in enumerate(SPECIAL_TOKENS)}
    words |= {f"w{place}": place for place in range(len(words), VOCABULARY)}
    words |= {mark: VOCABULARY + place for place, mark in enumerate(marks)}
    made = Tokenizer(models.WordLevel(words, unk_token=SPECIAL_TOKENS[0]))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    unknown, begin, end = SPECIAL_TOKENS
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=made,
        unk_token=unknown,
        bos_token=begin,
        eos_token=end,
        pad_token=unknown,
        additional_special_tokens=list(marks),
    )
    tokenizer.chat_template = TEMPLATE
    text = {**SIZES[scene.text].settings, "vocab_size": VOCABULARY + len(marks)}
    config = transformers.AutoConfig.for_model(
        "llava",
        text_config={key: value for key, value in text.items() if key != "architectures"},
        vision_config={
            "model_type": "clip_vision_model",
            "hidden_size": scene.width,
            "intermediate_size": 4 * scene.width,
            "num_hidden_layers": scene.layers,
            "num_attention_heads": max(1, scene.width // 64),
            "image_size": scene.side,
            "patch_size": 16,
        },
        image_token_id=VOCABULARY,
        image_seq_length=(scene.side // 16) ** 2,
        vision_feature_layer=-1,
    )
    torch.manual_seed(0)
    transformers.AutoModelForImageTextToText.from_config(config).save_pretrained(directory)
    processor = transformers.LlavaProcessor(
        image_processor=transformers.CLIPImageProcessorPil(
            size={"shortest_edge": scene.side},
            crop_size={"height": scene.side, "width": scene.side},
        ),
        tokenizer=tokenizer,
        patch_size=16,
        num_additional_image_tokens=1,
        vision_feature_select_strategy="default",
        image_token=marks[0],
        chat_template=TEMPLATE,
    )
    processor.save_pretrained(directory)


def make_conversations(folder: Path, scene: Scene) -> list[Record]:
    """Write pictures, and return a conversation about each, in the order of training.

    A picture has shapes of many sizes, as photographs do, and noise; JPEG makes about 300 KB of it.
    """
    import numpy as np
    from PIL import Image

    folder.mkdir()
    drawn = np.random.default_rng(SEED)
    count = (scene.steps + 1) * scene.global_batch_size
    records, sides = [], (scene.picture_width, scene.picture_height)
    for number_, record in enumerate(make_records(alpaca_lengths(count))):
        pixels = np.zeros((scene.picture_height, scene.picture_width, 3))
        for size in (4, 16, 64, 256):
            rough = drawn.integers(0, 256, (size, size, 3), dtype=np.uint8)
            pixels += np.asarray(Image.fromarray(rough).resize(sides))
        pixels = pixels / 4 + drawn.normal(0, 6, pixels.shape)
        file = folder / f"{number_}.jpg"
        Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(file, quality=90)
        asked = [
            {"type": "image", "image": str(file)},
            {"type": "text", "text": record["instruction"].strip()},
        ]
        messages = [
            {"role": "user", "content": asked},
            {"role": "assistant", "content": record["output"]},
        ]
        records.append({"messages": messages})
    random.Random(SEED).shuffle(records)
    return records


def _of_ftkit(
    scene: Scene, method: str, model: Path, records: list[Record], scratch: Path, limit_s: float
) -> Measured:
    # Its cosine ends at the last step, that of TRL one step later: a step more, not counted.
    data = in_file_order(records, order_of_ftkit(len(records), SEED))
    write_data(scratch / "data", data, data[:2])
    keys: dict[str, Any] = {
        "checkpoint_dir": model,
        "accelerator": "cpu",
        "precision": "32-true",
        "data.path": scratch / "data",
        "data.mask_prompt": None,
        "data.prompt_style": None,
        "data.chat_template": "tokenizer",
        "train.global_batch_size": scene.global_batch_size,
        "train.micro_batch_size": scene.micro_batch_size,
        "train.max_steps": scene.steps + 1,
        "train.max_seq_length": SIZES[scene.text].positions,
    }
    if method == "lora":
        keys |= {"lora_r": LORA_RANK, "lora_alpha": LORA_ALPHA}
    run = run_ftkit(method, keys, scratch / "out", limit_s)
    return dataclasses.replace(run, steps=run.steps[: scene.steps])


def _waiting(out: Path) -> float | None:
    """Share of a step in which training waits for data, in ftkit's own window."""
    step = read_report(out).step_s
    if step is None or step.data is None or not step.total:
        return None
    return step.data / step.total


def _trl_words(
    program: str,
    scene: Scene,
    method: str,
    model: Path,
    records: list[Record],
    scratch: Path,
) -> list[str | Path]:
    (scratch / "records.json").write_text(json.dumps(records))
    settings = {
        "bf16": False,
        "loss_type": "nll",
        "train_sampling_strategy": "sequential",
        **TRL_SETTINGS[program],
    }
    what = {
        "records": str(scratch / "records.json"),
        "model": str(model),
        "out_dir": str(scratch / "out"),
        "method": method,
        "quantize": False,
        "rank": LORA_RANK,
        "alpha": LORA_ALPHA,
        "targets": QKV,
        "dtype": "float32",
        "micro_batch_size": scene.micro_batch_size,
        "micro_steps": scene.global_batch_size // scene.micro_batch_size,
        "steps": scene.steps,
        "learning_rate": LEARNING_RATE,
        "settings": settings,
    }
    (scratch / "trl.json").write_text(json.dumps(what))
    return [HERE / "trl_images_run.py", scratch / "trl.json"]


def _of_trl(words: Sequence[str | Path], scratch: Path, limit_s: float) -> Measured:
    seen = watch(words, limit_s=limit_s, directory=scratch)
    steps = steps_of(seen.events)
    if seen.exit_code != 0 or not steps:
        lines = [line for line in seen.output.splitlines() if line.strip()]
        return Measured(failure=lines[-1].strip() if lines else f"exit code {seen.exit_code}")
    return Measured(
        steps=steps,
        first_step_s=steps[0].ended_s,
        padding_fraction=padding_of(seen.events),
        host_bytes=seen.host_bytes,
    )


def _line(run: Measured) -> str:
    if not run.is_whole:
        return in_a_cell(run.failure)
    return f"{run.step_s:.2f} s a step, {gib(run.peak_bytes)} GiB"


def _runs(figures: Figures, method: str) -> dict[str, list[Measured]]:
    """The runs of a method by program, round by round."""
    return by_program(row for row in figures["runs"] if row["method"] == method)


def _largest_waiting(figures: Figures, method: str) -> float | None:
    shares = [row.get("waiting") for row in figures["runs"] if row["method"] == method]
    return max((share for share in shares if share is not None), default=None)


def _difference(run: Measured, own: Measured, method: str) -> float:
    """Largest relative difference of losses; with LoRA of the first, as TRL draws other layers."""
    last = 1 if method == "lora" else None
    return largest_difference(run.steps[:last], own.steps[:last])


def exit_code(figures: Figures) -> int:
    """Return 1 if ftkit failed, waited for data, or has other losses than TRL."""
    for method in METHODS:
        runs = _runs(figures, method)
        own = runs.get("ftkit", [])
        waiting = _largest_waiting(figures, method)
        if any(run.failure for run in own) or (waiting or 0.0) > MOST_LOADING:
            return 1
        others = [run for name in TRL_SETTINGS for run in runs.get(name, []) if run.is_whole]
        if own and any(_difference(run, own[0], method) > EQUAL for run in others):
            return 1
    return 0


def markdown(figures: Figures) -> str:
    """A table for each method."""
    scene = from_json(Scene, figures["scene"])
    parts = []
    for method in METHODS:
        runs = _runs(figures, method)
        rows = [_cells(figures, method, program, runs) for program in runs]
        parts.append(f"**{method}**\n\n{table(COLUMNS, rows)}")
    rounds = 1 + max((row["round"] for row in figures["runs"]), default=-1)
    machine = figures["hardware"]
    listed = ", ".join(f"{name} {of}" for name, of in figures.get("versions", {}).items())
    sides = f"{scene.picture_width} x {scene.picture_height}"
    said = (
        f"LLaVA of {scene.text} with a tower of {scene.layers} layers of {scene.width} at "
        f"{scene.side} pixels, which is frozen with its projector; JPEGs of {sides}, "
        f"one in each sample; 32-true, micro-batch {scene.micro_batch_size} of "
        f"{scene.global_batch_size}, {scene.steps} steps; "
        f"{not_counted(figures)} are not counted. Processor time is that of a step, over all "
        "processors, which other load changes less than the time of a step. Medians of "
        f"{rounds} rounds, of waiting the largest. "
        f"{machine['cpu']}, {machine['physical_cores']} cores. TRL's: {listed}."
    )
    return "\n\n".join([*parts, said])


def _cells(
    figures: Figures, method: str, program: str, runs: dict[str, list[Measured]]
) -> list[str]:
    own = runs[program]
    whole = [run for run in own if run.is_whole]
    if not whole:
        return [program, in_a_cell(own[-1].failure), *[""] * (len(COLUMNS) - 2)]
    step_s = median_of(own, "step_s")
    speed = figures["scene"]["global_batch_size"] / step_s if step_s else None
    # A step has the same samples in all: speeds are as the inverse of its times.
    faster = [
        "" if name not in runs else number(paired_ratio(runs[name], own, "step_s"), ".2f")
        for name in TRL_SETTINGS
    ]
    busy, smaller = (
        [
            "" if name not in runs else number(paired_ratio(own, runs[name], of), ".2f")
            for name in TRL_SETTINGS
        ]
        for of in ("step_cpu_s", "peak_bytes")
    )
    apart, reference = "", runs.get("ftkit", [])
    if program != "ftkit" and reference and reference[0].is_whole:
        apart = f"{_difference(whole[0], reference[0], method):.0e}"
        apart += " (first step)" if method == "lora" else ""
    waiting = _largest_waiting(figures, method) if program == "ftkit" else None
    return [
        program,
        number(speed, ".2f"),
        *faster,
        number(step_s, ".2f") + " s",
        "" if waiting is None else f"{waiting:.1%}",
        number(median_of(own, "step_cpu_s"), ".2f") + " s",
        *busy,
        gib(median_of(own, "peak_bytes")) + " GiB",
        *smaller,
        f"{whole[0].steps[0].loss:.4f}",
        f"{whole[0].steps[-1].loss:.4f}",
        apart,
    ]


def draw(figures: Figures, picture: Path) -> None:
    """Draw the speed of all programs, a panel for each method."""
    groups = {}
    for method in METHODS:
        runs = _runs(figures, method)
        times = {program: median_of(own, "step_s") for program, own in runs.items()}
        samples = figures["scene"]["global_batch_size"]
        known = {program: samples / time for program, time in times.items() if time}
        if known:
            groups[method] = known
    if groups:
        draw_bars(groups, "samples per second", "Fine-tuning on images", picture)
