"""File names in the directory of a run."""

from pathlib import Path

from ftkit.console.display import LOG_NAME

RESERVE = "reserve"
"""File beside the job: space for last words on a full disk."""

BASE = "base"
"""What a full fine-tune needs of its base model but weights, in a checkpoint or beside the job."""

STATE = ".run"
"""Directory inside out_dir with what the ranks and the supervisor tell each other."""

ERROR = "error.json"
"""File in a rank's directory that says how the rank failed, if it did."""
OUTPUT = "output.log"
"""File there with what libraries print on ranks other than 0; rank 0 has the run's log."""

COMPLETING = "completing"
"""File in rank 0's directory from its failure on until its report is complete."""


def rank_directory(state: Path, rank: int) -> Path:
    """Where a rank leaves its report and its error."""
    return state / f"rank-{rank}"


def output_log(out_dir: Path, rank: int) -> Path:
    """Where what libraries print and log on a rank goes."""
    return out_dir / LOG_NAME if rank == 0 else rank_directory(out_dir / STATE, rank) / OUTPUT


CHECKPOINTS = "checkpoints"
"""Directory of a run's checkpoints."""
FINAL = "final"
"""Directory of a run's result."""
RECIPE = "recipe.yaml"
