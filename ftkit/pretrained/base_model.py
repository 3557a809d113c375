"""The base model: opened, and its weights read under our names.

Our names are explained in `ftkit.pretrained.naming`.
"""

import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from litgpt.config import Config
from litgpt.model import GPT
from torch import Tensor

from ftkit import embedded
from ftkit.errors import UserError
from ftkit.pretrained import families, hub
from ftkit.pretrained.families import Family
from ftkit.pretrained.naming import LITGPT, Fused, Naming
from ftkit.pretrained.tokenizer import Tokenizer
from ftkit.pretrained.weight_files import DTYPES, WeightTensor, stored_tensors, write_settings

EMBEDDING = "transformer.wte.weight"
HEAD = "lm_head.weight"
OUTLINE = "base.json"
"""What the weights would tell, where there are none: beside settings and tokenizer."""

_BUFFERS = ("rotary_emb.inv_freq", "attention.bias", "attention.masked_bias")
"""What old checkpoints hold beside parameters, by the ends of the names."""
_INITIAL_STD = 0.02
_LITGPT_SETTINGS = "model_config.yaml"
SETTINGS = ("config.json", _LITGPT_SETTINGS)
_COMPANIONS = (*SETTINGS, "generation_config.json", *hub.TOKENIZER_FILES)


@dataclass(frozen=True)
class BaseModel:
    """A base model whose settings are read and whose weights are not yet."""

    name: str
    """Short, for reports."""
    directory: Path | None
    """None: random weights."""
    config: Config
    """Built from the checkpoint's own settings, whatever its size."""
    tokenizer: Tokenizer
    tokenizer_directory: Path
    tied: bool
    """Embedding and head are shared: there is no lm_head.weight."""
    dtype: torch.dtype
    """Of the embedding on disk."""
    naming: Naming
    """How the files call the parameters."""
    family: Family | None
    """What it is to Hugging Face; None: nothing that ftkit knows how to write."""
    settings: Mapping[str, Any]
    """The content of config.json; {} where there is none."""
    companions: Mapping[str, bytes] | None = None
    """Files beside the weights, by name: held where there are no weights, because a checkpoint
    that a run started from may be deleted before it ends. None: they are read when needed."""

    @property
    def random(self) -> bool:
        """Whether the weights are made up, to measure time and memory alone."""
        return self.directory is None

    @property
    def has_weights(self) -> bool:
        """Whether `weights` can give any; not where a checkpoint alone was opened."""
        return self.companions is None


def open_base(checkpoint_dir: str, *, token: str | None = None, root: Path = hub.ROOT) -> BaseModel:
    """Open a base model, downloading it if needed; reads everything but the weights themselves.

    Args:
        checkpoint_dir: what `hub.find_or_download` takes, or ``random:NAME`` for random weights
            in an architecture that LitGPT knows by this name.
        token: of a Hugging Face account. Default: $HF_TOKEN.
        root: where downloads go.

    Raises:
        UserError: not found, not complete, not supported, or not of the shapes in its settings.
    """
    if checkpoint_dir.startswith("random:"):
        return _open_random(checkpoint_dir)
    directory = hub.find_or_download(checkpoint_dir, token=token, root=root)
    name = short_name(directory)
    settings = hub.read_json(directory / "config.json")
    config, naming, family = read_settings(
        directory, settings, name, is_litgpt=hub.is_litgpt(directory)
    )
    stored = stored_tensors(_weight_files(directory))
    head, embedding = (stored.get(naming.stored_in(name)[0]) for name in (HEAD, EMBEDDING))
    tied = bool(settings.get("tie_word_embeddings", family is not None and family.tied))
    if hub.is_litgpt(directory):
        # LitGPT stores a tied head beside its embedding, and unties them when it trains them.
        tied = head is None or (embedding is not None and _is_equal(head, embedding, tied))
    base = BaseModel(
        name=name,
        directory=directory,
        config=config,
        tokenizer=Tokenizer(directory),
        tokenizer_directory=directory,
        tied=tied,
        dtype=embedding.dtype if embedding else torch.float32,
        naming=naming,
        family=family,
        settings=settings,
    )
    _require_complete(base, stored)
    return base


