"""Conversations: messages and ShareGPT turns, with tools and tool calls, in one canonical form."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from ftkit.data.records.forms import Form
from ftkit.data.records.keys import CONVERSATION_KEYS, Refusal, is_empty
from ftkit.data.records.media import MEDIA, PLACES, is_column, moved_places
from ftkit.data.records.record import Misfit, Record, check_json, check_text, keys_of, kind_of
from ftkit.data.records.shape_rows import CONVERSATION
from ftkit.extensions.chats.agent_turns import as_messages, with_parameters
from ftkit.extensions.chats.marks import (
    TRAIN_MARKS,
    arguments_of,
    check_beside_messages,
    check_message_keys,
    mark_of,
    unused_of,
)
from ftkit.extensions.chats.media import MediaOfRow, keys_of_part
from ftkit.extensions.chats.record_shapes import ROWS
from ftkit.models.chat_templates.arguments import ARGUMENTS
from ftkit.utils.names import nearest

_RULE = ROWS[0].rule
_ROLES = {
    **dict.fromkeys(("system", "developer", "user", "assistant", "tool")),
    **dict.fromkeys(("human", "prompter"), "user"),
    **dict.fromkeys(("gpt", "model", "bot", "chatgpt", "bing", "bard"), "assistant"),
    **dict.fromkeys(("observation", "function", "function_response", "ipython"), "tool"),
    "tool_response": "tool",
    **dict.fromkeys(("function_call", "tool_call"), "assistant"),
}
"""Canonical role by its name in data; None: the name itself."""
_CALLING = ("function_call", "tool_call")
"""Roles of turns whose text is the JSON of a call, or of a list of them."""
_OPENAI, _SHAREGPT = ("role", "content"), ("from", "value")
_THOUGHTS = ("reasoning_content", "thinking", "reasoning")
"""Keys of a message that hold the reasoning before an answer."""
_EXTRAS = ("tool_call_id", "name", *_THOUGHTS)
_OF_ALL = (
    *("tool_calls", "function_call", "tool_call_id", "name"),
    *(*_THOUGHTS, *TRAIN_MARKS, "train_detail"),
)
_OF_MESSAGES = {first: frozenset((first, said, *_OF_ALL)) for first, said in (_OPENAI, _SHAREGPT)}
"""Keys that are read of a message, by that of its sender."""
_PART_TEXTS = ("text", "content", "value")
"""Keys of a content part that hold its text."""
_DETAIL = '{"begin_offset": 0, "end_offset": 4, "train": false}, where both characters belong to it'
_WeightedSpan = list[Any]
"""First character, end, and weight."""
_OF_PARTS = frozenset(("type", *_PART_TEXTS, *TRAIN_MARKS))


def conversation_form(row: dict[str, Any], columns: Mapping[str, str], *, answered: bool) -> Form:
    """The form of conversations like a row: messages of OpenAI's kind, or ShareGPT."""
    key = next((key for key in CONVERSATION_KEYS if key in row), CONVERSATION_KEYS[0])
    turns = row.get(key)
    first = turns[0] if isinstance(turns, list) and turns else None
    # By the turns, not by the key: either form stands under either name.
    is_sharegpt = isinstance(first, dict) and "from" in first and "role" not in first
    return _form(
        "ShareGPT" if is_sharegpt else columns.get(key, key),
        (key,),
        partial(conversation_record, key=key),
    )


def prompted_form(row: dict[str, Any], columns: Mapping[str, str], *, answered: bool) -> Form:
    """The form of conversations like a row: a prompt and a completion that are lists."""
    keys = ("prompt", "completion")
    return _form(
        ", ".join(columns.get(key, key) for key in keys),
        keys,
        partial(prompted_conversation, answered=answered),
    )


def _form(said: str, keys: tuple[str, ...], convert: Callable[[dict[str, Any]], Record]) -> Form:
    """The form of rows with messages under some keys."""
    return Form(
        shape=CONVERSATION,
        keys=said,
        convert=convert,
        used=frozenset((*keys, "tools", "functions", "system", ARGUMENTS)),
        keeps=_keeps,
        unused_inside=partial(_unused_inside, keys),
    )


def _keeps(key: str, item: Any, record: Record) -> bool:
    return key in record.get(ARGUMENTS, {}) or is_column(key, record)


