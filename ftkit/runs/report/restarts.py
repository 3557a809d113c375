"""Restarts of a run: sessions that were lost or interrupted, and where the run went on after."""

from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class Resumed:
    """Where this session went on from."""

    from_step: int
    """Optimizer steps done before this session."""
    checkpoint: str
    """Its directory; relative to out_dir if it lies in there."""
    strategy: str
    """The strategy it was written under."""
    world_size: int
    """The ranks it was written by."""
    changes: list[str] = field(default_factory=list)
    """Fields of the recipe that are not as they were, one line each."""


@dataclass(frozen=True, kw_only=True)
class Restart:
    """A session that went on after one that had not done what was asked of it."""

    reason: str
    """Why the session before ended."""
    ended_at: str
    """When it ended, or was last heard of; ISO 8601, UTC."""
    started_at: str
    """When this session began; ISO 8601, UTC."""
    from_step: int
    """Optimizer steps that this session began with; 0: from the base model."""
    steps_lost: int = 0
    """Steps done before and done again; of a session that was killed, by the rows it left."""
    world_size: int
    """Ranks of this session."""
    world_size_before: int | None = None
    """Ranks of the session before; None: it had not come so far as to say."""
