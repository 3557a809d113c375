"""Weight files of transformers' models, read and written by the library's own rules.

These rename tensors of older files, and stack the matrices of experts that files hold one by one.
"""

import copy
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import core_model_loading
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    WeightTransform,
    dot_natural_key,
    rename_source_key,
)

from ftkit.models.architectures.architecture import SCORE
from ftkit.models.architectures.transformers_architecture import TransformersArchitecture
from ftkit.models.architectures.transformers_outline import head_name
from ftkit.models.pretrained.weight_files import (
    HeldParameter,
    Tensors,
    WeightStorage,
    WeightTensor,
    checked,
    is_old_buffer,
    lacking,
    misshapen,
    unexplained,
)

# Versions of transformers that have this function write files by the rules in the opposite order
# (seen in 5.24): converters first, then renamings. Others (5.3) rename before they convert.
_CONVERTS_BEFORE_RENAMING = hasattr(core_model_loading, "apply_converters")


@dataclass(frozen=True)
class _Rules:
    """Rules by which tensors are renamed or converted to others."""

    renamings: list[WeightRenaming]
    converters: list[WeightConverter]
    last_renamings: list[WeightRenaming]
    """Renamings after the conversion."""

    @classmethod
    def for_reading(cls, model: Any) -> "_Rules":
        renamings, converters = _by_kind(get_model_conversion_mapping(model))
        return cls(renamings, converters, [])

    @classmethod
    def for_writing(cls, model: Any) -> "_Rules":
        rules = get_model_conversion_mapping(model, add_legacy=False)
        if not _CONVERTS_BEFORE_RENAMING:
            renamings, converters = _by_kind(rule.reverse_transform() for rule in rules)
            return cls(renamings, converters, [])
        # A changed prefix was the choice of whoever wrote the file that was read.
        kept = [rule for rule in rules if not isinstance(rule, core_model_loading.PrefixChange)]
        # The last step of reading is the first one of writing.
        renamings, converters = _by_kind(rule.reverse_transform() for rule in reversed(kept))
        return cls([], converters, renamings)

    def renamed(self, name: str, *known: Any) -> tuple[str, str | None]:
        """Return the new name, before `last_renamings`, and the pattern of its converter.

        Args:
            name: of a tensor.
            known: prefix of the base model and its state dict, if that may be added or removed.
        """
        found: tuple[str, str | None] = rename_source_key(
            name, self.renamings, self.converters, *known
        )
        return found

    def last_name(self, name: str) -> str:
        """Return the final name of a tensor after its conversion."""
        for renaming in self.last_renamings:
            name = renaming.rename_source_key(name)[0]
        return name

    def converter(self, pattern: str) -> WeightConverter:
        """Return a fresh converter, without tensors."""
        # A converter collects the tensors that it is given.
        return copy.deepcopy(next(c for c in self.converters if pattern in c.source_patterns))


def _by_kind(
    rules: Iterable[WeightTransform],
) -> tuple[list[WeightRenaming], list[WeightConverter]]:
    known = list(rules)
    return (
        [rule for rule in known if isinstance(rule, WeightRenaming)],
        [rule for rule in known if isinstance(rule, WeightConverter)],
    )


@dataclass
class _Conversion:
    """Tensors that are converted together."""

    converter: WeightConverter
    target: str
    """First name of the results."""
    sources: list[tuple[str, str, Callable[[], Tensor]]]
    """Pattern, name and tensor."""

    @property
    def targets(self) -> list[str]:
        """Names of the results; of a list of results only the first."""
        patterns = list(self.converter.target_patterns)
        return [self.target.replace(patterns[0], pattern) for pattern in patterns]

    def results(self, model: Any) -> dict[str, Tensor]:
        """Convert the tensors."""
        converter = copy.deepcopy(self.converter)
        for pattern, name, tensor in self.sources:
            converter.add_tensor(self.target, name, pattern, tensor())  # type: ignore[arg-type]
        found = converter.convert(self.target, model=model, config=model.config)
        return {name: v[0] if isinstance(v, list) else v for name, v in found.items()}