def open_companions(directory: Path) -> BaseModel:
    """Open what `save_companions` wrote: a base model without its weights.

    It serves to build the model and to write it; its weights come from elsewhere.

    Raises:
        UserError: a file is missing or damaged.
    """
    outline = hub.read_json(directory / OUTLINE)
    dtypes = {str(dtype).removeprefix("torch."): dtype for dtype in DTYPES.values()}
    name, tied, dtype = outline.get("name"), outline.get("tied"), outline.get("dtype")
    if not isinstance(name, str) or not isinstance(tied, bool) or dtype not in dtypes:
        raise UserError(
            f"{directory / OUTLINE} is missing or damaged, so the model that belongs to this "
            "checkpoint is unknown. Continue from another checkpoint of the run."
        )
    if name.startswith("random:"):
        return _open_random(name)
    settings = hub.read_json(directory / "config.json")
    config, naming, family = read_settings(
        directory, settings, name, is_litgpt=(directory / _LITGPT_SETTINGS).is_file()
    )
    return BaseModel(
        name=name,
        directory=directory,
        config=config,
        tokenizer=Tokenizer(directory),
        tokenizer_directory=directory,
        tied=tied,
        dtype=dtypes[dtype],
        naming=naming,
        family=family,
        settings=settings,
        companions={
            file: (directory / file).read_bytes()
            for file in _COMPANIONS
            if (directory / file).is_file()
        },
    )


def checked_length(base: BaseModel, asked: int | None) -> int:
    """Tokens of the longest sequence: as asked, or as the model was built for.

    Raises:
        UserError: it was built for shorter ones, or its attention does not reach so far.
    """
    longest = base.config.block_size
    if asked is None or asked <= longest:
        return asked or longest
    limit = f"{base.name} was built for at most {longest} positions"
    if families.window_of(base.config, base.settings):
        limit = (
            f"attention in {base.name} has a sliding window of {longest} positions, within which "
            "ftkit trains"
        )
    raise UserError(
        f"train.max_seq_length is {asked}, but {limit}. Try --train.max_seq_length {longest}."
    )


def save_companions(base: BaseModel, out: Path) -> None:
    """Write all that makes up a base model but its weights; `open_companions` reads it.

    Args:
        base: with or without weights.
        out: a directory that exists.

    Raises:
        OSError: a file cannot be read or written.
    """
    for name, content in companions(base):
        (out / name).write_bytes(content)
    dtype = str(base.dtype).removeprefix("torch.")
    write_settings(out / OUTLINE, {"name": base.name, "tied": base.tied, "dtype": dtype})


def parameter_shapes(base: BaseModel) -> dict[str, torch.Size]:
    """Our name and the shape of every parameter, in the order of the model's modules."""
    config = base.config
    with torch.device("meta"):
        model = GPT(config)
    key_rows = config.n_query_groups * config.head_size
    qkv_rows = {"q": config.n_head * config.head_size, "k": key_rows, "v": key_rows}
    shapes: dict[str, torch.Size] = {}
    for name, parameter in model.named_parameters():
        module, _, kind = name.rpartition(".")
        if module.endswith(".attn.qkv"):
            for part, rows in qkv_rows.items():
                shape = torch.Size((rows, *parameter.shape[1:]))
                shapes[f"{module}.{part}_proj.{kind}"] = shape
        elif name != HEAD or not base.tied:
            shapes[name] = parameter.shape
    return shapes


def weights(base: BaseModel) -> Iterator[tuple[str, Tensor]]:
    """Every parameter as (our name, tensor), in the order of `parameter_shapes`.

    Drop each before taking the next, and memory stays at one parameter. A tied model has no
    lm_head.weight.

    Raises:
        UserError: as `weight_reader`, before any is given out.
    """
    read = weight_reader(base)
    return ((name, read(name)) for name in parameter_shapes(base))


