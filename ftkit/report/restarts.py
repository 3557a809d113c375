"""Restarts of a run: sessions that were lost or interrupted, and how the run went on after each."""

from dataclasses import dataclass


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
    """Steps done before and done again; of a session that was killed, as far as it had noted."""
    world_size: int
    """Ranks of this session."""
    world_size_before: int | None = None
    """Ranks of the session before; None: it had not come so far as to say."""
