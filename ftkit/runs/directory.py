"""The directory of a run: where each of its files lies.

    recipe.yaml  report.json  metrics.csv  validation.csv  system.csv  run.log
    final/              the result
    checkpoints/        what the run can go on from
    set_aside/1/        what a later session found in its way, as it lay here
    tensorboard/        what loggers write
    wandb/  mlflow/  trackio/
    .run/               only while the run is at work: its lock and its job
    .run/rank-0/        what a rank tells the supervisor

Whoever reads or writes one of them asks here for its path, so that the names stand nowhere else.
"""

from dataclasses import dataclass
from itertools import count, takewhile
from pathlib import Path

from ftkit.checkpoint.metadata import BASE, RECIPE
from ftkit.checkpoint.store import LATEST, Store
from ftkit.runs.report.report import FILE_NAME
from ftkit.utils.console.display import LOG_NAME

_CHECKPOINTS, _FINAL, _SET_ASIDE, _STATE = "checkpoints", "final", "set_aside", ".run"
_METRICS, _VALIDATION, _SYSTEM = "metrics.csv", "validation.csv", "system.csv"
_LOGGERS = ("tensorboard", "wandb", "mlflow", "trackio")
_CONTINUED = (RECIPE, FILE_NAME, _METRICS, _VALIDATION, _SYSTEM, LOG_NAME)


@dataclass(frozen=True)
class RankDirectory:
    """What one rank leaves for the supervisor, on a disk that both see."""

    run: "RunDirectory"
    """The run's."""
    rank: int
    """Global rank."""
    of_killed: bool = False
    """Whether it is a rank of a session that was killed, as the next one finds it."""

    @property
    def path(self) -> Path:
        """Receipts of saved shards lie here too; see `ftkit.checkpoint.saver`."""
        state = self.run.killed if self.of_killed else self.run.state
        return state / f"rank-{self.rank}"

    @property
    def report(self) -> Path:
        """The report as the rank last wrote it."""
        return self.path / FILE_NAME

    @property
    def metrics(self) -> Path:
        """Rows of a rank other than 0; those of rank 0 are the run's."""
        return self.path / _METRICS

    @property
    def validation(self) -> Path:
        """The same of its validations."""
        return self.path / _VALIDATION

    @property
    def output(self) -> Path:
        """What libraries print and log; of rank 0 it is in the run's log."""
        return self.run.log if self.rank == 0 else self.path / "output.log"

    @property
    def error(self) -> Path:
        """How the rank failed, if it did."""
        return self.path / "error.json"

    @property
    def completing(self) -> Path:
        """Of rank 0: there from its failure on until its report is complete."""
        return self.path / "completing"


@dataclass(frozen=True)
class RunDirectory:
    """Where everything of a run lies; nothing of it need exist."""

    path: Path
    """The run's out_dir."""

    @classmethod
    def of_checkpoint(cls, checkpoint: Path) -> "RunDirectory | None":
        """The directory that a checkpoint lies in; None: it lies alone."""
        inside = checkpoint.parent
        return cls(inside.parent) if inside.name == _CHECKPOINTS else None

    @property
    def recipe(self) -> Path:
        """What was asked."""
        return self.path / RECIPE

    @property
    def report(self) -> Path:
        """What was measured, once the run has ended."""
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

    @property
    def rows(self) -> tuple[Path, ...]:
        """What grows by a row: `metrics`, `validation` and `system`."""
        return self.metrics, self.validation, self.system

    @property
    def log(self) -> Path:
        """What was shown, and what libraries print on rank 0."""
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
        """Directory with a numbered one for each time."""
        return self.path / _SET_ASIDE

    @property
    def written(self) -> tuple[Path, ...]:
        """All that runs write here; anything else is not ours, and the backups stay."""
        names = (*_CONTINUED, _FINAL, _CHECKPOINTS, *_LOGGERS)
        return tuple(self.path / name for name in names)

    @property
    def continued(self) -> tuple[Path, ...]:
        """Files that a session writes anew or adds to."""
        return (*(self.path / name for name in _CONTINUED), self.store.directory / LATEST)

    @property
    def state(self) -> Path:
        """What supervisor and ranks tell each other; gone when the run has ended."""
        return self.path / _STATE

    @property
    def lock(self) -> Path:
        """Locked while the run is at work; says by whom."""
        return self.state / "lock"

    @property
    def job(self) -> Path:
        """What the ranks are to do."""
        return self.state / "job.json"

    @property
    def reserve(self) -> Path:
        """Space for last words on a full disk."""
        return self.state / "reserve"

    @property
    def notices(self) -> Path:
        """Lines for the report's warnings, of what no rank knows."""
        return self.state / "notices.txt"

    @property
    def base(self) -> Path:
        """What a full fine-tune that goes on needs of its base model but weights."""
        return self.state / BASE

    @property
    def replaced(self) -> Path:
        """What is overwritten, until that is certain."""
        return self.state / "replaced"

    @property
    def killed(self) -> Path:
        """What was here of a session that was killed with its supervisor."""
        return self.state / "killed"

    @property
    def job_of_killed(self) -> Path:
        """Its job."""
        return self.killed / self.job.name

    @property
    def lock_of_killed(self) -> Path:
        """What stood in its lock."""
        return self.killed / self.lock.name

    def rank_of_killed(self, rank: int) -> RankDirectory:
        """What one of its ranks has left."""
        return RankDirectory(self, rank, of_killed=True)

    @property
    def before(self) -> Path:
        """Copies of `continued` as they were, until it is certain that the run goes on."""
        return self.state / "before"

    def rank(self, rank: int) -> RankDirectory:
        """What a rank leaves."""
        return RankDirectory(self, rank)

    def ranks(self) -> list[RankDirectory]:
        """Those that are there, from rank 0 on."""
        return list(takewhile(lambda rank: rank.path.exists(), map(self.rank, count())))

    def is_run(self) -> bool:
        """Whether there is a run here."""
        return any(path.exists() for path in (self.report, self.recipe, self.state))
