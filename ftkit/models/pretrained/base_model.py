"""The base model: opened with its weights, or described by its settings alone; its fingerprint."""

import hashlib
import json
from collections.abc import Callable, Collection, Container, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor

from ftkit.errors import UserError
from ftkit.models.architectures.architecture import (
    HEAD,
    Architecture,
    Implementation,
    ModelLayout,
    Naming,
)
from ftkit.models.architectures.read import (
    default_architecture,
    known_architecture,
    read_architecture,
)
from ftkit.models.pretrained.model_files import (
    EXTRA_WEIGHTS,
    OUTLINE,
    PROCESSOR_FILES,
    TOKENIZER_FILES,
    is_licence,
    licence_files,
    read_json,
    scores_of_model,
    weight_files,
)
from ftkit.models.pretrained.model_names import nearest_names, nearest_types
from ftkit.models.pretrained.places import (
    EMBEDDED_MODELS,
    ROOT,
    find_or_download,
    find_single_file,
    settings_directory,
)
from ftkit.models.pretrained.stored_forms import StoredForm, plain_settings, stored_form
from ftkit.models.pretrained.tokenizer import Tokenizer
from ftkit.models.pretrained.weight_files import (
    DTYPES,
    HeldParameter,
    NamedStorage,
    WeightStorage,
    WeightTensor,
    stored_tensors,
    write_settings,
)
from ftkit.recipe.hubs import split_version
from ftkit.recipe.implementations import (
    FIRST,
    HF,
    IMPLEMENTATIONS,
    TRANSFORMERS,
    implementation_row,
    layout_by_settings,
    layout_in,
)
from ftkit.utils import embedded

_BESIDE = ("generation_config.json", *PROCESSOR_FILES)

_TIED = (
    "llama-3.2-",
    "qwen2.5-0.5b",
    "qwen2.5-1.5b",
    "qwen2.5-3b",
    "qwen2.5-coder-0.5b",
    "qwen2.5-coder-1.5b",
    "qwen2.5-coder-3b",
    "qwen3-0.6b",
    "qwen3-1.7b",
    "qwen3-4b",
    "smollm2-",
)
"""Beginnings of the names of tied models in families that are not tied otherwise."""

_SAMPLED = 256
"""Most values of each parameter that a fingerprint reads."""


@dataclass(frozen=True)
class BaseModel:
    """A base model whose settings are read and whose weights are not yet."""

    name: str
    """Short name, for reports."""
    directory: Path | None
    """Directory of its files; None: the weights are random."""
    architecture: Architecture
    """Architecture from the checkpoint's own settings."""
    tokenizer: Tokenizer
    tokenizer_directory: Path
    tied: bool
    """True if embedding and head are one, without an lm_head.weight."""
    dtype: torch.dtype
    """Number format of the embedding on disk."""
    layout: ModelLayout
    """Layout of its files; for random weights, the one that can hold every model."""
    settings: Mapping[str, Any]
    """The content of config.json; {} where there is none."""
    companions: Mapping[str, bytes] | None = None
    """Files beside the weights, by name, if it was opened without weights: the checkpoint that a
    run started from may be deleted before the run ends. None: they are read when needed."""
    form: StoredForm | None = None
    """How its files store the weights in 4 or 8 bits; None: as plain numbers."""
    as_stored: frozenset[str] = frozenset()
    """Our names of parameters that `weights_as_stored` reads; none if opened without weights."""
    known_as: str | None = None
    """ORG/NAME of a model whose sizes come from LitGPT; None: they come from its own settings."""
    rest: Mapping[str, WeightTensor] = field(default_factory=dict)
    """Tensors of its files beside the language model, by name, which the result contains too. The
    files are opened at the start, so that nothing is lost if they are deleted meanwhile."""
    source: "BaseModel | None" = None
    """The language model whose files hold its weights, if this is a reward model that is made of
    it: its output layer is new. None: its own files hold them."""

    added_tokens: tuple[str, ...] = ()
    """Tokens that its vocabulary has beyond that of its files."""
    ungrown: "BaseModel | None" = None
    """The model of its files, if tokens were added; None: its own."""

    @property
    def extra_weights_bytes(self) -> int:
        """Bytes of the weights beside the language model; without files, by the settings."""
        if self.rest:
            return sum(tensor.nbytes for tensor in self.rest.values())
        named = self.settings.get("dtype") or self.settings.get("torch_dtype")
        numbers = sum(shape.numel() for shape in self.architecture.rest_shapes.values())
        dtype = getattr(torch, str(named), None)
        return numbers * (dtype if isinstance(dtype, torch.dtype) else self.dtype).itemsize

    @property
    def random(self) -> bool:
        """True if the weights are random, to measure time and memory only."""
        return self.directory is None

    @property
    def has_weights(self) -> bool:
        """True if `weights` can read them; False for a model opened from a checkpoint."""
        return self.companions is None

    @property
    def naming(self) -> Naming:
        """Names of the parameters in its files."""
        naming = self.architecture.naming_in(self.layout)
        assert naming is not None, f"{self.name} was read in a layout that cannot hold it"
        return naming


