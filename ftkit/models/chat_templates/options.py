"""Options of learning from conversations: which tokens carry loss, and what is split."""

from typing import Literal

TrainOn = Literal["assistant", "last", "all"]
"""Which tokens carry loss: every turn of the assistant, the last one alone, or everything."""

Reasoning = Literal["split", "refuse"]
"""What becomes of a conversation whose later turns change how earlier ones are written."""
