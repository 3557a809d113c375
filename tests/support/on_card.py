"""Runs of the whole command on simulated cards, in forks of a process that has imported all."""

import hashlib
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from command import command_environment
from preloaded import SUPERVISOR, Attempt, Preloaded
from rank_jobs import Outcome
from runs import options
from simulated_card.counts import Counts
from simulated_card.machine import cards, with_cards
from simulated_card.settings import Shortage

from ftkit.runs.report.report import read_report

CARDS = ("h100", "h100")
RECIPE = {
    "precision": "32-true",
    "data": "JSON",
    "data__mask_prompt": True,
    "data__val_split_fraction": 0.2,
    "data__num_workers": 0,
    "train__global_batch_size": 11,
    "train__micro_batch_size": 4,
    "train__max_steps": 4,
    "train__lr_warmup_steps": 2,
    "train__max_norm": 0.4,
    "train__max_seq_length": 200,
    "eval__interval": 0,
    "eval__initial_validation": False,
    "eval__max_new_tokens": 0,
    "eval__exact_match": 0,
    "optimizer__lr": 3e-3,
}
"""What a wrong loss, clipping or schedule would show in; three micro-steps on one card."""
LORA = ("lora_key", "lora_projection", "lora_mlp", "lora_head")
HARDWARE = (
    *("--devices", "--strategy", "--accelerator", "--memory."),
    *("--train.micro_batch_size", "--train.optimizer_in_backward"),
)
"""Starts of options that change no number."""


class OnCard:
    """Runs commands on a machine with cards; one that was run before is not run again."""

    def __init__(self, server: Preloaded, directory: Path, common: list[str]) -> None:
        self.server, self._directory, self._common = server, directory, common
        self._ended: dict[str, Attempt] = {}

    def words(self, command: str, *words: str) -> list[str]:
        """A command line that trains."""
        lora = dict.fromkeys(LORA, True) | {"lora_dropout": 0.1}
        more = options(**lora) if command == "finetune" else []
        return [command, *self._common, *more, *words]

    def run(
        self,
        command: str,
        *words: str,
        ranks: int = 1,
        shortage: Shortage | None = None,
        follows_memory: bool = False,
        faults: tuple[str, ...] = (),
    ) -> tuple[Attempt, Path]:
        """Train; how it ended, and its directory, where `counts` finds what was counted.

        Args:
            command: finetune or finetune_full.
            *words: options beside those of all runs.
            ranks: processes that train.
            shortage: memory that runs out.
            follows_memory: whether the memory of some steps is measured.
            faults: functions of faults.py to call in each rank.
        """
        key = f"{command} {' '.join(words)} {shortage} {follows_memory} {faults}"
        out = self._directory / hashlib.sha256(key.encode()).hexdigest()[:12]
        if key not in self._ended:
            counted = out.with_suffix(".counts")
            counted.mkdir()
            failing = None if shortage is None else asdict(shortage)
            happens = ["on_card", str(counted), failing, follows_memory, *faults]
            everywhere: dict[int, list[object]] = dict.fromkeys(range(ranks), happens)
            if shortage is not None:
                everywhere[SUPERVISOR] = ["no_advice"]
            line = [*self.words(command, *words), "--out_dir", out]
            self._ended[key] = self.server.run(*line, faults=everywhere)
        return self._ended[key], out

    def completed(self, command: str, *words: str, **how: Any) -> Outcome:
        """Run directory of a run that completes; `how` as for `run`."""
        attempt, out = self.run(command, *words, **how)
        assert attempt.code == 0, attempt.output
        assert read_report(out).outcome in ("completed", "stopped")
        return Outcome(out)

    def on_cpu(self, command: str, *words: str, precision: str | None = None) -> Outcome:
        """Run directory of the same recipe on one CPU."""
        kept: list[str] = []
        for name, value in zip(words[::2], words[1::2], strict=True):
            if not name.startswith(HARDWARE):
                kept += [name, value]
        if precision is not None:
            kept += ["--precision", precision]
        return self.completed(command, *kept, "--accelerator", "cpu", "--devices", "1")

    def counts(self, out: Path, rank: int = 0) -> Counts:
        return Counts.read(out.with_suffix(".counts"), rank)


def environment() -> dict[str, str]:
    """Environment of processes on a machine with two cards."""
    return with_cards(command_environment(), cards(*CARDS))


def on_card(
    server: Preloaded,
    directory: Path,
    base: Path,
    data: Path,
    changes: Mapping[str, object] | None = None,
) -> OnCard:
    """Runs commands on a machine with two cards.

    Args:
        server: with these cards.
        directory: for runs.
        base: the base model.
        data: the records.
        changes: of RECIPE.
    """
    common = options(checkpoint_dir=base, data__json_path=data, **RECIPE | dict(changes or {}))
    return OnCard(server, directory, common)