def open_base(
    checkpoint_dir: str,
    implementation: Implementation | None = None,
    *,
    token: str | None = None,
    root: Path = ROOT,
) -> BaseModel:
    """Open a base model, downloading it if needed; everything is read except the weights.

    Args:
        checkpoint_dir: a name as `find_or_download` takes it, or ``random:NAME`` for random
            weights in an architecture that LitGPT knows by this name (or its ORG/NAME), or in the
            default one of a model type of transformers.
        implementation: library whose code computes it; None: see `read_architecture`.
        token: of a Hugging Face account. Default: $HF_TOKEN.
        root: directory of downloads.

    Raises:
        UserError: the model is missing, incomplete or not supported, or its weights do not have the
            shapes in its settings.
    """
    if checkpoint_dir.startswith("random:"):
        return _open_random(checkpoint_dir, implementation)
    directory = find_or_download(checkpoint_dir, token=token, root=root)
    name = short_name(directory)
    settings = read_json(directory / "config.json")
    form, settings = stored_form(settings, name), plain_settings(settings)
    layout = layout_in(directory)
    architecture = _architecture_of(directory, settings, name, layout, implementation)
    storage = storage_of(architecture, layout)
    # Headers only: names, shapes and formats of all tensors.
    stored = _stored(directory, storage, form)
    holders = storage.holders(stored)
    # Settings and files may disagree on whether the head is tied.
    head, embedding = holders.get(HEAD), holders.get(architecture.embedding)
    tied = is_tied(architecture, settings)
    if architecture.rest_shapes and head and embedding:
        # Settings of whole models may say so wrongly; transformers believes the files.
        tied = tied and _is_equal(head, embedding, compare=True)
    if layout != HF:
        # LitGPT stores a tied head beside its embedding, and unties them when it trains them.
        tied = head is None or (embedding is not None and _is_equal(head, embedding, tied))
    base = BaseModel(
        name=name,
        directory=directory,
        architecture=architecture,
        tokenizer=Tokenizer(directory),
        tokenizer_directory=directory,
        tied=tied,
        dtype=embedding.dtype if embedding else torch.float32,
        layout=layout,
        settings=settings,
        form=form,
        as_stored=frozenset(_as_stored(directory, storage, form)),
        rest={name: tensor for name, tensor in stored.items() if storage.is_kept(name)},
    )
    # Last, because what has to be there depends on whether the head is tied.
    storage.require_complete(stored, directory, tied=tied)
    if architecture.rest_shapes and not base.rest:
        raise UserError(
            f"The weights in {directory} are only a language model, but their config.json "
            f"describes a whole {architecture.class_name}. Download them again."
        )
    return base


def _architecture_of(
    directory: Path,
    settings: Mapping[str, Any],
    name: str,
    layout: ModelLayout,
    implementation: Implementation | None,
) -> Architecture:
    """Read an architecture, and from config.json the scores that it gives."""
    architecture = read_architecture(directory, settings, name, layout, implementation)
    scores = scores_of_model(directory, settings, name)
    return architecture if scores is None else architecture.with_scores(scores)


def is_tied(architecture: Architecture, settings: Mapping[str, Any]) -> bool:
    """Return whether embedding and head share their weights, according to the settings.

    Args:
        architecture: that they describe.
        settings: the content of config.json; empty if there is none.
    """
    if architecture.scores:
        return not architecture.scores.names
    # Settings of whole models have several places for it, which transformers combines.
    if architecture.rest_shapes:
        return architecture.is_usually_tied
    return bool(settings.get("tie_word_embeddings", architecture.is_usually_tied))


