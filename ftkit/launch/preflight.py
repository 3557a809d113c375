"""Preflight, without torch: whether a run fits the memory of its devices, and what would fit.

Also whether its models have the same tokens, where there are several.
"""

import dataclasses
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from ftkit.errors import DoesNotFit, UserError
from ftkit.models.pretrained.model_files import read_json
from ftkit.models.pretrained.places import (
    ROOT,
    fetch_settings,
    find_single_file,
    settings_directory,
)
from ftkit.planning.gpus import HOST, Gpu, device_here, free_here, ranks_here
from ftkit.recipe.batches import KNOWN_MICRO_BATCH, MicroBatch
from ftkit.recipe.companions import named_companion
from ftkit.recipe.devices import Devices
from ftkit.recipe.parsing import to_yaml
from ftkit.recipe.plan import Plan
from ftkit.recipe.plugin import plugin_in_use
from ftkit.recipe.recipe import Recipe
from ftkit.utils.accelerators.kinds import HOST_KIND
from ftkit.utils.console.display import Display
from ftkit.utils.console.formatting import bytes_text
from ftkit.utils.json_values import without_tokens
from ftkit.utils.process import own_program
from ftkit.utils.progress import print_notice, print_shown
from ftkit.utils.yaml_files import parse_yaml

# A margin of two, because the estimate is rough.
_SUSPICIOUS = 0.5
"""A run above this fraction of the memory, by a rough estimate, is planned exactly."""
_FULL_BYTES, _LORA_BYTES = 16, 4
"""Bytes per parameter: weight, gradient and two moments in float32, or only a weight."""
_WIDTH_BYTES, _INNER_BYTES = 64, 16
"""Bytes that a layer keeps of a token for the backward pass, per unit of its width and of its
MLP's; float32, without activation checkpointing."""
_ANY_RUN_BYTES, _ANY_CPU_RUN_BYTES = 2 * 2**30, 2**29
"""Context, logits and unused memory of the allocator; the second, of a process without a GPU."""


def with_micro_batch(recipe: Recipe, devices: Devices, smaller: MicroBatch | None = None) -> Recipe:
    """The recipe with the largest micro-batch that fits in free memory, if it is auto.

    The whole recipe is planned.

    Args:
        recipe: as requested.
        devices: of this machine.
        smaller: to be taken instead, because such a micro-batch ran out of memory.

    Raises:
        DoesNotFit: not even one sequence does.
    """
    key = recipe.train.auto_key
    if key is None:
        return recipe
    if smaller is not None:
        value = smaller.tokens or smaller.sequences
        return dataclasses.replace(recipe, train=recipe.train.with_auto_value(value))
    # Free memory, not the total: a number has to be chosen that works now.
    free = free_here(ranks_here(recipe.devices, devices), devices)
    found = _check_shown(recipe, devices, free)
    if "error" in found:
        raise UserError(str(found["error"]))
    if not found:
        raise UserError(
            f"train.{key} is auto, but the memory of this run cannot be predicted. "
            f"Try --train.{key} {KNOWN_MICRO_BATCH[key]}."
        )
    if found["fits"] is False:
        raise DoesNotFit(
            f"train.{key} is auto, but one sequence needs {_gib(found)} on each rank, "
            f"and {bytes_text(free.memory_bytes)} are free. ftkit plan --fit shows what would fit."
        )
    value = int(found[key])
    if found["length_source"] == "assumed":
        print_notice(f"train.{key} is {value}; sequences: {found['length']}")
    return dataclasses.replace(recipe, train=recipe.train.with_auto_value(value))


def check_second_models(recipe: Recipe) -> None:
    """Refuse a reference or a teacher with other tokens than the trained model, by their files.

    Raises:
        UserError: their tokens differ, or a tokenizer cannot be read.
    """
    others = {"reference": recipe.reference, "teacher": recipe.teacher}
    for key, name in others.items():
        if name is not None:
            check_files = named_companion(key).code().check_files
            check_files(recipe.checkpoint_dir, name, key, token=recipe.access_token)


