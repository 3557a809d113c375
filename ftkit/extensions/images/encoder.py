"""The parts of a model that see: whole on every rank, and frozen."""

from collections.abc import Mapping
from typing import Any, cast

import torch
import torch.nn as nn
from torch import Tensor
from transformers import PreTrainedModel

from ftkit.extensions.images.families import family_of
from ftkit.extensions.images.towers import Features
from ftkit.models.architectures.transformers_architecture import TransformersArchitecture
from ftkit.models.architectures.transformers_outline import compute_buffers
from ftkit.models.pretrained.transformers_storage import TransformersStorage


class ImageEncoder:
    """Tower and projector of transformers' model around a language model."""

    def __init__(self, architecture: TransformersArchitecture, whole: PreTrainedModel) -> None:
        """Take the parts out of the whole model.

        Args:
            architecture: of the model.
            whole: on the meta device.
        """
        self._architecture = architecture
        owner = architecture.language_name.rpartition(".")[0]
        self._owner: Any = whole.get_submodule(owner)
        self._prefix = f"{owner}." if owner else ""
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

    def load(self, rest: Mapping[str, Any], dtype: torch.dtype, device: torch.device) -> None:
        """Fill the parameters; see `ftkit.models.bodies.body.MediaEncoder`."""
        stored = TransformersStorage(self._architecture).rest_in(rest) if rest else {}
        beside = self._owner.named_parameters(recurse=False)  # such as LLaVA-NeXT's end of a row
        of_parts = self._named(nn.Module.named_parameters)
        for name, tensor in [*beside, *of_parts, *self._named_buffers()]:
            owner, _, kind = name.rpartition(".")
            module = self._owner.get_submodule(owner)
            if isinstance(tensor, nn.Parameter):
                value = torch.empty(tensor.shape, dtype=dtype, device=device)
                if rest:
                    value = stored[f"{self._prefix}{name}"].read().to(device, dtype, copy=True)
                setattr(module, kind, nn.Parameter(value, requires_grad=False))
            elif name in self._tables:
                module._buffers[kind] = self._tables[name].to(device, copy=True)
            elif rest:  # a table that files hold
                module._buffers[kind] = stored[f"{self._prefix}{name}"].read().to(device)

    @property
    def modules(self) -> list[nn.Module]:
        """Tower and projector."""
        return list(self._parts.values())

    @property
    def flops(self) -> float:
        """Operations of the tower for a patch: its matrices, without scores and projector."""
        towers = (part for part in self.modules if isinstance(part, PreTrainedModel))
        layers = (
            layer
            for tower in towers
            for layer in tower.modules()
            if isinstance(layer, nn.Linear | nn.Conv2d | nn.Conv3d)
        )
        return 2.0 * sum(layer.weight.numel() for layer in layers)

    def arguments(
        self, input_ids: Tensor, language: Any, media: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Put the features of images in the places of their tokens."""
        # Image by image: kernels for one and for several round differently, and a micro-batch has
        # one or several as the layout has it.
        with torch.no_grad():
            found = [self._features(inputs) for inputs in media["images"]]
        places, given = media["places"], dict[str, Any]()
        if getattr(language.config, "hidden_size_per_layer_input", None):
            # Gemma 4 has a second embedding, which has nothing of images: there it reads padding.
            padding = torch.full_like(places, language.config.pad_token_id)
            input_ids = input_ids.flatten().index_copy(0, places, padding).view_as(input_ids)
            given["per_layer_inputs"] = language.get_per_layer_inputs(input_ids)
        embedded = language.get_input_embeddings()(input_ids)
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
        """What an image becomes."""
        if "features" in inputs:  # of an image in a simulated step, which needs no computation
            return cast(Features, inputs["features"]())
        dtype = next(self.modules[0].parameters()).dtype
        given = {**inputs, "pixel_values": inputs["pixel_values"].to(dtype)}
        return self._family.features(self._owner, given)

    def _named(self, method: Any) -> list[tuple[str, Any]]:
        return [
            (f"{part}.{name}", tensor)
            for part, module in self._parts.items()
            for name, tensor in method(module)
        ]

    def _named_buffers(self) -> list[tuple[str, Tensor]]:
        return self._named(nn.Module.named_buffers)


def _with_more(states: Tensor, places: Tensor, more: Tensor) -> Tensor:
    """[batch, sequence, width], states of which those of images have something added."""
    return states.flatten(0, 1).index_add(0, places, more.to(states.dtype)).view_as(states)
