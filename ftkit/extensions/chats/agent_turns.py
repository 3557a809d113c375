"""Turns of agents' traces as messages of chats: Anthropic's content blocks, and OpenAI's items.

Anthropic writes thoughts and calls as parts of what the assistant says, and results of tools as
parts of the next message of the user. OpenAI's Responses API and Agents SDK write each text,
thought, call and result as an item of its own. Both say what messages with `tool_calls`,
`reasoning_content` and the role tool say.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

from ftkit.data.records.keys import Refusal, is_empty
from ftkit.data.records.record import Misfit, Record
from ftkit.extensions.chats.marks import TRAIN_MARKS

_BLOCKS = ("thinking", "tool_use", "tool_result")
_TEXTS = ("input_text", "output_text", "summary_text", "reasoning_text")
"""Types of OpenAI's parts that are texts."""
_ITEMS = ("message", "reasoning", "function_call", "function_call_output")
_OF_ITEM = ("type", "id", "status")
"""Keys of an item that say nothing of its text."""


def as_messages(turns: Sequence[Any]) -> Iterator[tuple[int, Any]]:
    """Messages, each with the number of the turn that it begins with.

    Turns that are of no agent's trace stay as they are.

    Args:
        turns: as they were read.

    Raises:
        Misfit: a turn of a trace cannot be a message.
    """
    if not any(map(_is_of_trace, turns)):
        yield from enumerate(turns, 1)
        return
    said: tuple[int, Record] | None = None
    """What the assistant has said so far in items."""
    for number, turn in enumerate(turns, 1):
        kind = turn.get("type") if isinstance(turn, dict) else None
        part = _of_assistant(turn, kind, f", message {number}")
        if part is None:
            yield from _whole(said)
            said = None
            yield from ((number, message) for message in _with_blocks(turn, kind, number))
        elif said is None or not _goes_on(said[1], part):
            yield from _whole(said)
            said = (number, part)
        else:
            said = (said[0], _joined(said[1], part))
    yield from _whole(said)


def with_parameters(tool: Any) -> Any:
    """A tool whose schema stands where chat templates look for it.

    Anthropic calls it input_schema; OpenAI's Responses API has a type beside the function's keys.
    """
    if not isinstance(tool, dict) or "function" in tool:
        return tool
    if "input_schema" in tool and "parameters" not in tool:
        tool = {("parameters" if key == "input_schema" else key): tool[key] for key in tool}
    return {key: value for key, value in tool.items() if key != "type"}


def _is_of_trace(turn: Any) -> bool:
    if not isinstance(turn, dict):
        return False
    if turn.get("type") in _ITEMS and "from" not in turn:
        return True
    return _has_blocks(turn, (*_BLOCKS, *_TEXTS))


def _has_blocks(turn: Mapping[str, Any], kinds: Sequence[str] = _BLOCKS) -> bool:
    content = turn.get("content")
    return isinstance(content, list) and any(
        isinstance(part, dict) and part.get("type") in kinds for part in content
    )


def _of_assistant(turn: Any, kind: Any, where: str) -> Record | None:
    """An item of what the assistant says, as a message; None: the turn is something else."""
    if isinstance(turn, dict) and turn.get("role") == "assistant" and not _has_blocks(turn):
        kept = {key: turn[key] for key in turn if kind != "message" or key not in _OF_ITEM}
        return kept | ({"content": _as_texts(turn["content"])} if "content" in turn else {})
    if kind not in ("reasoning", "function_call"):
        return None
    if any(not is_empty(turn.get(key)) for key in TRAIN_MARKS):
        raise Refusal(
            f"{where} is a {kind} with a mark of training, but only messages have these.\n"
            "Give the mark to the message."
        )
    if kind == "reasoning":
        # The summary where the thought itself is not told.
        parts = turn.get("content") or turn.get("summary") or []
        texts = [part.get("text") for part in parts if isinstance(part, dict)]
        thought = "\n\n".join(text for text in texts if isinstance(text, str) and text)
        return {"role": "assistant", "reasoning_content": thought}
    function = {key: turn.get(key) for key in ("name", "arguments")}
    return {"role": "assistant", "tool_calls": [_call(turn.get("call_id"), function)]}


def _goes_on(said: Record, part: Record) -> bool:
    """Return whether an item belongs to the same message as those before it."""
    is_call = "tool_calls" in part and "content" not in part
    # A thought begins what it is about, and so does a text behind calls.
    return is_call or ("tool_calls" not in said and "content" not in said)