def _unused_inside(
    keys: Sequence[str], row: Mapping[str, Any], columns: Mapping[str, str]
) -> Iterator[str]:
    for key in keys:
        yield from unused_in(row.get(key), columns.get(key, key))


def conversation_record(row: dict[str, Any], key: str) -> Record:
    """Convert a row with messages to a conversation with tools.

    Args:
        row: what was read.
        key: where its messages are.

    Raises:
        Misfit: it is not a list of turns.
    """
    check_beside_messages(row)
    media = MediaOfRow(row)
    return _conversation(_messages(row, key, media), row, media)


def prompted_conversation(row: dict[str, Any], *, answered: bool) -> Record:
    """The conversation of a prompt and a completion that are lists of messages.

    The assistant's turns of the prompt carry no loss, unless they say it themselves.

    Args:
        row: what was read.
        answered: whether it must have a completion.

    Raises:
        Misfit: it is not a list of turns.
    """
    check_beside_messages(row)
    media = MediaOfRow(row)
    messages = _messages(row, "prompt", media)
    for message in messages:
        if message["role"] == "assistant":
            # The prompt is context: its earlier answers came from elsewhere.
            message.setdefault("train", False)
    if answered or "completion" in row:
        messages += _messages(row, "completion", media)
    return _conversation(messages, row, media)


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
    kept = {key: record[key] for key in ("weight", "target", MEDIA) if key in record}
    return {"messages": messages} | kept


def as_rendered(record: Record, *, keeps_input: bool, drop_system: bool) -> Record:
    """Return a conversation, or an instruction record as one, as it is rendered.

    Args:
        record: in canonical form.
        keeps_input: as `conversation_of`.
        drop_system: whether a system message at its beginning is left out.
    """
    made = record if "messages" in record else conversation_of(record, keeps_input=keeps_input)
    messages = made["messages"]
    if drop_system and len(messages) > 1 and messages[0]["role"] == "system":
        return _without_first(made)
    return made


def _without_first(record: Record) -> Record:
    """A conversation without its first message and the media of that."""
    first, *others = record["messages"]
    count = len(PLACES.findall(first["content"]))
    if not count:
        return record | {"messages": others}
    messages = [one | {"content": moved_places(one["content"], -count)} for one in others]
    return record | {"messages": messages, MEDIA: record[MEDIA][count:]}


def role_of(turn: Any) -> str | None:
    """Canonical role of a message as it was read; None: it has no known one."""
    name = turn.get(_keys_of_message(turn)[0]) if isinstance(turn, dict) else None
    return (_ROLES[name] or name) if isinstance(name, str) and name in _ROLES else None


def text_of(turn: Any) -> str:
    """What a message as it was read says, as one text; empty if that is not a text."""
    said = turn.get(_keys_of_message(turn)[1]) if isinstance(turn, dict) else None
    if isinstance(said, list):
        return "".join(_part_text(part) or "" for part in said if isinstance(part, dict))
    return said if isinstance(said, str) else ""


def unused_in(turns: Any, key: str) -> Iterator[str]:
    """The keys of messages and of their parts that have a value but no use, as KEY.NAME.

    Args:
        turns: messages, as they were read.
        key: where they stand.
    """
    for _, turn in as_messages(turns if isinstance(turns, list) else ()):
        sender, said = _keys_of_message(turn)
        if not turn.keys() <= _OF_MESSAGES[sender]:
            yield from unused_of((turn,), _OF_MESSAGES[sender], key)
        if isinstance(parts := turn.get(said), list):
            for part in parts:
                yield from unused_of((part,), _OF_PARTS | keys_of_part(part), f"{key}.{said}")


def _conversation(messages: list[Record], row: dict[str, Any], media: MediaOfRow) -> Record:
    """Messages with what stands beside them: system prompt, tools, arguments of the template."""
    system = row.get("system")
    # Of two system prompts the one inside the messages counts.
    if system and not (messages and messages[0]["role"] == "system"):
        messages.insert(0, {"role": "system", "content": _content(system, ", system", False)})
    record = media.added_to(_with_tools({"messages": messages}, row))
    arguments = arguments_of(row)
    return record | {ARGUMENTS: arguments} if arguments else record


def _keys_of_message(turn: dict[str, Any]) -> tuple[str, str]:
    """The keys under which a message has its sender and what it says."""
    # ShareGPT has from and value, OpenAI role and content; a turn with all four is read as
    # OpenAI's.
    return _SHAREGPT if "from" in turn and "role" not in turn else _OPENAI


