"""The directory of a run: where each of its files lies.

    recipe.yaml  report.json  metrics.csv  validation.csv  system.csv  run.log
    plugin.py           of a run with --plugin
    final/              the result
    checkpoints/        what the run can resume from
    set_aside/1/        files that a later session moved out of its way
    tensorboard/        what loggers write
    wandb/  mlflow/  trackio/
    .run/               only while the run is running: its lock and its job
    .run/rank-0/        files of a rank for the supervisor

All readers and writers get the paths here, so that the names are nowhere else.
"""

from dataclasses import dataclass
from itertools import count, takewhile
from pathlib import Path

from ftkit.checkpoint.metadata import BASE, PLUGIN, RECIPE
from ftkit.checkpoint.store import LATEST, Store
from ftkit.recipe.loggers import LOGGERS
from ftkit.runs.report.report import FILE_NAME
from ftkit.utils.console.display import LOG_NAME

_CHECKPOINTS, _FINAL, _SET_ASIDE, _STATE = "checkpoints", "final", "set_aside", ".run"
_METRICS, _VALIDATION, _SYSTEM = "metrics.csv", "validation.csv", "system.csv"
# Each session rewrites recipe, plugin and report, and appends to the others.
_CONTINUED = (RECIPE, PLUGIN, FILE_NAME, _METRICS, _VALIDATION, _SYSTEM, LOG_NAME)


@dataclass(frozen=True)
class RankDirectory:
    """Files of one rank for the supervisor, on a disk that both see."""

    run: "RunDirectory"
    """Directory of the run."""
    rank: int
    """Global rank."""
    of_killed: bool = False
    """True for a rank of a killed session, whose files the next session reads."""

    @property
    def path(self) -> Path:
        """Directory of the rank, with receipts of saved shards; see `ftkit.checkpoint.saver`."""
        state = self.run.killed if self.of_killed else self.run.state
        return state / f"rank-{self.rank}"

    @property
    def report(self) -> Path:
        """The report as the rank last wrote it."""
        return self.path / FILE_NAME

    @property
    def metrics(self) -> Path:
        """Rows of a rank other than 0; those of rank 0 are in the run's `metrics`."""
        return self.path / _METRICS

    @property
    def validation(self) -> Path:
        """Validations of a rank other than 0; as for `metrics`."""
        return self.path / _VALIDATION

    @property
    def output(self) -> Path:
        """Output of libraries; for rank 0 the run's log."""
        return self.run.log if self.rank == 0 else self.path / "output.log"

    @property
    def error(self) -> Path:
        """Error that ended the rank, if one did."""
        return self.path / "error.json"

    @property
    def completing(self) -> Path:
        """For rank 0: exists from its failure until its report is complete."""
        return self.path / "completing"


@dataclass(frozen=True)
class RunDirectory:
    """Paths of all files of a run, whether they exist or not."""

    path: Path
    """The run's out_dir."""

    @classmethod
    def of_checkpoint(cls, checkpoint: Path) -> "RunDirectory | None":
        """The run that a checkpoint belongs to; None: it is in no run's directory."""
        # By name alone: a checkpoint that was copied elsewhere has no run around it.
        inside = checkpoint.parent
        return cls(inside.parent) if inside.name == _CHECKPOINTS else None

    @property
    def recipe(self) -> Path:
        """The recipe."""
        return self.path / RECIPE

    @property
    def plugin(self) -> Path:
        """The plugin, if it has one."""
        return self.path / PLUGIN

    @property
    def report(self) -> Path:
        """The report, once the run has ended."""
        return self.path / FILE_NAME

    @property
    def metrics(self) -> Path:
        """A row for each step."""
        return self.path / _METRICS

    @property
    def validation(self) -> Path:
        """A row for each validation."""
        return self.path / _VALIDATION

    @property
    def system(self) -> Path:
        """A row for each sample of host and devices."""
        return self.path / _SYSTEM

    def shown_path(self, path: Path) -> str:
        """A path, relative to this directory if it is inside."""
        path, own = path.absolute(), self.path.absolute()
        return str(path.relative_to(own) if path.is_relative_to(own) else path)

    @property
    def rows(self) -> tuple[Path, ...]:
        """Tables that grow by rows: `metrics`, `validation` and `system`."""
        return self.metrics, self.validation, self.system

    @property
    def log(self) -> Path:
        """Everything shown, and the output of libraries on rank 0."""
        return self.path / LOG_NAME

    @property
    def final(self) -> Path:
        """Directory of the result."""
        return self.path / _FINAL

    @property
    def store(self) -> Store:
        """The checkpoints."""
        return Store(self.path / _CHECKPOINTS)

    @property
    def backups(self) -> Path:
        """Directory of backups, with a numbered one for each time."""
        return self.path / _SET_ASIDE

    @property
    def written(self) -> tuple[Path, ...]:
        """All paths that runs write, except backups."""
        names = (*_CONTINUED, _FINAL, _CHECKPOINTS, *LOGGERS.names)
        return tuple(self.path / name for name in names)

    @property
    def continued(self) -> tuple[Path, ...]:
        """Files that a session creates or appends to."""
        return (*(self.path / name for name in _CONTINUED), self.store.directory / LATEST)

    @property
    def state(self) -> Path:
        """State shared by supervisor and ranks; deleted when the run has ended."""
        return self.path / _STATE

    @property
    def lock(self) -> Path:
        """Locked while the run is running; names the supervisor."""
        return self.state / "lock"

    @property
    def job(self) -> Path:
        """The job of the ranks."""
        return self.state / "job.json"

    @property
    def reserve(self) -> Path:
        """Space for the report on a full disk."""
        return self.state / "reserve"

    @property
    def notices(self) -> Path:
        """Warnings of the supervisor for the report, one per line."""
        return self.state / "notices.txt"

    @property
    def base(self) -> Path:
        """Files of the base model, without weights, of a full fine-tune that is continued."""
        return self.state / BASE

    @property
    def replaced(self) -> Path:
        """Files that are overwritten, until the run has started."""
        return self.state / "replaced"

    @property
    def killed(self) -> Path:
        """State of a session that was killed with its supervisor."""
        return self.state / "killed"

    @property
    def job_of_killed(self) -> Path:
        """Job of the killed session."""
        return self.killed / self.job.name

    @property
    def lock_of_killed(self) -> Path:
        """Lock of the killed session."""
        return self.killed / self.lock.name

    def rank_of_killed(self, rank: int) -> RankDirectory:
        """Files of a rank of the killed session."""
        return RankDirectory(self, rank, of_killed=True)

    @property
    def before(self) -> Path:
        """Copies of `continued` from before, until the run has started."""
        return self.state / "before"

    def rank(self, rank: int) -> RankDirectory:
        """Files of a rank."""
        return RankDirectory(self, rank)

    def ranks(self) -> list[RankDirectory]:
        """Ranks that have a directory, from rank 0 on."""
        return list(takewhile(lambda rank: rank.path.exists(), map(self.rank, count())))

    def is_run(self) -> bool:
        """Return whether there is a run here."""
        return any(path.exists() for path in (self.report, self.recipe, self.state))
