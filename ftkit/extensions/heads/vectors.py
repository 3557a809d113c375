"""`ftkit generate` for embedding models: a vector of length 1 for each text."""

import io
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from lightning.fabric.utilities import move_data_to_device
from torch import Tensor

from ftkit.data.records.media import as_given
from ftkit.data.samples.loader import collate
from ftkit.data.samples.sample_set import Sample
from ftkit.errors import UserError
from ftkit.evaluation.generate import check_shapes, records_of, shown, write_entries
from ftkit.evaluation.prompting import check_system, prompting_for, question_of
from ftkit.evaluation.result import Result
from ftkit.evaluation.session import Session, start_session
from ftkit.extensions.heads.embed import pooled, pooled_sample
from ftkit.extensions.heads.generate import encoded, refuse_options
from ftkit.models.language_model import output_of
from ftkit.models.loss import Hidden
from ftkit.recipe.objectives import Pooling
from ftkit.recipe.options import GenerateOptions
from ftkit.utils.console.display import Display
from ftkit.utils.console.formatting import count_text, number_text
from ftkit.utils.files import write_durably
from ftkit.utils.progress import print_notice

_ROWS = 16
"""Texts of a forward pass."""
_MOST_SHOWN = 5
"""Numbers of a vector that a terminal shows."""


def generate(result: Result, options: GenerateOptions) -> int:
    """Make vectors of prompts, show or write them, and return the exit code.

    Args:
        result: an embedding model.
        options: texts, and where vectors go: to an array of numpy if the name ends with .npy.

    Raises:
        UserError: something is missing, or an option means nothing for vectors.
    """
    refuse_options(options)
    records = records_of(options)
    check_shapes(records, options)
    if options.input is not None or (
        options.system is not None and not all("messages" in one for one in records)
    ):
        key = "system" if options.input is None else "input"
        raise UserError(
            f"--{key} belongs to conversations, but a prompt is embedded as it is. Leave --{key} "
            "out, or write it into the text."
        )
    session = start_session(result, options)
    scores = session.loaded.base.architecture.scores
    assert scores is not None and scores.pooling is not None
    prompting = prompting_for(session.loaded.prompting, options, session.loaded.base)
    if prompting is not None and options.system is not None:
        check_system(prompting.template, options.system)
    # A prompt is a text: only conversations are written by a template.
    whole = [one if "messages" in one else {"text": question_of(one).text} for one in records]
    texts = [encoded(record, prompting, session, options.system) for record in whole]
    title = f"embedding {len(records)} texts"
    with Display(None, stream=sys.stderr) as display, display.phase(title, brief=True) as phase:
        found: list[Tensor] = []
        for rows in vectors_of(texts, session, scores.pooling):
            found += rows
            phase.advance(len(found), len(records))
    out = None if options.out is None else options.out.expanduser()
    if out is not None and out.suffix == ".npy":
        _write_array(out, torch.stack(found))
        return 0
    entries = [
        as_given(record) | {"vector": vector.tolist()}
        for record, vector in zip(records, found, strict=True)
    ]
    if out is not None:
        write_entries(out, entries)
    elif options.format == "json":
        shown_ones = entries if options.prompts is not None else entries[0]
        print(json.dumps(shown_ones, indent=2, ensure_ascii=False))
    else:
        for record, vector in zip(records, found, strict=True):
            if len(records) > 1:
                print(shown(f"> {question_of(record).text}"))
            first = " ".join(map(number_text, vector[:_MOST_SHOWN].tolist()))
            print(f"{first} ... ({len(vector):,} numbers)" + "\n" * (len(records) > 1))
    return 0


def _write_array(out: Path, vectors: Tensor) -> None:
    """Write [texts, width] float32 as a file of numpy."""
    content = io.BytesIO()
    np.save(content, vectors.numpy(), allow_pickle=False)
    try:
        write_durably(out, content.getvalue())
    except OSError as error:
        raise UserError(f"--out {out} cannot be written ({error.strerror}).") from None
    print_notice(f"{count_text(len(vectors), 'vector')} in {out}", sys.stderr)


@torch.no_grad()
def vectors_of(
    texts: Sequence[list[int]], session: Session, pooling: Pooling
) -> Iterator[list[Tensor]]:
    """Yield the vectors of a few texts at a time, [width] float32 each, on the host.

    Args:
        texts: token ids of each.
        session: with an embedding model.
        pooling: of its hidden states.
    """
    model = session.loaded.model
    nothing = np.empty((0, 2), dtype=np.int32)
    for start in range(0, len(texts), _ROWS):
        some = (np.array(ids, dtype=np.int32) for ids in texts[start : start + _ROWS])
        samples = [pooled_sample(Sample(ids, nothing), pooling) for ids in some]
        batch = move_data_to_device(collate(samples, {}), session.device)
        with session.context():
            found = output_of(model, batch, Hidden())
        yield [*F.normalize(pooled(found, batch, pooling), dim=1).cpu()]
