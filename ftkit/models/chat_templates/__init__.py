"""Chat templates: how conversations become text, and which part of it is the assistant's."""
