"""Conversations: messages with tools and reasoning, in chat templates, learned turn by turn."""

MOVED = {
    "ftkit.data.chat_rendering": "rendering",
    "ftkit.data.records.conversations": "conversations",
    **{
        f"ftkit.models.chat_templates.{module}": module
        for module in ("continuation", "span_weights", "stops", "turns")
    },
}