def _messages(row: dict[str, Any], key: str, media: MediaOfRow) -> list[Record]:
    turns = row.get(key)
    if key not in row:
        raise Misfit(f" has no {key}; its keys: {keys_of(row)}. {_RULE}\nAdd {key}.")
    if not isinstance(turns, list):
        advice = "Correct or remove the record."
        if isinstance(turns, str):
            advice = f"Correct or remove the record; in a cell of a table, write {key} as JSON."
        raise Misfit(
            f": {key} is {kind_of(turns)}, but has to be a list of messages. {_RULE}\n{advice}"
        )
    messages: list[Record] = []
    may_join = False
    for number, turn in as_messages(turns):
        message = _message(turn, f", message {number}", media)
        is_call = turn.get("role") == "tool_call"
        # ms-swift writes calls at one time as turns behind each other.
        if is_call and may_join and message.keys() == messages[-1].keys():
            messages[-1]["tool_calls"] += message["tool_calls"]
        else:
            messages.append(message)
        may_join = is_call
    return messages


def _message(turn: Any, where: str, media: MediaOfRow) -> Record:
    if not isinstance(turn, dict):
        raise Misfit(f"{where} is {kind_of(turn)}. {_RULE}\nCorrect or remove the record.")
    sender, said = _keys_of_message(turn)
    name = turn.get(sender)
    if not isinstance(name, str) or name not in _ROLES:
        if sender not in turn:
            meant = nearest(sender, map(str, turn.keys() - {said}))
            advice = f"Rename {meant} to {sender}." if meant else "Add it."
            raise Misfit(f"{where} has no {sender}; its keys: {keys_of(turn)}. {_RULE}\n{advice}")
        raise Misfit(
            f"{where}: {sender} is {name!r}, but has to be one of {', '.join(_ROLES)}.\n"
            "Correct it, name a role (--data.columns.assistant_role NAME), or remove the record."
        )
    # None: the name is already canonical.
    role = _ROLES[name] or name
    value = turn.get(said)
    calls = _tool_calls(turn.get("tool_calls") or turn.get("function_call"), where)
    # ShareGPT writes calls as a turn of their own, whose value is their JSON.
    if name in _CALLING:
        calls, value = _tool_calls(_parsed(value, said, where), where), None
    if isinstance(value, list):
        value = media.as_texts(value, where)
        value, thought, others = _sorted_parts(value, where)
        calls = calls + others
        # Beside another thought of the message, if it has one: two that differ are refused.
        name_of_thought = "reasoning" if turn.get("reasoning_content") else "reasoning_content"
        turn = turn | ({name_of_thought: thought} if thought else {})
    message: Record = {"role": role, "content": _content(value, where, bool(calls), said)}
    if calls:
        if role != "assistant":
            raise Misfit(
                f"{where}: role is {name!r}, but only the assistant has tool_calls.\n"
                "Correct or remove the record."
            )
        message["tool_calls"] = calls
    # Most messages have only role and content: millions of them are spared the checks.
    if len(turn) > len(_OPENAI) or isinstance(value, list):
        check_message_keys(turn, role, where)
        message |= _extras(turn, where)
        message |= _train_marks(turn, role, message["content"], value, where)
    return message


def _sorted_parts(parts: Sequence[Any], where: str) -> tuple[list[Any], str, list[Record]]:
    """Parts of a content, without those of LLaMA-Factory v1 that are a thought or a call.

    Returns:
        The other parts, the thought, and the calls.
    """
    texts: list[Any] = []
    thought, calls = "", list[Record]()
    for number, part in enumerate(parts, 1):
        kind = part.get("type") if isinstance(part, dict) else None
        text = _part_text(part) if kind in ("reasoning", "tool_call") else None
        if text is None:
            texts.append(part)
            continue
        if mark_of(part, f"{where}, part {number}") is not None:
            raise Refusal(
                f"{where}, part {number} is a {kind} with a weight, but only texts have weights of "
                "their own.\nGive the weight to the message."
            )
        check_text(text, str(kind), where)
        if kind == "reasoning":
            thought += text
        else:
            calls += _tool_calls(_parsed(text, "tool_call", where), where)
    return texts, thought, calls


