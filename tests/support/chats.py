"""A tiny tokenizer with the tokens of many chat formats, conversations, and how they are marked."""

import itertools
import json
import random
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Processor
from tokenizers import decoders, models, pre_tokenizers, trainers

from ftkit.data.rendering import Rendered
from ftkit.models.pretrained.tokenizer import Tokenizer

SPECIAL = [
    "<s>",
    "</s>",
    *("<|im_start|>", "<|im_end|>", "<|im_sep|>"),
    *("<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>"),
    *("<start_of_turn>", "<end_of_turn>"),
    *("<|system|>", "<|user|>", "<|assistant|>", "<|end|>", "<|endoftext|>"),
    *("<｜User｜>", "<｜Assistant｜>", "<｜end▁of▁sentence｜>"),
    *("[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]"),
    *("[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]"),
    *("<|START_OF_TURN_TOKEN|>", "<|END_OF_TURN_TOKEN|>"),
    *("<|SYSTEM_TOKEN|>", "<|USER_TOKEN|>", "<|CHATBOT_TOKEN|>"),
]
SETTINGS = {"bos_token": "<s>", "eos_token": "</s>"}


def write_chat_tokenizer(directory: Path, **settings: Any) -> Path:
    """A byte-level tokenizer; settings go to tokenizer_config.json."""
    processor = Processor(models.BPE())
    processor.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    processor.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=len(SPECIAL) + 330,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    processor.train_from_iterator(["the answer to a question of the user"] * 5, trainer)
    directory.mkdir(exist_ok=True)
    processor.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps(SETTINGS | settings))
    return directory


def said(role: str, content: str, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


def call(**arguments: Any) -> dict[str, Any]:
    function = {"name": "weather", "arguments": arguments}
    return {"id": "call00001", "type": "function", "function": function}


TOOL = {
    "type": "function",
    "function": {"name": "weather", "description": "of a <place>", "parameters": {}},
}
TURNS = {
    "messages": [
        said("system", "Be brief."),
        said("user", "Hi"),
        said("assistant", "Hello."),
        said("user", "Bye"),
        said("assistant", "So long 👋"),
    ]
}
TOOLS = {
    "messages": [
        said("user", "Bonn?"),
        said("assistant", "", tool_calls=[call(at="Bonn")]),
        said("tool", "sun", name="weather", tool_call_id="call00001"),
        said("assistant", "Sunny."),
    ],
    "tools": [TOOL],
}
THINKING = {
    "messages": [
        said("user", "1+1?"),
        said("assistant", "2", reasoning_content="one more"),
        said("user", "2+1?"),
        said("assistant", "3", reasoning_content="again"),
    ]
}
CONVERSATIONS = {"turns": TURNS, "tools": TOOLS, "thinking": THINKING}


def marked(sample: Rendered, tokenizer: Tokenizer) -> str:
    """The text of a sample, with brackets around what carries loss."""
    edges = [0, *(edge for span in sample.trained for edge in span), len(sample.ids)]
    parts = [
        tokenizer.processor.decode(sample.ids[first:end], skip_special_tokens=False)
        for first, end in itertools.pairwise(edges)
    ]
    return "".join(f"⟦{part}⟧" if i % 2 else part for i, part in enumerate(parts))


def random_conversation(seed: int) -> dict[str, Any]:
    """A conversation of several turns: any texts, repeated ones, sometimes tools and reasoning."""
    drawn = random.Random(seed)
    words = ["the", " answer", "\n", "  ", "é", "早", "👍🏽", "assistant", "{x}", "<b>", "'", "0"]

    def text() -> str:
        return "a" + "".join(drawn.choice(words) for _ in range(drawn.randint(0, 8)))

    messages = [said("system", text())] * drawn.randint(0, 1)
    with_tools = drawn.random() < 0.3
    for _ in range(drawn.randint(1, 4)):
        messages.append(said("user", text()))
        if with_tools and drawn.random() < 0.5:
            messages.append(said("assistant", "", tool_calls=[call(at=text())]))
            messages.append(said("tool", text(), name="weather", tool_call_id="call00001"))
        more = {"reasoning_content": text()} if drawn.random() < 0.2 else {}
        messages.append(said("assistant", text(), **more))
    if drawn.random() < 0.2:
        messages.append(said("user", text()))
    return {"messages": messages, **({"tools": [TOOL]} if with_tools else {})}
