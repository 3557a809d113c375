"""Importance of the numbers in matrices, measured on training data, in the form of llama-imatrix.

An input that is large in the mean makes errors of its column large, so K-quants weigh each column
by the mean square of its inputs. The model computes texts of a run as training does; for each
matrix inside its blocks the squares of its inputs are summed. The head is left out, as in
llama-imatrix, and so are matrices of experts, which see a part of the tokens each.
"""

from collections.abc import Container, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn as nn
from torch import Tensor

from ftkit.data.dataset import load_data
from ftkit.errors import UserError
from ftkit.evaluation.loading import Loaded, load_result, open_result
from ftkit.evaluation.result import Result
from ftkit.evaluation.session import plan_session
from ftkit.extensions.gguf.families import NamedTensor
from ftkit.models.lora.targets import our_name
from ftkit.models.pretrained.base_model import parameter_shapes
from ftkit.recipe.objectives import objective_rules
from ftkit.recipe.options import UseOptions
from ftkit.strategies.distributed import make_device
from ftkit.strategies.strategy import compute_dtype, make_strategy, parameter_dtype
from ftkit.utils.accelerators.use import sum_dtype
from ftkit.utils.progress import OnProgress

IMPORTANCE_FILE = "model.imatrix"
"""Not named .gguf: a directory with one such file is read as a model."""
_MOST_TOKENS = 2**16
"""More change hardly anything: llama-imatrix is usually given as many."""
_CHUNK_TOKENS = 512
"""imatrix.chunk_size: llama-imatrix's own, by which its users compare files."""


@dataclass(frozen=True, kw_only=True)
class Importance:
    """Sums of squares of the inputs of matrices."""

    sums: Mapping[str, np.ndarray]
    """[columns] float32, by llama.cpp's names."""
    tokens: int
    """Over how many tokens."""
    source: str
    """Name of the run."""

    def of(self, name: str) -> np.ndarray | None:
        """Mean squares of a matrix; None: it was not measured."""
        found = self.sums.get(name)
        return None if found is None else found / np.float32(self.tokens)

    def write(self, file: Path, architecture: str) -> None:
        """Write them as llama-imatrix does.

        Raises:
            OSError: the file cannot be written.
        """
        from gguf import GGUFWriter

        writer = GGUFWriter(file, architecture)
        writer.add_type("imatrix")
        writer.add_array("imatrix.datasets", [self.source])
        writer.add_uint32("imatrix.chunk_count", -(-self.tokens // _CHUNK_TOKENS))
        writer.add_uint32("imatrix.chunk_size", _CHUNK_TOKENS)
        for name in sorted(self.sums):
            writer.add_tensor(f"{name}.in_sum2", self.sums[name][None])
            writer.add_tensor(f"{name}.counts", np.full((1, 1), self.tokens, np.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()


def measured_importance(
    result: Result,
    run: Result,
    names: Mapping[str, NamedTensor],
    checkpoint_dir: str | None,
    progress: OnProgress,
) -> Importance:
    """Compute training data of a run with a model, and measure the inputs of its matrices.

    Args:
        result: the model.
        run: whose data it is given.
        names: of its tensors, by llama.cpp's names.
        checkpoint_dir: its base model, if it is not where the run had it.
        progress: receives the number of tokens.

    Raises:
        UserError: the run has no data.
    """
    texts = _texts(run)
    plan, _ = plan_session(result, UseOptions(base=checkpoint_dir))
    device = make_device(plan.accelerator)
    loaded = load_result(
        result,
        device=device,
        dtype=parameter_dtype(plan),
        compute_dtype=compute_dtype(plan),
        base=checkpoint_dir,
    )
    context = make_strategy(plan).precision.forward_context
    ours: dict[str, list[str]] = {}
    for name, named in names.items():
        ours.setdefault(named.theirs, []).append(name)
    total, done = sum(map(len, texts)), 0
    model = loaded.model
    with _watched(loaded, ours) as sums, torch.no_grad(), context():
        for text in texts:
            ids = torch.from_numpy(text.astype(np.int64))[None].to(device)
            model.body.hidden(ids, None, model.kernel, None)
            done += len(text)
            progress(done, total)
    found = {
        name: values.cpu().numpy().astype(np.float32)
        for theirs, values in sums.items()
        for name in ours[theirs]
    }
    return Importance(sums=found, tokens=total, source=run.name)


def _texts(run: Result) -> list[np.ndarray]:
    """Token ids of training samples, spread over the data of a run."""
    if run.recipe is None:
        raise UserError(
            f"--imatrix is {run.name}, which does not say which data it was trained on. Try the "
            "directory of a run."
        )
    base = open_result(run)
    longest = base.architecture.context_length
    if run.metadata is not None:
        longest = run.metadata.max_seq_length
    longest = run.recipe.train.max_seq_length or longest
    preference = objective_rules(run.recipe.objective).preference
    samples = load_data(run.recipe.data, base.tokenizer, longest, preference=preference).train
    found, tokens = list[np.ndarray](), 0
    order = np.random.default_rng(0).permutation(len(samples))
    for number in order:
        if tokens >= _MOST_TOKENS:
            break
        sample = samples[int(number)]
        if not sample.media:
            found.append(np.asarray(sample.ids[: _MOST_TOKENS - tokens]))
            tokens += len(found[-1])
    if not found:
        raise UserError(
            f"--imatrix is {run.name}, but all of its samples have media, which the file's model "
            "does not see. Name a run with texts."
        )
    return found


@contextmanager
def _watched(loaded: Loaded, names: Container[str]) -> Iterator[Mapping[str, Tensor]]:
    """Sum the squares of what enters linear layers, by Hugging Face's names of their weights."""
    naming = loaded.base.architecture.naming_in("hf") or loaded.base.naming
    known = parameter_shapes(loaded.base)
    sums: dict[str, Tensor] = {}
    handles = []

    def watch(name: str) -> Any:
        def add(_: nn.Module, inputs: tuple[Any, ...]) -> None:
            values = inputs[0].reshape(-1, inputs[0].shape[-1]).to(sums[name].dtype)
            sums[name] += values.square().sum(0)

        return add

    for path, module in loaded.model.body.named_modules():
        ours = our_name(f"body.{path}.weight")
        if not isinstance(module, nn.Linear) or ours not in known:
            continue
        name = ours if ours in names else naming.stored_in(ours)[0]
        # Parts of a fused matrix have one input: the first of them stands for all.
        if name in names and name not in sums:
            device = module.weight.device
            sums[name] = torch.zeros(module.in_features, dtype=sum_dtype(device), device=device)
            handles.append(module.register_forward_pre_hook(watch(name)))
    try:
        yield sums
    finally:
        for handle in handles:
            handle.remove()