def _extras(turn: dict[str, Any], where: str) -> Record:
    """Read the keys of a message beside role, content, tool calls and training marks."""
    extras: Record = {}
    if turn.keys().isdisjoint(_EXTRAS):
        return extras
    for key in _EXTRAS:
        if (text := turn.get(key)) is not None:
            # Tables give each message every key: an empty thought is a missing one.
            if key in _THOUGHTS[1:] and is_empty(text):
                continue
            if not isinstance(text, str):
                raise Misfit(f"{where}: {key} is {kind_of(text)}.\nMake {key} a text.")
            check_text(text, key, where)
            extras[key] = text
    # Copies of one thought under several names are fine.
    thoughts = {key: extras[key] for key in _THOUGHTS if extras.get(key)}
    if len({*thoughts.values()}) > 1:
        names = " and ".join(thoughts)
        raise Refusal(
            f"{where} has {names}, which differ, but an answer follows one thought.\nKeep one of "
            "them."
        )
    if thoughts:
        # Templates find it under its own name too.
        extras["reasoning_content"] = next(iter(thoughts.values()))
    return extras


def _train_marks(
    turn: Mapping[str, Any], role: str, content: str, value: Any, where: str
) -> Record:
    """Read how much a message and parts of its content count: `train`, `weight` and `spans`.

    A part that says nothing counts as its turn. A turn of which a part says that it is learned is
    one that is.

    `spans` has the characters of the content whose weight is not that of the turn, [first, end,
    weight] each, rising; at 0 they carry no loss.
    """
    weight = mark_of(turn, where)
    spans = _of_parts(value, where) if isinstance(value, list) else []
    detail = turn.get("train_detail")
    # Parts and offsets are two ways to mark characters: one message has one of them.
    if not is_empty(detail):
        if isinstance(value, list):
            raise Refusal(
                f"{where} has train_detail, but its content is a list of parts.\nMark the parts "
                "with train instead, and remove train_detail."
            )
        spans = _of_detail(detail, content, where)
    some_trained = any(of_span for *_, of_span in spans)
    # Only what the assistant says can be learned.
    if role != "assistant":
        if weight or some_trained:
            raise Refusal(
                f"{where} is to be trained on, but only turns of the assistant are.\n"
                f"Remove {_names_of_marks(turn)} from it."
            )
        # A user turn that is marked as untrained matters with train_on all.
        if weight == 0 and content:
            spans = [[0, len(content), 0.0]]
        return {"spans": spans} if spans else {}
    if weight == 0:
        if some_trained:
            raise Refusal(
                f"{where}: {_names_of_marks(turn)} excludes the message from training, but one of "
                "its parts is marked as trained.\n"
                "Remove one of the two."
            )
        return {"train": False}
    # All that it says is untrained: then so is the end of the turn.
    if spans and weight is None and not some_trained and _says_nothing_else(turn, content, spans):
        return {"train": False}
    marks: Record = {"train": True} if weight or some_trained else {}
    of_turn = 1.0 if weight is None else weight
    if of_turn != 1:
        marks["weight"] = of_turn
    spans = [span for span in spans if span[2] != of_turn]
    return marks | {"spans": spans} if spans else marks


def _of_parts(parts: Sequence[Mapping[str, Any]], where: str) -> list[_WeightedSpan]:
    """The characters of the parts that have a weight."""
    spans: list[_WeightedSpan] = []
    end = 0
    for number, part in enumerate(parts, 1):
        weight = mark_of(part, f"{where}, part {number}")
        # Offsets in the joined text of all parts, as `_content` joins them.
        first, end = end, end + len(_part_text(part) or "")
        if weight is not None and first < end:
            _add_span(spans, first, end, weight)
    return spans


def _part_text(part: Mapping[str, Any]) -> str | None:
    """The text of a content part; None: it has none."""
    texts = (part.get(key) for key in _PART_TEXTS)
    return next((text for text in texts if isinstance(text, str)), None)


