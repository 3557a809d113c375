"""Runs that have ended, for tests of what can be done with their results; trained once."""

import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest
from rank_jobs import Case, Outcome, make_run

from ftkit.runs.report.report import Report

CASES = {
    "lora": Case("single", "lora"),
    "qlora": Case("single", "lora", changes=(("quantize", "bnb.nf4-dq"),)),
    "dora": Case(
        "single",
        "lora",
        changes=(("lora_variant", "dora"), ("lora_modules_to_save", ("embed_tokens",))),
    ),
    "pissa": Case("single", "lora", changes=(("lora_init", "pissa"), ("quantize", "bnb.nf4"))),
    "full": Case("single", "full", changes=(("eval.sets.further", "BESIDE/many.json"),)),
    "tied": Case("single", "full", tied=True),
    "mixed": Case("single", "lora", "bf16-mixed"),
    "bf16": Case("single", "full", "bf16-true"),
}


@dataclass(frozen=True)
class Ended:
    """A run as its supervisor leaves it."""

    out_dir: Path
    report: Report

    @property
    def final(self) -> Path:
        return self.out_dir / "final"

    @property
    def checkpoint(self) -> Path:
        """The newest."""
        return Outcome(self.out_dir).checkpoint

    @property
    def validation_loss(self) -> float:
        assert self.report.loss is not None and self.report.loss.validation_last is not None
        return self.report.loss.validation_last


def train_all(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Ended]:
    """A run of each of `CASES`, by its name."""
    from ftkit.extensions.publish.model_card import write_card

    outcomes = make_run(tmp_path_factory)(1, list(CASES.values()))
    ended = {}
    for name, case in CASES.items():
        outcome = outcomes[case]
        outcome.complete()
        base = Path(outcome.report.recipe["checkpoint_dir"])
        write_card(outcome.report, base, outcome.out_dir / "final")
        ended[name] = Ended(outcome.out_dir, outcome.report)
        shutil.rmtree(outcome.out_dir / ".run")
    return ended
