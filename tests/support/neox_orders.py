"""What GPT-NeoX's own code took of small corpora, and the same by a plain definition."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

ORDERS = Path(__file__).parents[1] / "extensions/neox_data/orders"
CORPORA = ORDERS / "corpora"
CASES: dict[str, dict[str, Any]] = json.loads((ORDERS / "cases.json").read_text())
EOD = 1
"""Token that ends a document."""


def options_of(case: str, corpora: Path = CORPORA) -> dict[str, Any]:
    """The init_args of a case, with the places of its corpora."""
    options = dict(CASES[case])
    for key, value in CASES[case].items():
        if key == "data_path":
            options[key] = str(corpora / value)
        elif key.endswith("_paths"):
            options[key] = [str(corpora / name) for name in value]
    return options


def taken_by_neox(case: str) -> Mapping[str, npt.NDArray[Any]]:
    """Samples and index files of a case."""
    found: Mapping[str, npt.NDArray[Any]] = np.load(ORDERS / f"{case}.npz")
    return found


def documents_of(prefix: Path) -> list[list[int]]:
    """Tokens of all documents, which lie one behind the other."""
    index = prefix.with_suffix(".idx").read_bytes()
    dtype = {4: "<i4", 8: "<u2"}[index[17]]
    (count,) = np.frombuffer(index, "<u8", 1, 18)
    sizes = np.frombuffer(index, "<i4", int(count), 34)
    tokens = np.fromfile(prefix.with_suffix(".bin"), dtype)
    return [part.tolist() for part in np.split(tokens, np.cumsum(sizes)[:-1])]


def plain_samples(
    documents: Sequence[list[int]], needed: int | None, seq_length: int, seed: int
) -> list[list[int]]:
    """All samples of a corpus in GPT-NeoX's order.

    Epochs are added until there are as many samples as needed; their documents are shuffled
    together and joined, and cut into samples, the last token of which is the first of the next one.
    Samples are shuffled too. None: one epoch.
    """
    epochs, tokens = 1, sum(map(len, documents))
    while needed is not None and (epochs * tokens - 1) // seq_length < needed:
        epochs += 1
    generator = np.random.RandomState(seed)
    numbers = np.array([*range(len(documents))] * epochs)
    generator.shuffle(numbers)
    joined = [token for number in numbers for token in documents[number]]
    order = np.arange((len(joined) - 1) // seq_length)
    generator.shuffle(order)
    starts = (order * seq_length).tolist()
    return [joined[start : start + seq_length + 1] for start in starts]


def plain_mixture(corpora: Sequence[list[list[int]]], weights: Sequence[float]) -> list[list[int]]:
    """Samples of corpora, each of the one that is furthest behind its share.

    One sample of each corpus is not counted. Behind its end a corpus goes on at the place modulo
    those that are.
    """
    taken, found = [0] * len(corpora), []
    for number in range(sum(len(corpus) - 1 for corpus in corpora)):
        shares = [weight / sum(weights) * max(number, 1) for weight in weights]
        behind = [share - count for share, count in zip(shares, taken, strict=True)]
        chosen = behind.index(max(behind))
        corpus, place = corpora[chosen], taken[chosen]
        found.append(corpus[place if place < len(corpus) else place % (len(corpus) - 1)])
        taken[chosen] += 1
    return found


def plain_order(options: Mapping[str, Any]) -> list[list[int]]:
    """Every training sample of an epoch of GPT-NeoX's loader, in its order."""
    needed = None
    if options["train_iters"] is not None:
        needed = options["train_iters"] * options["train_batch_size"]
    settings = options["seq_length"], options["seed"]
    if "data_path" in options:
        documents = documents_of(Path(options["data_path"]))
        shares = [float(share) for share in options["split"].replace("/", ",").split(",")]
        counts = [round(share / sum(shares) * len(documents)) for share in shares]
        # What rounding adds or takes away is made up for by the documents to train on.
        trained = documents[: counts[0] - (sum(counts) - len(documents))]
        found = plain_samples(trained, needed, *settings)[:]
        found = plain_mixture([found], [1.0])
    else:
        weights = options["train_data_weights"]
        corpora = [
            plain_samples(
                documents_of(Path(path)),
                None if needed is None else int(np.ceil(needed * weight / sum(weights) * 1.005)),
                *settings,
            )
            for path, weight in zip(options["train_data_paths"], weights, strict=True)
        ]
        found = plain_mixture(corpora, weights)
    micro_batch = options["train_batch_size"] // options.get("gradient_accumulation_steps", 1)
    return found[: len(found) - len(found) % micro_batch]
