"""What PEFT itself computes with an adapter, with which a merge is compared.

Where memory allows, a child process loads base and adapter as their users do, with transformers and
PEFT, and computes logits. Elsewhere PEFT merges one layer after the other, each filled alone.
"""

import copy
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import IO, Any

from ftkit.utils.process import begin_as_child, run_program

if __name__ == "__main__":  # before the slow imports: the parent may end during them
    begin_as_child()
    os.environ["HF_HUB_OFFLINE"] = "1"

import torch
import torch.nn as nn
from torch import Tensor

from ftkit.errors import UserError
from ftkit.models.architectures.architecture import HEAD, Fused
from ftkit.models.architectures.transformers_architecture import TransformersArchitecture
from ftkit.models.lora.adapter_reading import stored_adapter
from ftkit.models.lora.peft_layers import stored_config, without_bitsandbytes
from ftkit.models.lora.targets import TRAINED, head_names
from ftkit.models.meta_device import on_meta_device
from ftkit.models.pretrained.base_model import BaseModel
from ftkit.utils.console.formatting import bytes_text
from ftkit.utils.hardware import available_host_bytes
from ftkit.utils.imports import silence_libraries

Values = Callable[[str], Tensor]
"""Gives any parameter by our name."""

_IMPORTS_BYTES = 3 * 2**29
"""Host memory of the child beside the weights: libraries and a few activations."""
_LARGEST = 1e-4
"""Largest difference from PEFT that float32 explains, as a share of what is compared."""


@dataclass(frozen=True)
class PeftReading:
    """What PEFT computes of an adapter and its base model."""

    what: str
    """What was compared, for the user."""
    logits: Tensor | None
    """[tokens of all sequences, vocabulary] float32; None: layers were compared."""


def compare_with_peft(
    base: BaseModel,
    adapter: Path,
    exact: Values,
    read: Values,
    logits: Callable[[], Tensor],
    sequences: Sequence[Sequence[int]],
) -> PeftReading:
    """Compare a merge with what PEFT computes, in float32.

    Args:
        base: the adapted model.
        adapter: directory of the adapter.
        exact: parameters of the merge into the original weights, in float32.
        read: the base model's own parameters.
        logits: computes those of the merge.
        sequences: token ids of which logits are compared.

    Raises:
        UserError: PEFT computes another model; nothing should be written.
    """
    peft = f"PEFT {version('peft')}"
    obstacle = _obstacle(base)
    if obstacle is None:
        expected, obstacle = _logits_in_child(base, adapter, sequences)
        if expected is not None:
            apart = (logits() - expected).abs().mean().item()
            # The mean: a router of experts may choose another one for a single token.
            if not apart <= _LARGEST * expected.std().item():
                raise _refusal(adapter, base, f"logits differ by {apart:.2g} in the mean")
            return PeftReading(f"logits of {peft}, which loaded base and adapter", expected)
    try:
        layers = _equal_layers(base, adapter, exact, read)
    except UserError:
        raise
    except Exception as error:  # other libraries fail in any way with models that they do not know
        first = str(error).partition("\n")[0]
        return PeftReading(
            f"not with PEFT ({obstacle}; its layers: {type(error).__name__}: {first})", None
        )
    return PeftReading(f"weights of {layers} layers merged by {peft} ({obstacle})", None)


def _obstacle(base: BaseModel) -> str | None:
    """Why transformers and PEFT cannot load the whole model here; None: they can."""
    if base.layout != "hf" or base.random:
        return "the base model is not in Hugging Face's layout"
    if base.form is not None:
        return "the base model is stored in a few bits"
    if base.architecture.scores:
        return f"{base.architecture.scores.noun} has no logits"
    numbers = sum(s.numel() for s in base.architecture.parameter_shapes(tied=base.tied).values())
    numbers += sum(shape.numel() for shape in base.architecture.rest_shapes.values())
    needed, free = numbers * torch.float32.itemsize + _IMPORTS_BYTES, available_host_bytes()
    if needed > free:
        return f"the model takes {bytes_text(needed)} in float32, and {bytes_text(free)} are free"
    return None