def open_without_weights(directory: Path) -> BaseModel:
    """Open a base model without its weights, from the files of `save_without_weights`.

    It suffices to build the model and to write it; the weights come from a checkpoint.

    Raises:
        UserError: a file is missing or damaged.
    """
    outline = read_json(directory / OUTLINE)
    dtypes = {str(dtype).removeprefix("torch."): dtype for dtype in DTYPES.values()}
    name, tied, dtype = outline.get("name"), outline.get("tied"), outline.get("dtype")
    implementation = outline.get("implementation", FIRST)
    if (
        not isinstance(name, str)
        or not isinstance(tied, bool)
        or dtype not in dtypes
        or not isinstance(implementation, str)
    ):
        raise UserError(
            f"{directory / OUTLINE} is missing or damaged, so the model that belongs to this "
            "checkpoint is unknown. Continue from another checkpoint of the run."
        )
    # Random weights are drawn again from the architecture.
    if name.startswith("random:"):
        return _open_random(name, implementation)
    settings = plain_settings(read_json(directory / "config.json"))
    layout = layout_by_settings(directory)  # the weights are not there
    return BaseModel(
        name=name,
        directory=directory,
        architecture=_architecture_of(directory, settings, name, layout, implementation),
        tokenizer=Tokenizer(directory),
        tokenizer_directory=directory,
        tied=tied,
        dtype=dtypes[dtype],
        layout=layout,
        settings=settings,
        companions={
            file.name: file.read_bytes()
            for file in (
                *(directory / name for name in _companion_names()),
                *licence_files(directory),
            )
            if file.is_file()
        },
    )


def checked_length(base: BaseModel, max_seq_length: int | None) -> int:
    """Return the tokens of the longest sequence: the given number, or the model's context length.

    Raises:
        UserError: the model was built for shorter sequences, or its attention does not reach so
            far.
    """
    longest = base.architecture.context_length
    if max_seq_length is None or max_seq_length <= longest:
        return max_seq_length or longest
    limit = f"{base.name} was built for at most {longest} positions"
    if base.architecture.window is not None:
        limit = (
            f"attention in {base.name} has a sliding window of {longest} positions, within which "
            "ftkit trains"
        )
    raise UserError(
        f"train.max_seq_length is {max_seq_length}, but {limit}. "
        f"Try --train.max_seq_length {longest}."
    )


def save_without_weights(base: BaseModel, out: Path) -> None:
    """Write everything of a base model except its weights, for `open_without_weights`.

    Args:
        base: with or without weights.
        out: a directory that exists.

    Raises:
        OSError: a file cannot be read or written.
    """
    for name, content in (*companions(base), *licences(base)):
        (out / name).write_bytes(content)
    dtype = str(base.dtype).removeprefix("torch.")
    outline = {"name": base.name, "tied": base.tied, "dtype": dtype}
    implementation = base.architecture.implementation
    # For `model_files.has_extra_weights`, which builds no model.
    extra = {EXTRA_WEIGHTS: True} if base.architecture.rest_shapes else {}
    write_settings(out / OUTLINE, outline | {"implementation": implementation} | extra)


def parameter_shapes(base: BaseModel) -> dict[str, torch.Size]:
    """Our name and the shape of every parameter, in the order of the model's modules."""
    return base.architecture.parameter_shapes(tied=base.tied)


def weights(
    base: BaseModel, device: torch.device | None = None, *, without: Container[str] = ()
) -> Iterator[tuple[str, Tensor]]:
    """Yield every parameter as (our name, tensor), in the order of `parameter_shapes`.

    If each is dropped before the next is taken, memory holds one parameter. A tied model has no
    lm_head.weight, and neither has a reward model that is made of a language model.

    Args:
        base: with weights.
        device: as `weight_reader` takes it.
        without: our names of parameters that are left out.

    Raises:
        UserError: as `weight_reader`, before the first is yielded.
    """
    read = weight_reader(base, device)
    is_new = base.source is not None
    names = [name for name in parameter_shapes(base) if name not in without]
    # An expression, not a generator function, which would only raise once it is iterated.
    return ((name, read(name)) for name in names if not (is_new and name == HEAD))