def require_room(
    plan: Plan, devices: Devices, command: Sequence[str], *, force: bool = False
) -> MicroBatch | None:
    """Refuse a run that certainly does not fit, and warn if it may not.

    Total memory of devices, and host memory with swap, are certain; free memory is not. A plan of
    the whole recipe takes seconds, and is made only if the model is large for the device.

    Args:
        plan: of the run, with a micro-batch for devices with enough memory.
        devices: of this machine.
        command: the command line, to which changes are added.
        force: refuse and warn of nothing.

    Returns:
        The micro-batch where the recipe leaves it open, which is smaller where that of the plan
        does not fit; None: the recipe names it.

    Raises:
        DoesNotFit: lists what would fit.
    """
    recipe, chosen = plan.recipe, plan.chosen
    ranks = ranks_here(recipe.devices, devices)
    device = device_here(ranks, devices)
    if device is None or (force and chosen is None):
        return chosen
    now_bytes = device.memory_bytes  # of a GPU all of it, whatever other programs hold now
    if device.name == HOST:
        now_bytes = free_here(ranks, devices).memory_bytes
    if not _may_be_too_large(plan, device, now_bytes, ranks):
        return chosen
    found = _check_shown(recipe, devices, device, chosen)
    if "fits" not in found:  # the run itself will report why
        return chosen
    if chosen is not None and chosen.tokens != (tokens := found["micro_batch_tokens"]):
        # One number for all ranks, by the memory that this device has in all: what is free now
        # would be another number at each start.
        chosen = dataclasses.replace(chosen, tokens=tokens, source="memory")
    if force:
        return chosen
    # It fits, or may fit: the user decides.
    if found["fits"] is not False:
        for shortage in _possible_shortages(found, device, now_bytes):
            print_shown(f"memory may not be enough: this run needs {shortage}")
        return chosen
    # Swap counts against a refusal, because the kernel kills only when both are full; it does not
    # count against a warning, because training in swap is useless.
    if found["low_bytes"] > device.memory_bytes + device.swap_bytes:
        swap = f" and {bytes_text(device.swap_bytes)} of swap" * (device.swap_bytes > 0)
        place = _each_has(device, f"{bytes_text(device.memory_bytes)}{swap}")
        needed = f"{_gib(found)} {place}"
    else:
        assert device.host_bytes is not None
        needed = (
            f"{bytes_text(found['host_low_bytes'])} of host memory for each rank, but each has "
            f"{bytes_text(device.host_bytes)}"
        )
    of_it = f" ({found['other_model']})" if found["other_model"] else ""
    lines = [
        f"This run needs at least {needed}{of_it}.",
        f"Sequences: {found['length']}.",
        "Nothing was started; --force tries it anyway.",
    ]
    if found["changes"]:
        lines.append("Changes that would make it fit, those that cost the least speed first:")
    for change in found["changes"]:
        lines.append(f"  {change['title']}: {changed_command(command, change)}")
    raise DoesNotFit("\n".join(lines))


def _possible_shortages(found: dict[str, Any], device: Gpu, now_bytes: int) -> Iterator[str]:
    """Descriptions of each memory of which a run may need more than there is."""
    sequences = f"(sequences: {found['length']})"
    where = "on each GPU"
    if device.name == HOST:
        where = "of host memory that is free for each rank now"
        if now_bytes < device.memory_bytes and device.swap_bytes:
            where += ", and swap is slow"
    if found["high_bytes"] > now_bytes and (device.name == HOST or found["fits"] is None):
        needs = f"{bytes_text(found['low_bytes'])} to {bytes_text(found['high_bytes'])}"
        yield f"{needs} of {bytes_text(now_bytes)} {where} {sequences}"
    if device.host_bytes is not None and found["host_bytes"] > device.host_bytes:
        needs = f"{bytes_text(found['host_low_bytes'])} to {bytes_text(found['host_bytes'])}"
        yield f"{needs} of {bytes_text(device.host_bytes)} of host memory for each rank {sequences}"


