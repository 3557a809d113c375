"""Conversations: messages and ShareGPT turns, with tools and tool calls, in one canonical form."""

import json
from collections.abc import Iterator
from typing import Any

from ftkit.records.keys import TRAIN_MARKS, Refusal, check_message_keys, is_empty, unused_of
from ftkit.records.record import Misfit, Record, check_json, check_text, keys_of, kind_of
from ftkit.records.train_marks import PART_TEXTS, part_text, train_marks

CONVERSATION_KEYS = ("messages", "conversations", "conversation")
"""Under which a record has its messages."""

_RULE = "A message is an object with role (system, user, assistant or tool) and content."
_ROLES = {
    **dict.fromkeys(("system", "developer", "user", "assistant", "tool")),
    **dict.fromkeys(("human", "prompter"), "user"),
    **dict.fromkeys(("gpt", "model", "bot", "chatgpt", "bing", "bard"), "assistant"),
    **dict.fromkeys(("observation", "function", "function_response", "ipython"), "tool"),
    "function_call": "assistant",
}
"""Roles by their names in data; None: its own."""
_OPENAI, _SHAREGPT = ("role", "content"), ("from", "value")
_THOUGHTS = ("reasoning_content", "thinking", "reasoning")
"""Where a message has what the assistant thinks before it answers."""
_OF_ALL = (
    *("tool_calls", "function_call", "tool_call_id", "name"),
    *(*_THOUGHTS, *TRAIN_MARKS, "train_detail"),
)
_OF_MESSAGES = {first: frozenset((first, said, *_OF_ALL)) for first, said in (_OPENAI, _SHAREGPT)}
"""Keys that are read of a message, by that of its sender."""
_OF_PARTS = frozenset(("type", *PART_TEXTS, *TRAIN_MARKS))


def conversation_record(row: dict[str, Any], key: str) -> Record:
    """A conversation with its tools.

    Args:
        row: what was read.
        key: where its messages are.

    Raises:
        Misfit: it is none.
    """
    return _conversation(_messages(row, key), row)


def prompted_conversation(row: dict[str, Any], *, answered: bool) -> Record:
    """The conversation of a prompt and a completion that are lists of messages.

    The assistant's turns of the prompt carry no loss, unless they say it themselves.

    Args:
        row: what was read.
        answered: whether it must have a completion.

    Raises:
        Misfit: it is none.
    """
    messages = _messages(row, "prompt")
    for message in messages:
        if message["role"] == "assistant":
            message.setdefault("train", False)
    if answered or "completion" in row:
        messages += _messages(row, "completion")
    return _conversation(messages, row)


def conversation_of(record: Record, *, keeps_input: bool = False) -> Record:
    """An instruction record as a conversation: its history, its question and, if any, its answer.

    Args:
        record: in canonical form.
        keeps_input: whether the input stays apart, for templates that have a place for it; else it
            stands below the instruction.
    """
    messages: list[Record] = []
    if system := record.get("sys_prompt"):
        messages.append({"role": "system", "content": system})
    for question, answer in record.get("history", ()):
        messages.append({"role": "user", "content": question})
        messages.append({"role": "assistant", "content": answer})
    given = record.get("input", "")
    if given and keeps_input:
        messages.append({"role": "user", "content": record["instruction"], "input": given})
    else:
        parts = (record["instruction"], given)
        messages.append({"role": "user", "content": "\n\n".join(part for part in parts if part)})
    if "output" in record:
        messages.append({"role": "assistant", "content": record["output"]})
    return {"messages": messages}


def unused_in(turns: Any, key: str) -> Iterator[str]:
    """The keys of messages and of their parts that have a value but no use, as KEY.NAME.

    Args:
        turns: messages, as they were read.
        key: where they stand.
    """
    for turn in turns if isinstance(turns, list) else ():
        sender, said = _keys_of_message(turn)
        yield from unused_of((turn,), _OF_MESSAGES[sender], key)
        if isinstance(parts := turn.get(said), list):
            yield from unused_of(parts, _OF_PARTS, f"{key}.{said}")


def _conversation(messages: list[Record], row: dict[str, Any]) -> Record:
    """Messages with the system prompt and the tools that stand beside them."""
    system = row.get("system")
    if system and not (messages and messages[0]["role"] == "system"):
        messages.insert(0, {"role": "system", "content": _content(system, ", system", False)})
    return _with_tools({"messages": messages}, row)


def _keys_of_message(turn: dict[str, Any]) -> tuple[str, str]:
    """The keys under which a message has its sender and what it says."""
    return _SHAREGPT if "from" in turn and "role" not in turn else _OPENAI


def _messages(row: dict[str, Any], key: str) -> list[Record]:
    turns = row.get(key)
    if key not in row:
        raise Misfit(f" has no {key}; its keys: {keys_of(row)}. {_RULE}\nAdd {key}.")
    if not isinstance(turns, list):
        raise Misfit(
            f": {key} is {kind_of(turns)}, but has to be a list of messages. {_RULE}\n"
            "Correct or remove the record."
        )
    return [_message(turn, f", message {n}") for n, turn in enumerate(turns, 1)]