def weight_reader(base: BaseModel, device: torch.device | None = None) -> Callable[[str], Tensor]:
    """Return a function that reads a parameter by its name in ftkit.

    Tensors are views of the mapped files and are read when touched; only rows that are scattered
    over the heads of a fused projection (GPT-NeoX) are copied. Random weights are float32.

    Args:
        base: with weights.
        device: where random weights are wanted, as views of one table of 16 MiB, which must not be
            changed. None: in host memory, each in memory of its own. It makes no difference to the
            numbers. Weights of files are in host memory in any case.

    Raises:
        UserError: a tensor is missing, unexpected or of another shape.
    """
    if base.source is not None:
        return weight_reader(base.source, device)
    if base.ungrown is not None:
        return _grown_reader(base, base.ungrown, device)
    architecture = base.architecture
    if base.directory is None:
        from ftkit.models.pretrained.random_weights import random_numbers, random_weight

        shapes = parameter_shapes(base)
        places = {name: place for place, name in enumerate(shapes)}
        # It lives as long as the reader, so that it is not in the memory that a run measures.
        numbers = random_numbers().to(device or "cpu")

        def read(name: str) -> Tensor:
            initial = architecture.initial(name, shapes[name])
            if initial != "normal":
                return torch.full(shapes[name], float(initial == "ones"), device=numbers.device)
            view = random_weight(shapes[name], places[name], numbers)
            if device is not None:
                return view
            # Safetensors files cannot be written of tensors that share memory.
            return view.clone(memory_format=torch.contiguous_format)

        return read
    if not base.has_weights:
        raise UserError(
            f"{base.directory} holds the settings of {base.name}, but not its weights. Give the "
            "directory or the hub name of the model itself."
        )
    storage = storage_of(architecture, base.layout)
    stored = _stored(base.directory, storage, base.form)
    storage.require_complete(stored, base.directory, tied=base.tied)
    holders = storage.holders(stored)
    head, embedding = holders.get(HEAD), holders.get(architecture.embedding)
    # Training would take the embedding for both, and lose the head.
    if base.tied and head and embedding and not _is_equal(head, embedding, compare=True):
        raise UserError(
            f"{base.directory} holds a head and an embedding that differ, but its config.json says "
            "that they are tied. Set tie_word_embeddings in it to false."
        )
    return lambda name: holders[name].read()


def weights_as_stored(base: BaseModel, names: Collection[str]) -> Iterator[tuple[str, Any]]:
    """Yield parameters in the form in which the files have them, by our names.

    Args:
        base: with weights.
        names: of the parameters, all of them in `as_stored`.
    """
    if not names:
        return
    if (origin := base.source or base.ungrown) is not None:
        yield from weights_as_stored(origin, names)
        return
    assert base.directory is not None, "it has files"
    storage = storage_of(base.architecture, base.layout)
    read = _as_stored(base.directory, storage, base.form)
    for name in names:
        yield name, read[name]()


def _as_stored(
    directory: Path, storage: WeightStorage, form: StoredForm | None
) -> Mapping[str, Callable[[], Any]]:
    """Find what reads each parameter that can be held as the files have it."""
    if form is None or not form.can_stay:
        return {}
    stored = stored_tensors(_weight_files(directory), lambda _: True)
    found: Mapping[str, Callable[[], Any]] = form.weights.as_stored(stored, storage)
    return found


def vocabulary_parameters(base: BaseModel) -> tuple[str, ...]:
    """Our names of the parameters that have a row for each token."""
    of_head = () if base.architecture.scores else (HEAD, HEAD.replace("weight", "bias"))
    return (base.architecture.embedding, *of_head)


def _grown_reader(
    base: BaseModel, ungrown: BaseModel, device: torch.device | None
) -> Callable[[str], Tensor]:
    """A reader that gives added tokens the mean of the rows of all others."""
    read, shapes = weight_reader(ungrown, device), parameter_shapes(base)
    ids = [base.tokenizer.vocabulary[token] for token in base.added_tokens]
    of_tokens = vocabulary_parameters(base)

    def grown(name: str) -> Tensor:
        tensor = read(name)
        if name not in of_tokens:
            return tensor
        # Rows that no token has, to which vocabularies are padded, say nothing of tokens.
        known = tensor[: min(len(tensor), *ids)]
        mean = known.mean(0, dtype=torch.float64 if known.device.type == "cpu" else torch.float32)
        result = tensor.new_empty(shapes[name])
        result[: len(tensor)] = tensor
        result[len(tensor) :] = result[ids] = mean.to(tensor.dtype)
        return result

    return grown