class TransformersStorage(WeightStorage):
    """Files that `from_pretrained` reads and `save_pretrained` writes."""

    def __init__(self, architecture: TransformersArchitecture) -> None:
        """Read the library's rules for a model.

        Args:
            architecture: of the model.
        """
        self._architecture = architecture
        self._model = architecture.outline
        self._rest = architecture.rest_shapes
        naming = architecture.naming_in("hf")
        assert naming is not None, "its own layout"
        self._naming = naming
        self._known = self._model.state_dict()
        if architecture.scores:
            head = head_name(self._model)
            own = {n: t for n, t in self._known.items() if not n.startswith(f"{head}.")}
            of_scores = {f"{SCORE}.weight": self._known[f"{head}.weight"]}
            self._known = own | (of_scores if architecture.scores.names else {})
        self._reading = _Rules.for_reading(self._model)
        self._writing = _Rules.for_writing(self._model)

    def holders(self, stored: Mapping[str, WeightTensor]) -> dict[str, HeldParameter]:
        found: dict[str, HeldParameter] = {}
        conversions: dict[str, _Conversion] = {}
        # In the order of transformers, in which experts are stacked.
        for name in sorted(stored, key=dot_natural_key):
            target, pattern = self._target(name)
            tensor = stored[name]
            if pattern is None:
                # All else is copied unchanged, or refused by `require_complete`.
                if self._is_known(target):
                    ours = self._ours(target)
                    found[ours] = HeldParameter(
                        (name,), tensor.dtype, self._turned(ours, tensor.read)
                    )
                continue
            made = conversions.setdefault(
                target, _Conversion(self._reading.converter(pattern), target, [])
            )
            made.sources.append((pattern, name, tensor.read))
        for conversion in conversions.values():
            names = tuple(name for _, name, _ in conversion.sources)
            for target in conversion.targets:
                if self._is_known(target):
                    ours = self._ours(target)
                    read = partial(self._converted, conversion, target)
                    found[ours] = HeldParameter(
                        names, stored[names[0]].dtype, self._turned(ours, read)
                    )
        return found

    def require_complete(
        self, stored: Mapping[str, WeightTensor], directory: Path, *, tied: bool
    ) -> None:
        holders = self.holders(stored)
        for ours, shape in self._architecture.parameter_shapes(tied=tied).items():
            holder = holders.get(ours)
            if holder is None:
                raise lacking(directory, self.written_name(ours))
            # Shapes of stacked tensors differ from those of their parts, so only single ones are
            # compared.
            if len(holder.names) == 1 and holder.names[0] in stored:
                found = list(stored[holder.names[0]].shape)
                expected = list(shape)[::-1] if self._is_turned(ours) else list(shape)
                expected = [] if self._is_scalar(ours) else expected
                if self._target(holder.names[0])[1] is None and found != expected:
                    raise misshapen(directory, holder.names[0], found, expected)
        needed = {name for holder in holders.values() for name in holder.names}
        for name in stored.keys() - needed:
            if not (self.is_kept(name) or is_old_buffer(name) or self._is_ignored(name)):
                raise unexplained(directory, name)

    def written(self, tensors: Tensors) -> Iterator[tuple[str, Tensor]]:
        conversions: dict[str, _Conversion] = {}
        for ours, tensor in checked(self._architecture, tensors):
            name = self._naming.theirs(ours)
            # Back to the layout of the original file: [in, out], and scalars without a dimension.
            value = tensor.t().contiguous() if self._is_turned(ours) else tensor
            value = value.reshape(()) if self._is_scalar(ours) else value
            target, pattern = self._writing.renamed(name)
            if pattern is None:
                yield self._writing.last_name(target), value
                continue
            made = conversions.setdefault(
                target, _Conversion(self._writing.converter(pattern), target, [])
            )
            made.sources.append((pattern, name, partial(_itself, value)))
            # As soon as it is complete, so that few tensors are held.
            if len(made.sources) == len(made.converter.source_patterns):
                del conversions[target]
                for result, converted in made.results(self._model).items():
                    yield self._writing.last_name(result), converted
        if conversions:
            # The library would leave these tensors out of the file, or convert the rest of them.
            left = (name for made in conversions.values() for _, name, _ in made.sources)
            raise ValueError(f"no rule of {self._architecture.name} writes {', '.join(left)}")

    def written_name(self, ours: str) -> str:
        return self._writing.last_name(self._writing.renamed(self._naming.theirs(ours))[0])

    def is_kept(self, name: str) -> bool:
        # By the name in transformers' model, because files of any age may have others.
        return self._architecture.is_rest(self._target(name)[0])

    def rest_in(self, stored: Mapping[str, WeightTensor]) -> dict[str, WeightTensor]:
        """Tensors outside of the language model, by their names in transformers' model."""
        return {self._target(name)[0]: tensor for name, tensor in stored.items()}

    def may_be_any(self, name: str) -> bool:
        known = self._known.get(self._target(name)[0])
        # Tables of whole numbers, such as the experts of each token (DeepSeek V4).
        return self.is_kept(name) or (known is not None and not known.is_floating_point())

    def _is_known(self, target: str) -> bool:
        """Return whether a name of transformers is a parameter of the language model."""
        return target in self._known and target not in self._rest

    def _target(self, name: str) -> tuple[str, str | None]:
        """Name of a stored tensor in transformers' model, and the pattern that converts it."""
        # By position: the names of these arguments differ between versions of transformers.
        known = (self._model.base_model_prefix, self._known)
        target, pattern = self._reading.renamed(name, *known)
        # A rule for names of older files may also match a current name.
        if target not in self._known and name in self._known:
            target, pattern = _Rules([], [], []).renamed(name, *known)
        return target, pattern

    def _converted(self, conversion: _Conversion, target: str) -> Tensor:
        return conversion.results(self._model)[target]

    def _ours(self, theirs: str) -> str:
        head = self._naming.theirs("lm_head")
        return f"lm_head{theirs.removeprefix(head)}" if theirs.startswith(f"{head}.") else theirs

    def _is_turned(self, ours: str) -> bool:
        return ours in self._architecture.transposed

    def _is_scalar(self, ours: str) -> bool:
        return ours in self._architecture.scalars

    def _turned(self, ours: str, read: Callable[[], Tensor]) -> Callable[[], Tensor]:
        if self._is_turned(ours):
            return lambda: read().t()
        return (lambda: read().reshape(1)) if self._is_scalar(ours) else read

    def _is_ignored(self, name: str) -> bool:
        """Return whether transformers ignores a stored tensor, too."""
        patterns = self._model._keys_to_ignore_on_load_unexpected or ()
        return any(re.search(pattern, name) for pattern in patterns)


def _itself(tensor: Tensor) -> Tensor:
    return tensor