def _each_has(device: Gpu, there: str) -> str:
    if device.name == HOST:
        return f"of host memory for each rank, but each has {there}"
    return f"on each GPU, which has {there}"


def _may_be_too_large(plan: Plan, device: Gpu, now_bytes: int, ranks: int) -> bool:
    """Return whether a run may be too large, by a generous estimate from its model's settings.

    Weights are not read, so the answer is the same whether they are on this machine or not.
    """
    recipe = plan.recipe
    names = [recipe.checkpoint_dir, *filter(None, (recipe.teacher, recipe.reference))]
    # There are no files to estimate it from.
    if any(name.startswith("random:") for name in names):
        return True
    for name in names:
        fetch_settings(name, token=recipe.access_token)
    known = {name: rough_model(name) for name in names}
    for name, found in known.items():
        if found is None:  # a missing path is refused later
            return Path(name).expanduser().exists()
    model, *others = (found for name in names if (found := known[name]) is not None)
    train = recipe.train
    # Data are not read here: sequences count as long as they may be.
    length = min(train.max_seq_length or model.context, model.context)
    number_bytes = _FULL_BYTES if recipe.method == "full" else _LORA_BYTES
    # A token keeps activations of the experts that it chose; parameters are those of all experts.
    inner_width = model.inner_width * model.experts_per_token
    layer_bytes = _WIDTH_BYTES * model.width + _INNER_BYTES * inner_width
    of_parameters = model.parameters * number_bytes
    of_parameters += sum(other.parameters for other in others) * _LORA_BYTES
    needed_bytes = (
        of_parameters
        + _most_positions(plan, length) * model.layers * layer_bytes
        + (_ANY_CPU_RUN_BYTES if device.name == HOST else _ANY_RUN_BYTES)
    )
    if needed_bytes > _SUSPICIOUS * now_bytes:
        return True
    if device.host_bytes is None:
        return False
    offloaded_bytes = of_parameters / ranks  # at most, by any strategy
    return offloaded_bytes > _SUSPICIOUS * device.host_bytes


