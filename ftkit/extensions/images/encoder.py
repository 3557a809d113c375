"""The parts of a model that take media: frozen and whole on every rank, or trained with it."""

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any, cast

import torch
import torch.nn as nn
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from ftkit.errors import UserError
from ftkit.extensions.images.image_model import ImageModel
from ftkit.extensions.images.media_models import family_of
from ftkit.extensions.images.simulated import blank_inputs
from ftkit.extensions.images.towers import Features
from ftkit.models.architectures.transformers_architecture import TransformersArchitecture
from ftkit.models.architectures.transformers_outline import compute_buffers
from ftkit.models.pretrained.base_model import BaseModel
from ftkit.models.pretrained.transformers_storage import TransformersStorage
from ftkit.models.pretrained.weight_files import DTYPES, WeightTensor


class TowerEncoder:
    """Tower and projector of transformers' model around a language model."""

    def __init__(self, architecture: TransformersArchitecture, whole: PreTrainedModel) -> None:
        """Take the parts out of the whole model.

        Args:
            architecture: of the model.
            whole: on the meta device.
        """
        self._architecture = architecture
        self._prefix = _owner_of(architecture)
        self._owner: Any = whole.get_submodule(self._prefix.removesuffix("."))
        family = family_of(whole.config.model_type)
        assert family is not None  # its reader has refused all others
        self._family = family
        language = architecture.language_in(whole)
        self._parts = {
            name: part for name, part in self._owner.named_children() if part is not language
        }
        for part in self._parts.values():
            part.requires_grad_(False).eval()
            if isinstance(part, PreTrainedModel):
                compute_buffers(part)
        self._tables = {
            name: buffer for name, buffer in self._named_buffers() if not buffer.is_meta
        }
        self._beside = tuple(f"{name.removeprefix(self._prefix)}." for name in architecture.beside)
        self._trains_tower = family.trains_tower(architecture.beside)
        for name, parameter in self._named(nn.Module.named_parameters):
            parameter.requires_grad_(name.startswith(self._beside))

    @classmethod
    def modules_of(cls, base: BaseModel, parts: Sequence[str]) -> list[str]:
        """Return the names of the modules that are trained, in transformers' model.

        These are the innermost ones with parameters. Those of which no feature has a gradient are
        left out, such as a last layer whose states are not taken: ranks would wait for it.

        Args:
            base: whose they are.
            parts: projector or tower, or both.

        Raises:
            UserError: the model has none, or they cannot be trained.
        """
        architecture = base.architecture
        family = ImageModel.family_of(architecture.model_type or "")
        is_whole = isinstance(architecture, TransformersArchitecture)
        if family is None or not is_whole:
            raise UserError(
                f"images.{parts[0]} is true, but ftkit trains no parts beside the language model "
                f"of {base.name}. Try --images.{parts[0]} false."
            )
        assert isinstance(architecture, TransformersArchitecture)
        encoder = cls(architecture, architecture.build())
        projectors = tuple(f"{name}." for name in family.projector)
        chosen = tuple(f"{name}." for name in family.tower) if "tower" in parts else ()
        known = {
            name: parameter
            for name, parameter in encoder._named(nn.Module.named_parameters)
            if (name.startswith(chosen) and not name.startswith(projectors))
            or ("projector" in parts and name.startswith(projectors))
        }
        for parameter in known.values():
            parameter.requires_grad_(parameter.is_floating_point())
        features, deeper = encoder._features(blank_inputs(base.tokenizer_directory, "meta"))
        total = torch.stack([one.float().sum() for one in (features, *deeper)]).sum()
        found = torch.autograd.grad(total, [*known.values()], allow_unused=True)
        owners = {
            f"{encoder._prefix}{name.rpartition('.')[0]}"
            for name, gradient in zip(known, found, strict=True)
            if gradient is not None
        }
        return sorted(n for n in owners if not any(n.startswith(f"{o}.") for o in owners))

    def load(self, rest: Mapping[str, Any], dtype: torch.dtype, device: torch.device) -> None:
        """Fill the parameters; see `ftkit.models.bodies.body.MediaEncoder`."""
        stored = TransformersStorage(self._architecture).rest_in(rest) if rest else {}
        beside = self._owner.named_parameters(recurse=False)  # such as LLaVA-NeXT's end of a row
        of_parts = self._named(nn.Module.named_parameters)
        for name, tensor in [*beside, *of_parts, *self._named_buffers()]:
            if isinstance(tensor, nn.Parameter) and name.startswith(self._beside):
                continue  # it is one of the model's own
            owner, _, kind = name.rpartition(".")
            module = self._owner.get_submodule(owner)
            if isinstance(tensor, nn.Parameter):
                value = torch.empty(tensor.shape, dtype=dtype, device=device)
                if rest:
                    value = self._read(stored, name, tensor).to(device, dtype, copy=True)
                setattr(module, kind, nn.Parameter(value, requires_grad=False))
            elif name in self._tables:
                module._buffers[kind] = self._tables[name].to(device, copy=True)
            elif rest:  # a table that files hold
                module._buffers[kind] = self._read(stored, name, tensor).to(device)

    def _read(self, stored: Mapping[str, WeightTensor], name: str, wanted: Tensor) -> Tensor:
        """Read a tensor of the files, which keep what they do not train as it is.

        Args:
            stored: by names in transformers' model.
            name: without the prefix.
            wanted: of the model, without numbers.

        Raises:
            UserError: it is missing, or is not what the model needs.
        """
        full = f"{self._prefix}{name}"
        if (found := stored.get(full)) is None:
            raise UserError(
                f"The weights of the base model lack {full}, without which media cannot be "
                "encoded. Download them again."
            )
        if found.shape != wanted.shape:
            raise UserError(
                f"{full} of the base model has shape {list(found.shape)}, but the model's settings "
                f"say {list(wanted.shape)}. Take both from the same model."
            )
        if wanted.is_floating_point() and found.dtype not in DTYPES.values():
            raise UserError(
                f"{full} of the base model is stored as {found.dtype}, without the scales and the "
                "settings that make numbers of it. Give the original model instead of this copy."
            )
        return found.read()

    @property
    def modules(self) -> list[nn.Module]:
        """Tower and projector."""
        return list(self._parts.values())

    @property
    def flops(self) -> float:
        """Operations of the tower for media of size 1: its matrices, without scores and projector.

        As of a pass forward; one that is trained also has a backward pass, for which activations
        are computed again.
        """
        towers = (part for part in self.modules if isinstance(part, PreTrainedModel))
        layers = (
            layer
            for tower in towers
            for layer in tower.modules()
            if isinstance(layer, nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d)
        )
        return (8.0 if self._trains_tower else 2.0) * sum(one.weight.numel() for one in layers)

    def arguments(
        self, input_ids: Tensor, language: Any, media: Mapping[str, Any] | None
    ) -> dict[str, Any]:
        """Put the features of media in the places of their tokens."""
        given = dict[str, Any]()
        # One by one: kernels for one and for several round differently, and a micro-batch has
        # one or several as the layout has it.
        with torch.set_grad_enabled(bool(self._beside) and torch.is_grad_enabled()):
            found = [self._features(inputs) for inputs in (media or {}).get("inputs", ())]
        if getattr(language.config, "hidden_size_per_layer_input", None):
            # Gemma 4 has a second embedding, which has nothing of media: there it reads padding.
            if media is not None:
                padding = torch.full_like(media["places"], language.config.pad_token_id)
                padded = input_ids.flatten().index_copy(0, media["places"], padding)
                input_ids = padded.view_as(input_ids)
            given["per_layer_inputs"] = language.get_per_layer_inputs(input_ids)
        embedded = language.get_input_embeddings()(input_ids)
        if media is None:
            return given | {"inputs_embeds": embedded}
        places = media["places"]
        if media.get("is_blank"):
            # Where parts are trained, ranks wait for each other's gradients: also for that of a
            # medium which stands nowhere, and is 0.
            ((features, deeper),) = found
            nothing = sum(0 * one.sum() for one in (features, *deeper))
            return given | {"inputs_embeds": embedded + nothing}
        rows = torch.cat([features for features, _ in found]).to(embedded.dtype)
        flat = embedded.flatten(0, 1).index_copy(0, places, rows)
        given["inputs_embeds"] = flat.view_as(embedded)
        # Features that are added to the states behind the first blocks.
        if deeper := [torch.cat(of_block) for of_block in zip(*(d for _, d in found), strict=True)]:
            # Transformers' own (seen in 5.24) takes a mask, and looks for places on the device.
            language._deepstack_process = _with_more
            given["visual_pos_masks"] = places
            given["deepstack_visual_embeds"] = [one.to(embedded.dtype) for one in deeper]
        return given

    def _features(self, inputs: Mapping[str, Any]) -> Features:
        """What a medium becomes."""
        if "features" in inputs:  # of one in a simulated step, which needs no computation
            return cast(Features, inputs["features"]())
        if self._trains_tower and torch.is_grad_enabled():
            # Computed again in the backward pass: memory is needed for one at a time.
            found: Features = checkpoint(
                self._computed, inputs, use_reentrant=False, determinism_check="none"
            )
            return found
        return self._computed(inputs)

    def _computed(self, inputs: Mapping[str, Any]) -> Features:
        parameters = (one for part in self.modules for one in part.parameters())
        dtypes = {one.dtype for one in parameters if one.is_floating_point()}
        dtype, name = min(dtypes, key=lambda one: one.itemsize), self._family.values
        values = inputs[name].to(dtype)
        # Under FSDP in mixed precision, what is trained is gathered in 16 bits beside what is not.
        mixes = len(dtypes) > 1
        with torch.autocast(values.device.type, dtype) if mixes else nullcontext():
            return self._family.features(self._owner, {**inputs, name: values})

    def _named(self, method: Any) -> list[tuple[str, Any]]:
        return [
            (f"{part}.{name}", tensor)
            for part, module in self._parts.items()
            for name, tensor in method(module)
        ]

    def _named_buffers(self) -> list[tuple[str, Tensor]]:
        return self._named(nn.Module.named_buffers)


def _owner_of(architecture: TransformersArchitecture) -> str:
    """Beginning of the names of what lies beside the language model."""
    owner = architecture.language_name.rpartition(".")[0]
    return f"{owner}." if owner else ""


def _with_more(states: Tensor, places: Tensor, more: Tensor) -> Tensor:
    """[batch, sequence, width], states of which those of media have something added."""
    return states.flatten(0, 1).index_add(0, places, more.to(states.dtype)).view_as(states)