def storage_of(architecture: Architecture, layout: ModelLayout) -> WeightStorage:
    """Return the rules by which files of a layout store the parameters of an architecture."""
    if architecture.implementation != TRANSFORMERS:
        naming = architecture.naming_in(layout)
        assert naming is not None, f"{architecture.name} was read in a layout that cannot hold it"
        return NamedStorage(architecture, naming)
    # Imported here: transformers takes as long as all other imports.
    from ftkit.models.architectures.transformers_architecture import TransformersArchitecture
    from ftkit.models.pretrained.transformers_storage import TransformersStorage

    assert isinstance(architecture, TransformersArchitecture), "the other implementation"
    return TransformersStorage(architecture)


def _open_random(checkpoint_dir: str, implementation: Implementation | None) -> BaseModel:
    name = checkpoint_dir.removeprefix("random:")
    # Names of implementations come first, then the model types of transformers.
    known = known_architecture(name, implementation)
    architecture = known[1] if known else default_architecture(name)
    if architecture is None:
        names = [*nearest_names(name), *nearest_types(name)]
        similar = f"; did you mean {' or '.join(f'random:{n}' for n in names)}?" if names else "."
        raise UserError(
            f"checkpoint_dir {checkpoint_dir}: neither LitGPT nor transformers knows an "
            f"architecture {name}{similar} `litgpt download list` prints the names of LitGPT, "
            "docs/models.md has the model types of transformers."
        )
    computed_by = architecture.implementation
    if implementation not in (None, TRANSFORMERS, computed_by):
        raise UserError(
            f"model_implementation is {implementation}, but {name} is a model type of "
            "transformers. Leave model_implementation out."
        )
    # By this name, a checkpoint finds the architecture again.
    called = name if known and computed_by == TRANSFORMERS else architecture.name
    # Any tokenizer will do for random weights, and this one is always here.
    tokenizer_directory = embedded.path("quickstart") / "model"
    return BaseModel(
        name=f"random:{called}",
        directory=None,
        architecture=architecture,
        tokenizer=Tokenizer(tokenizer_directory),
        tokenizer_directory=tokenizer_directory,
        tied=architecture.is_usually_tied,
        dtype=torch.float32,
        layout=HF if computed_by == TRANSFORMERS else computed_by,
        settings={},
    )


def _own_settings(layout: ModelLayout) -> str:
    """Name of the settings in the layout of an implementation; "": it has none of its own."""
    return "" if layout in (HF, TRANSFORMERS) else implementation_row(layout).settings_file


def settings_files() -> list[str]:
    """Names of the settings in directories of all layouts."""
    return ["config.json", *(row.settings_file for row in IMPLEMENTATIONS)]


def _companion_names() -> list[str]:
    """Names of the files beside the weights that checkpoints keep."""
    return [*settings_files(), *_BESIDE, *TOKENIZER_FILES]


def short_name(directory: Path) -> str:
    """Name of the model in a directory, for reports."""
    # An embedded model lies in a directory called `model`.
    for name in EMBEDDED_MODELS:
        if directory.resolve() == (embedded.path(name) / "model").resolve():
            return name
    return directory.resolve().name


def _weight_files(directory: Path) -> list[Path]:
    layout = layout_in(directory)
    if layout == HF:
        return weight_files(directory)
    return [directory / implementation_row(layout).weights_file]


def _stored(
    directory: Path, storage: WeightStorage, form: StoredForm | None
) -> dict[str, WeightTensor]:
    """List the tensors of a model's files by name, each as a plain one; reads only headers."""
    files = _weight_files(directory)
    if form is None:
        return stored_tensors(files, storage.may_be_any)
    tensors: dict[str, WeightTensor] = form.weights.unpacked(stored_tensors(files, lambda _: True))
    for name, tensor in tensors.items():
        if tensor.dtype not in DTYPES.values() and not storage.may_be_any(name):
            raise UserError(
                f"{directory} holds {form.title} weights, but {name} of {tensor.dtype} lacks the "
                "tensors that belong to it. Download the model again, or give the original one."
            )
    return tensors