def _message(turn: Any, where: str) -> Record:
    if not isinstance(turn, dict):
        raise Misfit(f"{where} is {kind_of(turn)}. {_RULE}\nCorrect or remove the record.")
    sender, said = _keys_of_message(turn)
    name = turn.get(sender)
    if not isinstance(name, str) or name not in _ROLES:
        if sender not in turn:
            raise Misfit(f"{where} has no {sender}; its keys: {keys_of(turn)}. {_RULE}\nAdd it.")
        raise Misfit(
            f"{where}: {sender} is {name!r}, but has to be one of {', '.join(_ROLES)}.\n"
            "Correct it, or remove the record."
        )
    role = _ROLES[name] or name
    value = turn.get(said)
    calls = _tool_calls(turn.get("tool_calls") or turn.get("function_call"), where)
    if name == "function_call":
        calls, value = _tool_calls(_parsed(value, said, where), where), None
    message: Record = {"role": role, "content": _content(value, where, bool(calls), said)}
    if calls:
        if role != "assistant":
            raise Misfit(
                f"{where}: role is {name!r}, but only the assistant has tool_calls.\n"
                "Correct or remove the record."
            )
        message["tool_calls"] = calls
    if len(turn) > len(_OPENAI) or isinstance(value, list):
        check_message_keys(turn, role, where)
        message |= _extras(turn, where)
        message |= train_marks(turn, role, message["content"], value, where)
    return message


def _extras(turn: dict[str, Any], where: str) -> Record:
    """What a message has beside role, content, tool calls and marks of training."""
    extras: Record = {}
    for key in ("tool_call_id", "name", *_THOUGHTS):
        if (text := turn.get(key)) is not None:
            if key in _THOUGHTS[1:] and is_empty(text):
                continue
            if not isinstance(text, str):
                raise Misfit(f"{where}: {key} is {kind_of(text)}.\nMake {key} a text.")
            check_text(text, key, where)
            extras[key] = text
    thoughts = {key: extras[key] for key in _THOUGHTS if extras.get(key)}
    if len({*thoughts.values()}) > 1:
        names = " and ".join(thoughts)
        raise Refusal(
            f"{where} has {names}, which differ, but an answer follows one thought.\nKeep one of "
            "them."
        )
    if thoughts:
        # Templates look for it here; those that look elsewhere find it under its own name too.
        extras["reasoning_content"] = next(iter(thoughts.values()))
    return extras


def _content(value: Any, where: str, may_lack: bool, key: str = "content") -> str:
    """The text of a message; of parts, they are joined."""
    if isinstance(value, str):
        check_text(value, key, where)
        return value
    if value is None and may_lack:
        return ""
    if isinstance(value, list):
        return "".join(_part(part, where) for part in value)
    raise Misfit(
        f"{where}: {key} is {kind_of(value)}, but has to be a text or a list of text parts.\n"
        f"Make {key} a text, or remove the record."
    )


def _part(part: Any, where: str) -> str:
    kind = part.get("type") if isinstance(part, dict) else kind_of(part)
    text = part_text(part) if kind == "text" else None
    if text is None:
        raise Misfit(
            f"{where}: its content has a part that is {kind!r}, but ftkit trains on parts of "
            'texts alone: {"type": "text", "text": ...}.\nRemove the part, or the record.'
        )
    return _content(text, where, False)


def _tool_calls(value: Any, where: str) -> list[Record]:
    """Calls as OpenAI writes them, with their arguments as an object."""
    if value is None:
        return []
    calls = [value] if isinstance(value, dict) else value
    if not isinstance(calls, list):
        raise Misfit(
            f"{where}: tool_calls is {kind_of(value)}, but has to be a list of calls.\n"
            "Correct or remove the record."
        )
    return [_tool_call(call, where) for call in calls]


def _tool_call(call: Any, where: str) -> Record:
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise Misfit(
            f"{where}: a tool call has no name. A tool call is "
            '{"type": "function", "function": {"name": ..., "arguments": {...}}}.\n'
            "Correct or remove the record."
        )
    arguments = _parsed(function.get("arguments") or {}, "arguments", where)
    if not isinstance(arguments, dict):
        raise Misfit(
            f"{where}: the arguments of {function['name']} are {kind_of(arguments)}.\n"
            "Make them an object, or JSON text of one."
        )
    check_json(function, "tool_calls", where)
    made: Record = {"type": "function", "function": {"name": function["name"]}}
    made["function"]["arguments"] = arguments
    return {"id": call["id"], **made} if isinstance(call.get("id"), str) else made


def _with_tools(record: Record, row: dict[str, Any]) -> Record:
    """The record with the tools of its row: a list of functions, or JSON text of one."""
    tools = _parsed(row.get("tools") or row.get("functions") or [], "tools", "")
    if not isinstance(tools, list):
        raise Misfit(f": tools is {kind_of(tools)}.\nMake it a list of functions, or remove it.")
    if not tools:
        return record
    record["tools"] = [_tool(tool) for tool in tools]
    check_json(tools, "tools")
    return record


def _tool(tool: Any) -> Record:
    function = tool.get("function", tool) if isinstance(tool, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise Misfit(
            ": one of its tools has no name. A tool is "
            '{"type": "function", "function": {"name": ..., "parameters": {...}}}.\n'
            "Correct or remove the record."
        )
    return tool if "function" in tool else {"type": "function", "function": tool}


def _parsed(value: Any, key: str, where: str) -> Any:
    """What JSON text stands for; anything else as it is."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        raise Misfit(
            f"{where}: {key} is a text that is not valid JSON.\nCorrect or remove the record."
        ) from None