def _joined(said: Record, part: Record) -> Record:
    joined = said | part
    for key, between in (("tool_calls", []), ("reasoning_content", "\n\n")):
        if said.get(key) and part.get(key):
            joined[key] = said[key] + between + part[key]
    return joined


def _whole(said: tuple[int, Record] | None) -> Iterator[tuple[int, Record]]:
    """What the assistant has said in items; nothing, if its thought is all and is not told."""
    if said is None:
        return
    number, message = said
    if message.get("reasoning_content") == "":
        del message["reasoning_content"]
    if message.keys() != {"role"}:
        yield number, message


def _with_blocks(turn: Any, kind: Any, number: int) -> Iterator[Any]:
    """Messages of a turn, where the assistant has not said it."""
    if kind == "function_call_output":
        yield _result(turn.get("call_id"), turn.get("output"))
        return
    if kind is not None and kind not in _ITEMS and "role" not in turn:
        raise Misfit(
            f", message {number} is an item of the type {kind!r}, but ftkit only trains on "
            f"{', '.join(_ITEMS)}.\nRemove the item, or the record."
        )
    if not isinstance(turn, dict):
        yield turn
        return
    turn = {key: turn[key] for key in turn if kind != "message" or key not in _OF_ITEM}
    content = turn.get("content")
    if not isinstance(content, list):
        yield turn
    elif turn.get("role") == "assistant":
        yield _of_blocks(turn, content, number)
    else:
        yield from _results(turn, content)


def _of_blocks(turn: Record, content: Sequence[Any], number: int) -> Record:
    """What the assistant says in blocks, with its thoughts and calls at their own places."""
    thoughts, calls, texts = list[str](), list[Record](), list[Any]()
    for block in content:
        kind = block.get("type") if isinstance(block, dict) else None
        if kind == "thinking" and isinstance(block.get("thinking"), str):
            thoughts.append(block["thinking"])
        elif kind == "tool_use":
            function = {"name": block.get("name"), "arguments": block.get("input")}
            calls.append(_call(block.get("id"), function))
        elif calls:
            raise Misfit(
                f", message {number}: its content has a part behind a tool_use, but in chat "
                "templates calls end what is said.\nSplit the message, or remove the record."
            )
        else:
            texts.append(block)
    made = turn | {"content": _as_texts(texts)}
    if thoughts:
        made["thinking"] = "\n\n".join(thoughts)
    return made | ({"tool_calls": calls} if calls else {})


def _results(turn: Record, content: Sequence[Any]) -> Iterator[Record]:
    """What stands beside each other in a message: results of tools, and what the user says."""
    for is_result, blocks in groupby(content, _is_result):
        if is_result:
            for block in blocks:
                made = _result(block.get("tool_use_id"), block.get("content") or "")
                # Told as not used, where it is true: messages have no place for it.
                yield made | ({"is_error": True} if block.get("is_error") else {})
        else:
            yield turn | {"content": _as_texts(list(blocks))}


def _is_result(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") == "tool_result"


def _result(call_id: Any, said: Any) -> Record:
    named = {} if call_id is None else {"tool_call_id": call_id}
    return {"role": "tool", **named, "content": _as_texts(said)}


def _call(call_id: Any, function: Mapping[str, Any]) -> Record:
    made = {"type": "function", "function": dict(function)}
    return made if call_id is None else {"id": call_id, **made}


def _as_texts(content: Any) -> Any:
    """A content whose texts are of the type text; one alone, without marks, is a text itself."""
    if not isinstance(content, list):
        return content
    parts = [_text_part(part) for part in content]
    is_plain = all(isinstance(part, dict) and part.keys() == {"type", "text"} for part in parts)
    return _together(parts) if is_plain else parts


def _text_part(part: Any) -> Any:
    if not isinstance(part, dict) or part.get("type") not in (*_TEXTS, "text"):
        return part
    # Sources of a text and probabilities of its tokens are no part of it.
    kept = {key: part[key] for key in part if key not in ("annotations", "logprobs")}
    return kept | {"type": "text"}


def _together(parts: Iterable[Mapping[str, Any]]) -> Any:
    texts = [part["text"] for part in parts]
    return "".join(texts) if all(isinstance(text, str) for text in texts) else list(parts)