def _is_equal(left: HeldParameter, right: HeldParameter, compare: bool) -> bool:
    """Return whether two tensors share memory or, with compare, hold the same numbers."""
    a, b = left.read(), right.read()
    # Cheap first: a tied tensor of a pickle is one storage.
    return a.data_ptr() == b.data_ptr() or (compare and torch.equal(a, b))


def companions(base: BaseModel) -> Iterator[tuple[str, bytes]]:
    """Yield names and contents of the files beside the weights: settings and tokenizer."""
    if base.ungrown is not None:
        yield from _grown_companions(base, base.ungrown)
        return
    if base.companions is not None:
        held = base.companions.items()
        yield from ((name, content) for name, content in held if not is_licence(name))
        return
    sources = [base.tokenizer_directory / name for name in TOKENIZER_FILES]
    if base.directory is not None:
        # Copied without weights, settings of another layout would decide it.
        layout = layout_in(base.directory)
        names = ["config.json", *([] if layout == HF else [_own_settings(layout)])]
        sources += [base.directory / name for name in (*names, *_BESIDE)]
    for source in sources:
        if source.is_file():
            yield source.name, source.read_bytes()


def _grown_companions(base: BaseModel, ungrown: BaseModel) -> Iterator[tuple[str, bytes]]:
    """The files of a model to whose vocabulary tokens were added."""
    changed = base.tokenizer.changed_files()
    for name, content in companions(ungrown):
        if name == "config.json":
            changed[name] = (json.dumps(dict(base.settings), indent=2) + "\n").encode()
        elif name == _own_settings(base.architecture.implementation):
            of_layout = base.architecture.settings_in(base.architecture.implementation)
            changed[name] = yaml.dump(of_layout).encode()
        yield name, changed.get(name, content)


def licences(base: BaseModel) -> Iterator[tuple[str, bytes]]:
    """Yield names and contents of the licence files, which belong beside the model's weights."""
    if base.companions is not None:
        held = base.companions.items()
        yield from ((name, content) for name, content in held if is_licence(name))
    elif base.directory is not None:
        for file in licence_files(base.directory):
            yield file.name, file.read_bytes()


def read_blueprint(
    checkpoint_dir: str,
    implementation: Implementation | None = None,
    *,
    unreached: UserError | None = None,
    root: Path = ROOT,
) -> BaseModel:
    """Describe a base model from its settings alone; it has no weights.

    Args:
        checkpoint_dir: as `open_base` takes it. The header of a single file is enough, or
            config.json or model_config.yaml in a directory; a hub name that LitGPT knows need not
            be on this machine.
        implementation: library whose code computes it; None: see `read_architecture`.
        unreached: error of `fetch_settings`, for the message.
        root: directory of downloads.

    Raises:
        UserError: the model is unknown or cannot be trained.
    """
    if checkpoint_dir.startswith("random:"):
        return open_base(checkpoint_dir, implementation)
    # From the surest source to the least: files here, the header of a file, LitGPT's list of sizes.
    if directory := settings_directory(checkpoint_dir, root=root):
        settings = read_json(directory / "config.json")
        return _of_settings(directory, settings, implementation)
    if file := find_single_file(checkpoint_dir, root=root):
        return _of_settings(file.conversion_place(root), file.settings(), implementation)
    name = checkpoint_dir.removeprefix("./").rstrip("/").removeprefix(f"{root}/")
    if known := known_architecture(split_version(name)[0], implementation):
        return _of_hub(*known)
    wanted = unreached or (
        f"Put its config.json into {root / name}, or give a directory with config.json or "
        "model_config.yaml."
    )
    near = [*nearest_names(name), *(f"random:{t}" for t in nearest_types(Path(name).name))]
    # One suggestion is enough.
    asks = "Did you mean" in str(wanted)
    hint = f" Did you mean {' or '.join(near)}?" if near and not asks else ""
    named = "".join(
        f"{row.title} knows no model of this name and "
        if row.is_installed
        else f"{row.title}, which knows many models by name, is not installed and "
        for row in IMPLEMENTATIONS
    )
    raise UserError(
        f"checkpoint_dir {checkpoint_dir}: its architecture is unknown, because {named}there "
        f"is no config.json. {wanted}{hint}"
    )