def _of_detail(detail: Any, content: str, where: str) -> list[_WeightedSpan]:
    """Read weights of characters from axolotl's train_detail, whose end_offset is inclusive."""
    spans: list[_WeightedSpan] = []
    before = 0
    for entry in _sorted_detail(detail, where):
        first, last = entry["begin_offset"], entry["end_offset"]
        weight = mark_of(entry, f"{where}, train_detail")
        # Sorted entries must not overlap, and lie within the content.
        if not before <= first <= last < len(content) or weight is None:
            raise Refusal(
                f"{where}: train_detail has {entry}, but each entry is a part of its own of the "
                f"{len(content)} characters: {_DETAIL}.\nCorrect it, or remove train_detail."
            )
        # end_offset is inclusive.
        before = last + 1
        _add_span(spans, first, before, weight)
    return spans


def _sorted_detail(detail: Any, where: str) -> list[dict[str, Any]]:
    entries = detail if isinstance(detail, list) else [detail]
    for entry in entries:
        offsets = (
            [entry.get(key) for key in ("begin_offset", "end_offset")]
            if isinstance(entry, dict)
            else [None]
        )
        # Not isinstance: true is an int in Python.
        if not all(type(offset) is int for offset in offsets):
            raise Refusal(
                f"{where}: train_detail has {entry!r}, but has to be a list of {_DETAIL}.\n"
                "Correct it, or remove train_detail."
            )
    return sorted(entries, key=lambda entry: entry["begin_offset"])


def _add_span(spans: list[_WeightedSpan], first: int, end: int, weight: float) -> None:
    """Add a span behind the others, to the last one if it goes on with the same weight."""
    if spans and spans[-1][1:] == [first, weight]:
        spans[-1][1] = end
    else:
        spans.append([first, end, weight])


def _says_nothing_else(
    turn: Mapping[str, Any], content: str, spans: Sequence[_WeightedSpan]
) -> bool:
    """Return whether nothing of a turn is left without some characters."""
    rest, done = "", 0
    for first, end, _ in spans:
        rest, done = rest + content[done:first], end
    others = ("tool_calls", "function_call", "reasoning_content", "thinking", "reasoning")
    return not (rest + content[done:]).strip() and all(is_empty(turn.get(key)) for key in others)


def _names_of_marks(turn: Mapping[str, Any]) -> str:
    """Names of the marks of a turn, for messages."""
    said = [key for key in (*TRAIN_MARKS, "train_detail") if not is_empty(turn.get(key))]
    return " and ".join(said) or "train"


def _content(value: Any, where: str, may_lack: bool, key: str = "content") -> str:
    """Text of a message; text parts are joined."""
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
    text = _part_text(part) if kind == "text" else None
    if text is None:
        raise Misfit(
            f"{where}: its content has a part that is {kind!r}, but ftkit only trains on "
            'text parts: {"type": "text", "text": ...}.\nRemove the part, or the record.'
        )
    return _content(text, where, False)


def _tool_calls(value: Any, where: str) -> list[Record]:
    """Calls as OpenAI writes them, with their arguments as an object."""
    if value is None:
        return []
    # OpenAI's older function_call is a single call.
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
    # OpenAI sends arguments as JSON text, but chat templates expect an object.
    arguments = _parsed(function.get("arguments") or {}, "arguments", where)
    if not isinstance(arguments, dict):
        raise Misfit(
            f"{where}: the arguments of {function['name']} are {kind_of(arguments)}.\n"
            "Make them an object, or JSON text of one."
        )
    # Arguments from a table may hold values that JSON does not have, such as dates.
    check_json(function, "tool_calls", where)
    made: Record = {"type": "function", "function": {"name": function["name"]}}
    made["function"]["arguments"] = arguments
    return {"id": call["id"], **made} if isinstance(call.get("id"), str) else made


def _with_tools(record: Record, row: dict[str, Any]) -> Record:
    """The record with the tools of its row: a list of functions, or JSON text of one."""
    # Tables often hold tools as JSON text: their objects have no common columns.
    tools = _parsed(row.get("tools") or row.get("functions") or [], "tools", "")
    if not isinstance(tools, list):
        raise Misfit(f": tools is {kind_of(tools)}.\nMake it a list of functions, or remove it.")
    if not tools:
        return record
    record["tools"] = [_tool(with_parameters(tool)) for tool in tools]
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
    # Older records have the bare function; templates expect the wrapped form.
    return tool if "function" in tool else {"type": "function", "function": tool}


def _parsed(value: Any, key: str, where: str) -> Any:
    """Parse JSON text; other values are returned as they are."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        raise Misfit(
            f"{where}: {key} is a text that is not valid JSON.\nCorrect or remove the record."
        ) from None