def _refusal(adapter: Path, base: BaseModel, difference: str) -> UserError:
    return UserError(
        f"adapter {adapter} on {base.name} would be merged into another model than PEFT "
        f"{version('peft')} computes: {difference}. Nothing is written. Merge it with PEFT's "
        "merge_and_unload, and please report this."
    )


# --- The whole model in a child process -----------------------------------------------------------


def _logits_in_child(
    base: BaseModel, adapter: Path, sequences: Sequence[Sequence[int]]
) -> tuple[Tensor | None, str | None]:
    """Return PEFT's logits, or why there are none."""
    from safetensors.torch import load

    assert base.directory is not None
    given = {
        "model": str(base.directory.resolve()),
        "class": base.architecture.class_name,
        "rows": base.architecture.parameter_shapes(tied=True)[base.architecture.embedding][0],
        "adapter": str(adapter.resolve()),
        "sequences": [list(sequence) for sequence in sequences],
    }
    with tempfile.TemporaryFile() as exchange, tempfile.TemporaryFile() as output:
        exchange.write(json.dumps(given).encode())
        exchange.flush()
        code = _ask_child(exchange, output)
        exchange.seek(0)
        if code == 0:
            return load(exchange.read())["logits"], None
        output.seek(0)
        last = output.read().decode(errors="replace").strip().rpartition("\n")[2]
    return None, f"transformers and PEFT cannot load it here: {last or f'exit code {code}'}"


def _ask_child(exchange: IO[bytes], output: IO[bytes]) -> int:
    return run_program(__name__, exchange=exchange, stdout=subprocess.DEVNULL, stderr=output)


def replace_by_logits(exchange: IO[bytes]) -> None:
    """Replace a request by the logits that it asks for; the child's whole work."""
    from safetensors.torch import save

    exchange.seek(0)
    given = json.loads(exchange.read())
    import transformers

    model: Any = getattr(transformers, given["class"]).from_pretrained(
        given["model"], dtype=torch.float32, local_files_only=True, trust_remote_code=False
    )
    if model.get_input_embeddings().weight.shape[0] != given["rows"]:  # tokens were added
        model.resize_token_embeddings(given["rows"], mean_resizing=False)
    adapted = _with_adapter(model, Path(given["adapter"])).eval()
    with torch.no_grad():
        found = [adapted(torch.tensor([ids])).logits[0].float() for ids in given["sequences"]]
    exchange.seek(0)
    exchange.truncate()
    exchange.write(save({"logits": torch.cat(found)}))
    exchange.flush()


def _with_adapter(model: nn.Module, directory: Path) -> Any:
    """Put an adapter around a model of transformers, as PEFT's from_pretrained does.

    Only settings that name neither code nor paths reach PEFT.
    """
    from peft import get_peft_model
    from peft.utils.save_and_load import set_peft_model_state_dict

    with without_bitsandbytes():
        adapted: Any = get_peft_model(
            model,
            stored_config(directory),
            adapter_name=TRAINED,
            autocast_adapter_dtype=False,
        )
    stored = stored_adapter(directory)
    # Assigned, not copied: parameters that take no memory cannot be written to.
    result: Any = set_peft_model_state_dict(adapted, stored, TRAINED, low_cpu_mem_usage=True)
    assert not result.unexpected_keys, f"PEFT does not know {result.unexpected_keys[0]}"
    return adapted


# --- Layer by layer -------------------------------------------------------------------------------