def weight_reader(base: BaseModel) -> Callable[[str], Tensor]:
    """What gives any parameter by our name.

    Tensors are views of the files, mapped into memory and read when touched; only what lies
    scattered over the heads of a fused projection (GPT-NeoX) is copied. Random ones are drawn.

    Raises:
        UserError: a tensor is missing, unexpected or of another shape.
    """
    shapes = parameter_shapes(base)
    if base.directory is None:
        return lambda name: _random_weight(base, name, shapes[name])
    if not base.has_weights:
        raise UserError(
            f"{base.directory} holds the settings of {base.name}, but not its weights. Give the "
            "directory or the hub name of the model itself."
        )
    stored = stored_tensors(_weight_files(base.directory))
    _require_complete(base, stored)
    head, embedding = (stored.get(base.naming.stored_in(name)[0]) for name in (HEAD, EMBEDDING))
    if base.tied and head and embedding and not _is_equal(head, embedding, compare=True):
        raise UserError(
            f"{base.directory} holds a head and an embedding that differ, but its config.json "
            "says that they are one. Set tie_word_embeddings there to false."
        )

    def read(name: str) -> Tensor:
        their_name, fused = base.naming.stored_in(name)
        tensor = stored[their_name].read()
        return tensor if fused is None else part_of(tensor, fused, name, shapes, base.config)

    return read


def _open_random(checkpoint_dir: str) -> BaseModel:
    name = checkpoint_dir.removeprefix("random:")
    try:
        config = Config.from_name(name)
    except ValueError as error:
        names = hub.nearest_names(name)
        similar = f"; did you mean {' or '.join(f'random:{n}' for n in names)}?" if names else "."
        raise UserError(
            f"checkpoint_dir {checkpoint_dir}: LitGPT knows no architecture {name}{similar} "
            "`litgpt download list` prints all names."
        ) from error
    assert config is not None, "Config.from_name finds or raises"
    config = families.within_window(config)
    family = families.family_of_config(config)
    tokenizer_directory = embedded.path("quickstart") / "model"
    return BaseModel(
        name=f"random:{config.name}",
        directory=None,
        config=config,
        tokenizer=Tokenizer(tokenizer_directory),
        tokenizer_directory=tokenizer_directory,
        tied=family is not None and family.tied,
        dtype=torch.float32,
        naming=LITGPT,
        family=family,
        settings={},
    )


def _random_weight(base: BaseModel, name: str, shape: torch.Size) -> Tensor:
    """The same numbers on every rank: each parameter has a seed of its own."""
    if len(shape) > 1:
        generator = torch.Generator(device="cpu").manual_seed(zlib.crc32(name.encode()))
        return torch.empty(shape, dtype=torch.float32, device="cpu").normal_(
            std=_INITIAL_STD, generator=generator
        )
    if name.endswith(".bias") or "Gemma" in base.config.name:  # its norms add one
        return torch.zeros(shape, device="cpu")
    return torch.ones(shape, device="cpu")


def short_name(directory: Path) -> str:
    """What reports call the model in a directory."""
    for name in hub.EMBEDDED_MODELS:
        if directory.resolve() == (embedded.path(name) / "model").resolve():
            return name
    return directory.resolve().name


def read_settings(
    directory: Path, settings: Mapping[str, Any], name: str, *, is_litgpt: bool
) -> tuple[Config, Naming, Family | None]:
    """Architecture, names of the parameters in files, and family of the model in a directory."""
    family = families.family_of_settings(settings)
    if not is_litgpt:
        config = families.litgpt_config(settings, name)
        assert family is not None, "litgpt_config takes known families alone"
        return config, family.naming, family
    config = _config_of_litgpt(directory)
    if family is None:
        return config, LITGPT, families.family_of_config(config)
    _require_same(families.litgpt_config(settings, name), config, directory)
    return config, LITGPT, family


def _config_of_litgpt(directory: Path) -> Config:
    file = directory / _LITGPT_SETTINGS
    try:
        return families.within_window(Config.from_file(file))
    except Exception as error:  # of the YAML parser, or of a field or value LitGPT does not know
        raise UserError(
            f"{file} is no model configuration of this LitGPT version ({error}). Convert the "
            "original model again with `litgpt convert_to_litgpt`."
        ) from error


