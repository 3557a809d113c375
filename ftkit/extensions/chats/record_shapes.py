"""The shape of conversations."""

from ftkit.data.records.keys import ARGUMENT_KEYS, CONVERSATION_KEYS, MEDIA
from ftkit.data.records.shape_rows import CONVERSATION, SET_TRAIN_ON, ShapeRow

ROWS = (
    ShapeRow(
        name=CONVERSATION,
        noun="conversation",
        holds=("messages", "conversations (ShareGPT)"),
        rule="A message is an object with role (system, user, assistant or tool) and content.",
        keys=CONVERSATION_KEYS,
        precedence=(4, 4),
        columns=("messages", "tools", "system"),
        inside=(
            *("role", "content"),
            *("system_role", "user_role", "assistant_role", "tool_role"),
        ),
        uses=frozenset((*ARGUMENT_KEYS, *MEDIA, "history", "tools")),
        form_place="ftkit.extensions.chats.conversations:conversation_form",
        prompted_place="ftkit.extensions.chats.conversations:prompted_form",
        renderer_place="ftkit.extensions.chats.rendering:ChatRenderer",
        inside_place="ftkit.extensions.chats.turn_names:with_our_names",
        adapt_place="ftkit.extensions.chats.conversations:as_rendered",
        ends_place="ftkit.extensions.chats.rendering:ends_of_turns",
        advice_place="ftkit.extensions.chats.advice:advice",
        train_on="assistant",
        has_template=True,
        prompts=0,
        refused={
            "prompt_style": "Set chat_template instead, and remove {key}",
            "mask_prompt": SET_TRAIN_ON,
        },
    ),
)
