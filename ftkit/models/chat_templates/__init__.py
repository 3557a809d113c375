"""Chat templates: how conversations become text, and which part of it is the assistant's."""

from typing import Literal

TrainOn = Literal["assistant", "last", "all", "messages"]
"""Tokens that carry loss: every turn of the assistant, only its last turn, all tokens, or every
message of the assistant, which is a turn with the header before it."""

Reasoning = Literal["split", "refuse"]
"""Handling of conversations whose later turns change how earlier ones are rendered."""

NO_TOOLS = "the template leaves out tools or tool calls"
"""Reason to skip one with tools: its answers would come from nowhere."""