@torch.no_grad()
def _equal_layers(base: BaseModel, adapter: Path, exact: Values, read: Values) -> int:
    """Compare each layer that an adapter changes, and both ends; return how many it changes.

    Raises:
        UserError: PEFT merges one of them otherwise.
    """
    from transformers.pytorch_utils import Conv1D

    model = _with_adapter(_without_numbers(base), adapter)
    in_theirs = _names_in_theirs(base)

    def value(values: Values, name: str, holder: nn.Module) -> Tensor:
        ours, fused = in_theirs[name]
        # Copies, into which PEFT merges: the model's own may be mapped from its files.
        parts = [values(part).to(torch.float32, copy=True) for part in ours]
        joined = parts[0] if fused is None else base.architecture.fuse(parts, fused)
        return joined.t().contiguous() if isinstance(holder, Conv1D) and joined.ndim > 1 else joined

    seen: set[str] = set()
    for name, holder, merge in _changed_layers(model.base_model.model):
        kinds = [kind for kind, _ in holder.named_parameters(recurse=False)]
        if merge is not None:
            for kind in kinds:
                before = value(read, f"{name}.{kind}", holder)
                setattr(holder, kind, nn.Parameter(before, requires_grad=False))
            merge()
        for kind in kinds:
            found, expected = value(exact, f"{name}.{kind}", holder), getattr(holder, kind)
            if not _is_equal(found, expected):
                raise _refusal(adapter, base, f"{name}.{kind} is another one")
            setattr(holder, kind, nn.Parameter(torch.empty(0), requires_grad=False))
        seen.add(name)
    # PEFT leaves all else as it is: also one end of a model whose ends are one.
    for ours in (base.architecture.embedding, HEAD):
        # Two names of a head that transformers has renamed.
        names = [theirs for theirs, (parts, _) in in_theirs.items() if parts == [ours]]
        if seen.isdisjoint(name.removesuffix(".weight") for name in names) and not _is_equal(
            exact(ours), read(ours)
        ):
            raise _refusal(adapter, base, f"{names[-1]} is another one")
    return len(seen)


def _is_equal(found: Tensor, expected: Tensor) -> bool:
    if found.shape != expected.shape:
        return False
    apart, largest = (found.float() - expected.float()).abs().max(), expected.abs().max()
    return bool(apart <= _LARGEST * largest)


def _without_numbers(base: BaseModel) -> nn.Module:
    """The model of transformers, with parameters that take no memory."""
    import transformers

    if isinstance(base.architecture, TransformersArchitecture):
        model: nn.Module = copy.deepcopy(base.architecture.plain)
    else:
        settings = dict(base.settings or base.architecture.settings_in("hf") or {})
        kind = settings.pop("model_type")
        with on_meta_device():
            model = getattr(transformers, str(base.architecture.class_name))(
                transformers.AutoConfig.for_model(kind, **settings)
            )
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            # Not on the meta device, to which PEFT would move the adapter of a layer.
            number = torch.zeros((), dtype=torch.float32, device="cpu")
            value = nn.Parameter(number.expand(parameter.shape), requires_grad=False)
            setattr(module, name, value)
    return model


def _names_in_theirs(base: BaseModel) -> dict[str, tuple[list[str], Fused | None]]:
    """Parameters of Hugging Face's model, with those of ours that each holds."""
    naming = base.architecture.naming_in("hf")
    assert naming is not None, "such an adapter has no names"
    found: dict[str, tuple[list[str], Fused | None]] = {}
    for ours in base.architecture.parameter_shapes(tied=False):
        theirs, fused = naming.stored_in(ours)
        found[theirs] = ([ours] if fused is None else fused.parameters_beside(ours), fused)
    for head in head_names(base):
        found[f"{head}.weight"] = ([HEAD], None)
    return found


def _changed_layers(
    model: nn.Module,
) -> Iterator[tuple[str, Any, Callable[[], object] | None]]:
    """Yield the layers that an adapter changes.

    Yields:
        Name, the module that holds the parameters, and what merges the adapter into them; None:
        they are the adapter's own, trained whole.
    """
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import ModulesToSaveWrapper

    for name, module in list(model.named_modules()):
        if isinstance(module, ModulesToSaveWrapper):
            yield name, module.modules_to_save[TRAINED], None
        elif isinstance(module, BaseTunerLayer) and not name.endswith(".base_layer"):
            layers: list[Any] = [module]
            # Experts are parameters of one module, with a layer of PEFT's around it for each.
            while isinstance(inner := layers[-1].base_layer, BaseTunerLayer):
                layers.append(inner)
            yield name, module.get_base_layer(), partial(_merge_all, layers)


def _merge_all(layers: Sequence[Any]) -> None:
    for layer in layers:
        layer.merge()


if __name__ == "__main__":
    silence_libraries()
    with os.fdopen(int(sys.argv[1]), "r+b") as _exchange:
        replace_by_logits(_exchange)
