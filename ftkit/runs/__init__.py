"""Run directories: their files, lock, checkpoints and state, and how a run resumes; no torch."""