def _require_same(theirs: Config, ours: Config, directory: Path) -> None:
    """UserError unless config.json and model_config.yaml are of one size."""
    sizes = ("n_layer", "n_embd", "n_head", "n_query_groups", "head_size", "intermediate_size")
    for size in sizes:
        if getattr(theirs, size) != getattr(ours, size):
            raise UserError(
                f"{directory} holds two models: {size} is {getattr(ours, size)} in "
                f"model_config.yaml and {getattr(theirs, size)} in config.json. Remove the one "
                "that does not belong there."
            )


def _weight_files(directory: Path) -> list[Path]:
    is_litgpt = hub.is_litgpt(directory)
    return [directory / "lit_model.pth"] if is_litgpt else hub.weight_files(directory)


def _is_equal(left: WeightTensor, right: WeightTensor, compare: bool) -> bool:
    """Whether two tensors are one; compare: or hold the same numbers, which takes reading them."""
    a, b = left.read(), right.read()
    return a.data_ptr() == b.data_ptr() or (compare and torch.equal(a, b))


def _require_complete(base: BaseModel, stored: Mapping[str, WeightTensor]) -> None:
    """UserError unless the files hold exactly the parameters of the model."""
    expected: dict[str, list[int]] = {}
    for name, shape in parameter_shapes(base).items():
        their_name, _ = base.naming.stored_in(name)
        if their_name in expected:
            expected[their_name][0] += shape[0]
        else:
            expected[their_name] = list(shape)
    for name, sizes in expected.items():
        if name not in stored:
            raise UserError(f"The weights in {base.directory} lack {name}. Download them again.")
        if list(stored[name].shape) != sizes:
            raise UserError(
                f"{name} in {base.directory} has shape {list(stored[name].shape)}, but the "
                f"model's settings say {sizes}. Take both from the same model."
            )
    shared_head = {base.naming.stored_in(HEAD)[0]} if base.tied else set()
    for name in stored.keys() - expected.keys() - shared_head:
        if not name.endswith(_BUFFERS):
            raise UserError(
                f"The weights in {base.directory} hold {name}, which its settings do not explain. "
                "Take both from the same model, and adapters and classifiers merged or removed."
            )


def part_of(
    tensor: Tensor, fused: Fused, name: str, shapes: Mapping[str, torch.Size], config: Config
) -> Tensor:
    """The rows of a fused tensor that are our parameter."""
    names = part_names(fused, name)
    rows = [shapes[part][0] for part in names]
    if fused.layout == "heads":
        heads = tensor.unflatten(0, (config.n_head, -1))
        per_head = [count // config.n_head for count in rows]
        return heads.split(per_head, dim=1)[names.index(name)].flatten(0, 1)
    return tensor.split(rows)[names.index(name)]


def fuse(parts: list[Tensor], fused: Fused, config: Config) -> Tensor:
    """The inverse of `part_of`."""
    if fused.layout == "heads":
        heads = [part.unflatten(0, (config.n_head, -1)) for part in parts]
        return torch.cat(heads, dim=1).flatten(0, 1)
    return torch.cat(parts)


def part_names(fused: Fused, name: str) -> list[str]:
    """The names of a fused tensor's parts, given one: transformer.h.LAYER. ... .weight."""
    _, _, layer, *_, kind = name.split(".")
    return [f"{part.format(layer)}.{kind}" for part in fused.parts]


def companions(base: BaseModel) -> Iterator[tuple[str, bytes]]:
    """Names and contents of the files beside the weights: settings and tokenizer."""
    if base.companions is not None:
        yield from base.companions.items()
        return
    sources = [base.tokenizer_directory / name for name in hub.TOKENIZER_FILES]
    if base.directory is not None:
        is_litgpt = hub.is_litgpt(base.directory)
        names = [name for name in SETTINGS if is_litgpt or name != _LITGPT_SETTINGS]
        sources += [base.directory / name for name in (*names, "generation_config.json")]
    for source in sources:
        if source.is_file():
            yield source.name, source.read_bytes()