def _most_positions(plan: Plan, length: int) -> int:
    """Most positions in a micro-batch of sequences of this length."""
    train = plan.recipe.train
    sequences, tokens = train.global_batch_size, plan.micro_batch_tokens
    if train.global_batch_tokens is not None:
        sequences = max(1, train.global_batch_tokens // length)
    sequences = min(plan.micro_batch_size, sequences)
    if tokens is not None:
        return min(sequences * length, max(tokens, length))
    return sequences * length


def changed_command(command: Sequence[str], change: dict[str, Any]) -> str:
    """Words of a command line with one of the changes that `check` returns."""
    words = list(command)
    if change["method"] == "lora":
        words = ["finetune" if word == "finetune_full" else word for word in words]
    for key, value in change["overrides"]:
        words += [f"--{key}", value]
    return shlex.join(without_tokens(words))


def _gib(found: dict[str, Any]) -> str:
    return bytes_text(int(found["low_bytes"]))


def _check_shown(
    recipe: Recipe, devices: Devices, device: Gpu, chosen: MicroBatch | None = None
) -> dict[str, Any]:
    """`check` with a progress line: it takes seconds."""
    with (
        Display(None, stream=sys.stderr) as display,
        display.phase("predicting memory", brief=True),
    ):
        return check(recipe, devices, device, chosen=chosen)


def check(
    recipe: Recipe,
    devices: Devices,
    device: Gpu,
    *,
    chosen: MicroBatch | None = None,
    failed: bool = False,
    timeout_s: float | None = None,
) -> dict[str, Any]:
    """Run `ftkit.planning.check`; {} if it fails, or takes too long."""
    # The child looks for no devices, so the number of ranks is resolved here.
    recipe = dataclasses.replace(recipe, devices=ranks_here(recipe.devices, devices))
    if devices.accelerator == HOST_KIND:
        recipe = dataclasses.replace(recipe, accelerator="cpu")
    plugin = plugin_in_use()
    request = {
        "recipe": to_yaml(recipe),
        "gpu": dataclasses.asdict(device),
        "failed": failed,
        "chosen": chosen and dataclasses.asdict(chosen),
        "plugin": None if plugin is None else plugin.to_json(),
    }
    try:
        answer = subprocess.run(
            # A process of its own: it imports torch, which the supervisor does not hold in memory
            # for the whole run.
            own_program("ftkit.planning.check"),
            env=os.environ | ({"HF_TOKEN": token} if (token := recipe.data_token) else {}),
            input=json.dumps(request),
            capture_output=True,
            text=True,
            check=False,
            timeout=timeout_s,
        )
    except subprocess.TimeoutExpired:
        return {}
    # A prediction that fails refuses nothing: the run itself reports what is wrong.
    found: dict[str, Any] = json.loads(answer.stdout) if answer.returncode == 0 else {}
    return found


_NAMES = {
    "layers": ("num_hidden_layers", "n_layer"),
    "width": ("hidden_size", "n_embd"),
    # Models with experts may have both: the width of an expert comes first.
    "inner_width": ("moe_intermediate_size", "intermediate_size"),
    "vocabulary": ("vocab_size", "padded_vocab_size"),
    "context": ("max_position_embeddings", "block_size"),
}
"""Each number in Hugging Face's config.json and in LitGPT's model_config.yaml."""
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "n_expert")
_CHOSEN = ("num_experts_per_tok", "n_expert_per_token")


@dataclass(frozen=True, kw_only=True)
class RoughModel:
    """Sizes in a model's settings that determine its memory."""

    layers: int
    width: int
    inner_width: int
    """Width of the MLP."""
    vocabulary: int
    context: int
    """Positions that the model was built for."""
    experts: int
    """Experts of a layer; 1 without experts."""
    experts_per_token: int
    """Experts that each token passes."""

    @property
    def parameters(self) -> int:
        """Upper bound without biases and norms: attention heads may share keys and values."""
        # Four square matrices of attention, three of a gated MLP.
        block = 4 * self.width**2 + 3 * self.width * self.inner_width * self.experts
        return self.layers * block + 2 * self.vocabulary * self.width


def rough_model(name: str, *, root: Path = ROOT) -> RoughModel | None:
    """Read the sizes of a model from its settings; None if they are missing or unknown.

    Args:
        name: as `find_or_download` takes it.
        root: where downloads are.
    """
    try:
        settings: Any = None
        if directory := settings_directory(name, root=root):
            settings = read_json(directory / "config.json")
            if (file := directory / "model_config.yaml").is_file():
                settings = parse_yaml(file.read_text(encoding="utf-8"))
        elif single := find_single_file(name, root=root):
            settings = single.settings()
    except (UserError, OSError, UnicodeDecodeError, yaml.YAMLError):  # the run will say so
        return None
    if not isinstance(settings, dict):
        return None
    # A multimodal model: only its language model is trained.
    if isinstance(of_language := settings.get("text_config"), dict):
        settings = of_language
    found = {key: _first(settings, names) for key, names in _NAMES.items()}
    if not all(found.values()):
        return None
    experts = _first(settings, _EXPERTS) or 1
    of_each = min(_first(settings, _CHOSEN) or 1, experts)
    return RoughModel(**found, experts=experts, experts_per_token=of_each)


def _first(settings: dict[str, Any], names: tuple[str, ...]) -> int:
    values = (settings.get(name) for name in names)
    return next((value for value in values if isinstance(value, int) and value > 0), 0)
