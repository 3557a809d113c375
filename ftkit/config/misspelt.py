"""Misspelt keys of recipes, and keys as other programs call them."""

from collections.abc import Iterable

from ftkit.utils.nearest import nearest

_ELSEWHERE = {
    "batch_size": "train.global_batch_size",
    "dataset": "data.json_path",
    "learning_rate": "optimizer.lr",
    "lr": "optimizer.lr",
    "max_length": "train.max_seq_length",
    "model": "checkpoint_dir",
    "model_name_or_path": "checkpoint_dir",
    "num_epochs": "train.epochs",
    "num_train_epochs": "train.epochs",
    "output_dir": "out_dir",
    "per_device_train_batch_size": "train.micro_batch_size",
    "warmup_steps": "train.lr_warmup_steps",
    "weight_decay": "optimizer.weight_decay",
}
"""Keys by their names in other programs, which people type here."""


def what_was_meant(key: str, known: Iterable[str]) -> str:
    """Where an unknown key is likely to belong: a sentence, with a space before it."""
    names = list(known)
    last_name = key.rpartition(".")[2]
    if last_name in _ELSEWHERE:
        return f" Did you mean {_ELSEWHERE[last_name]}?"
    close = nearest(key, names)
    if not close:
        by_last = {name.rpartition(".")[2]: name for name in names}
        last = nearest(last_name, by_last)
        close = by_last[last] if last else None
    return f" Did you mean {close}?" if close else " See ftkit finetune --help for all keys."
