"""Launchers whose processes are ranks."""

from ftkit.runs.launchers import Launcher

_SUPERVISOR = "ftkit.extensions.hosts.torchrun"
ROWS = (
    Launcher("torchrun", "TORCHELASTIC_RUN_ID", "ftkit.extensions.hosts.elastic", _SUPERVISOR),
    # After torchrun, which may itself have been started in a job of SLURM.
    Launcher("srun", "SLURM_JOB_ID", "ftkit.extensions.hosts.slurm", _SUPERVISOR),
)
