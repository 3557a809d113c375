"""SLURM's time limit: a run that it stopped goes back into the queue, to go on where it was."""

import os
import signal
import subprocess
from collections.abc import Sequence

from ftkit.errors import EXIT_BY_SIGNAL
from ftkit.utils.process import print_line
from ftkit.utils.progress import print_notice

NEAR_THE_LIMIT = signal.SIGUSR1
"""What `sbatch --signal=USR1@180` sends so many seconds before the end of a job's time."""
_PATIENCE_S = 60.0


def requeue_if_out_of_time(code: int, received: Sequence[signal.Signals]) -> None:
    """Have SLURM start the job again, if its time was up and the run is not through.

    Args:
        code: with which the run ended.
        received: the signals that it got.
    """
    job = _job_id()
    out_of_time = EXIT_BY_SIGNAL[NEAR_THE_LIMIT][0]
    if job is None or code != out_of_time or NEAR_THE_LIMIT not in received:
        return
    command = ["scontrol", "requeue", job]
    try:
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=_PATIENCE_S)
    except (OSError, subprocess.SubprocessError) as error:
        said = getattr(error, "stderr", None) or error
        print_line(f"ftkit: job {job} was not requeued ({' '.join(command)}: {str(said).strip()})")
    else:
        print_notice(f"job {job} was requeued")


def _job_id() -> str | None:
    """Of the SLURM job that this process belongs to, as scontrol takes it."""
    variables = os.environ
    if "SLURM_ARRAY_JOB_ID" in variables and "SLURM_ARRAY_TASK_ID" in variables:
        return f"{variables['SLURM_ARRAY_JOB_ID']}_{variables['SLURM_ARRAY_TASK_ID']}"
    return variables.get("SLURM_JOB_ID")