def _of_settings(
    directory: Path, settings: dict[str, Any], implementation: Implementation | None
) -> BaseModel:
    name = short_name(directory)
    form: StoredForm | None = None
    with suppress(UserError):  # sizes are known of weights that cannot be read, too
        form = stored_form(settings, name)
    settings = plain_settings(settings)
    layout = layout_by_settings(directory)
    architecture = _architecture_of(directory, settings, name, layout, implementation)
    return BaseModel(
        name=name,
        directory=directory,
        architecture=architecture,
        tokenizer=_any_tokenizer(),
        tokenizer_directory=directory,
        tied=is_tied(architecture, settings),
        dtype=torch.float32,
        layout=layout,
        settings=settings,
        form=form,
        companions={},
    )


def _of_hub(hub_name: str, architecture: Architecture) -> BaseModel:
    directory = ROOT / hub_name
    return BaseModel(
        name=directory.name,
        directory=directory,
        architecture=architecture,
        tokenizer=_any_tokenizer(),
        tokenizer_directory=directory,
        # LitGPT's configurations do not say which models are tied.
        tied=architecture.is_usually_tied or directory.name.lower().startswith(_TIED),
        dtype=torch.float32,
        layout=architecture.implementation if architecture.naming_in(HF) is None else HF,
        settings={},
        companions={},
        known_as=hub_name,
    )


def _any_tokenizer() -> Tokenizer:
    # The model's own tokenizer may not be here, and nothing is tokenized.
    return Tokenizer(embedded.path("quickstart") / "model")


def fingerprint(base: BaseModel) -> str:
    """Return a SHA-256 over the architecture and values spread over every parameter.

    It is equal for copies of a model in Hugging Face's and in LitGPT's layout, and in any number
    format that holds its values. Up to 256 values of each parameter are read: enough to distinguish
    models of which one was trained, not to find a flipped bit. Random weights follow from the
    architecture and are not drawn.

    It begins with the implementation, whose names the parameters have: see `implementation_of`. A
    reward model that is made of a language model has the fingerprint of that one.

    Args:
        base: with weights.

    Raises:
        UserError: the weights are missing, damaged or not those of the architecture.
    """
    implementation = base.architecture.implementation
    return f"{implementation}:" * (implementation != FIRST) + _digest(base)


def implementation_of(known: str) -> Implementation:
    """Return the implementation that a fingerprint names; those of the first one name none."""
    named, found, _ = known.partition(":")
    return named if found else FIRST


def _digest(base: BaseModel) -> str:
    if base.source is not None:
        return _digest(base.source)
    if base.ungrown is not None:
        return hashlib.sha256(_text([_digest(base.ungrown), *base.added_tokens])).hexdigest()
    # Not of the files: the same model has other bytes in each layout and number format.
    digest = hashlib.sha256(_text(base.architecture.identity()))
    if base.random:
        # Changes when their numbers do: a reference's cached results are found by it.
        digest.update(b"random windows")
        for name, shape in parameter_shapes(base).items():
            # Nothing is read: the numbers follow from names and shapes in their order.
            digest.update(_text([name, list(shape)]))
        return digest.hexdigest()
    # Of the language model alone: another run trains other parts beside the same one.
    beside = {*filter(base.architecture.is_beside, parameter_shapes(base))}
    for name, tensor in weights(base, without=beside):
        digest.update(_text([name, list(tensor.shape)]))
        # Little-endian float64, which holds the values of all other formats exactly.
        digest.update(_sample(tensor).numpy().astype("<f8").tobytes())
    return digest.hexdigest()


def _sample(tensor: Tensor) -> Tensor:
    """Return [up to 256] float64, from the first value to the last in nearly equal strides."""
    # Strides that differ by one: with equal ones, all values could be from one column.
    values = tensor.flatten()
    count = min(values.numel(), _SAMPLED)
    positions = torch.arange(count) * (values.numel() - 1) // max(1, count - 1)
    return values[positions].double()


def _text(value: Any) -> bytes:
    """Serialize a value, with the same text for 8 and 8.0."""
    return json.dumps(_plain(value), sort_keys=True).encode()


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    return value
