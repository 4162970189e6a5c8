"""North Mini Code's chat format, equal to the byte to what the checkpoint's own template writes."""

import json
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

from northchat.chat import schema
from northchat.chat.north_parser import Marker, NorthParser, marker_ids
from northchat.chat.stream import Parser, Replay, Tokenizer, TurnError
from northchat.chat.template import Template, TemplateFormat
from northchat.messages import Message, Sampling, ToolCall, ToolSpec, Turn

Piece = str | Marker | list[int]
"""Text to encode, a marker, or ids as they were generated."""

SYSTEM = """\
These instructions are always to be followed and cannot be overridden by subsequent system or user turns:
- You will answer requests for educational, informative, or creative content related to safety categories. \
You will not provide content that is harmful or could be used to cause harm.

These instructions serve as your defaults, but they can be overridden in subsequent system or user turns:
- Your name is North Mini Code.
- You are a large language model built by Cohere."""
JSON_MODE = """\
When generating JSON objects, do not generate block markers. Generate an object directly without prefixing with \
```json. Return only the JSON and nothing else."""


class North:
    """Raises TurnError when the tokenizer lacks a marker or `template` can't be parsed.

    `template` is the checkpoint's own: where it says otherwise than this module, it is the one that renders.
    """

    name = "north"
    can_call_tools = True
    forces_tools = True

    def __init__(self, tokenizer: Tokenizer, defaults: Sampling, template: str | None = None) -> None:
        self.defaults = defaults
        self._tokenizer = tokenizer
        self._ids = marker_ids(tokenizer)
        self.stop_ids: Sequence[int] = (self._ids[Marker.END_OF_TURN],)
        self._own: TemplateFormat | None = None
        if template is not None and not agrees(template):
            bos, eos = self._ids[Marker.BOS], self.stop_ids
            self._own = TemplateFormat(tokenizer, template, defaults, bos=bos, eos=eos, tools=True)

    def render(self, turn: Turn, replay: Replay) -> list[int]:
        if self._own is not None:
            return self._own.render(turn, replay)
        ids: list[int] = []
        for is_text, pieces in groupby(prompt(turn, _Replayed(self._tokenizer, self._ids, replay)), _is_text):
            if is_text:
                ids += self._tokenizer.encode("".join(map(str, pieces)))
            else:
                for piece in pieces:
                    ids += piece if isinstance(piece, list) else [self._ids[Marker(piece)]]
        return ids

    def parser(self, turn: Turn, prompt: Sequence[int]) -> Parser:
        return NorthParser(
            self._tokenizer,
            self._ids,
            turn.stop,
            thinking=self._thinks(prompt),
            tools=bool(turn.tools) and turn.tool_choice != "none",
            parallel=turn.parallel_tool_calls,
            opener=Marker.START_ACTION if schema.forces_call(turn) else Marker.START_TEXT,
        )

    def grammar(self, turn: Turn, prompt: Sequence[int]) -> str:
        return schema.north(turn, self._ids, self._thinks(prompt))

    def _thinks(self, prompt: Sequence[int]) -> bool:
        return bool(prompt) and prompt[-1] == self._ids[Marker.START_THINKING]


def _is_text(piece: Piece) -> bool:
    return isinstance(piece, str) and not isinstance(piece, Marker)


def prompt(turn: Turn, replayed: "_Replayed | None" = None) -> Iterator[Piece]:
    """The pieces of a turn's prompt. Joined with markers as their strings they are what the template writes."""
    yield Marker.BOS
    yield from _turn(Marker.SYSTEM, *_text(_instructions(turn)))
    numbers = _Numbers()
    for tool_results, messages in groupby(turn.messages, lambda message: message.role == "tool"):
        if tool_results:
            results = ",\n".join(_result(message, numbers) for message in messages)
            yield from _turn(Marker.SYSTEM, Marker.START_TOOL_RESULT, f"[\n{results}\n]", Marker.END_TOOL_RESULT)
            continue
        for message in messages:
            if message.role == "assistant":
                yield from _assistant(message, numbers, replayed)
            else:
                role = Marker.USER if message.role == "user" else Marker.SYSTEM
                yield from _turn(role, *_text(message.content))
    yield from (Marker.START_OF_TURN, Marker.CHATBOT, Marker.START_THINKING)
    if turn.reasoning_effort == "none":
        yield Marker.END_THINKING


def _turn(role: Marker, *body: Piece) -> tuple[Piece, ...]:
    return (Marker.START_OF_TURN, role, *body, Marker.END_OF_TURN)


def _text(text: str) -> tuple[Piece, ...]:
    return (Marker.START_TEXT, text, Marker.END_TEXT)


def _instructions(turn: Turn) -> str:
    tools = turn.tools if turn.tool_choice != "none" else []
    listed = ",\n".join(map(_tool, tools))
    text = f"{SYSTEM}\n\n# Available Tools\n```json\n[\n{listed}\n]\n```"
    if turn.response_format is not None and turn.response_format.get("type") != "text":
        text += f"\n\n{JSON_MODE}"
        if schema := _schema(turn.response_format):
            text += f"\nYour output should adhere to the following json schema:\n{schema}"
    return text


def _tool(tool: ToolSpec) -> str:
    # The template puts name and description in as they are, and so the model has learnt them.
    head = f'"name": "{tool.name}", "description": "{tool.description}"'
    return f'    {{{head}, "parameters": {_json(tool.parameters)}, "responses": null}}'


def _schema(response_format: dict[str, Any]) -> str:
    """The schema of OpenAI's response_format, as JSON text; empty for plain JSON."""
    schema = response_format.get("json_schema") or response_format.get("schema")
    if isinstance(schema, dict) and isinstance(schema.get("schema"), dict):
        schema = schema["schema"]
    return schema if isinstance(schema, str) else _json(schema) if schema else ""


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


class _Numbers:
    """Calls are numbered over the whole conversation; a result names the latest call that had its id."""

    def __init__(self) -> None:
        self.next = 0
        self._of: dict[str, int] = {}

    def call(self, call: ToolCall) -> int:
        number, self.next = self.next, self.next + 1
        self._of[call.id] = number
        return number

    def result(self, message: Message) -> str:
        number = self._of.get(message.tool_call_id)
        return "" if number is None else str(number)


def _result(message: Message, numbers: _Numbers) -> str:
    content = _json({"content": message.content})
    return (
        f'    {{\n        "tool_call_id": "{numbers.result(message)}",\n        "results": {{\n'
        f'            "0": {content}\n        }},\n        "is_error": null\n    }}'
    )


def _assistant(message: Message, numbers: _Numbers, replayed: "_Replayed | None") -> Iterator[Piece]:
    first = numbers.next
    calls = [f"    {_call(call, numbers.call(call))}" for call in message.tool_calls]
    if replayed is not None and (known := replayed(message, first)) is not None:
        yield from _turn(Marker.CHATBOT, known)
        return
    body: list[Piece] = []
    if message.reasoning:
        body += [Marker.START_THINKING, message.reasoning, Marker.END_THINKING]
    if calls:
        body += [Marker.START_ACTION, "[\n" + ",\n".join(calls) + "\n]", Marker.END_ACTION]
    else:
        body += _text(message.content)
    yield from _turn(Marker.CHATBOT, *body)


def _call(call: ToolCall, number: int) -> str:
    try:
        arguments = json.loads(call.arguments or "{}")
    except (ValueError, RecursionError):
        arguments = call.arguments  # the model wrote no JSON then; it may see what it wrote
    return f'{{"tool_call_id": "{number}", "tool_name": "{call.name}", "parameters": {_json(arguments)}}}'


_CLOSERS = {
    Marker.START_THINKING: Marker.END_THINKING,
    Marker.START_TEXT: Marker.END_TEXT,
    Marker.START_ACTION: Marker.END_ACTION,
}


class _Replayed:
    """Generated ids as a part of history: what the prompt had opened before them, and what they left open."""

    def __init__(self, tokenizer: Tokenizer, ids: dict[Marker, int], replay: Replay) -> None:
        self._tokenizer = tokenizer
        self._ids = ids
        self._names = {token: marker for marker, token in ids.items()}
        self._replay = replay

    def __call__(self, message: Message, first: int) -> list[int] | None:
        """The ids of the message's turn, or None to render it: when they aren't known, or when the model numbered its
        calls otherwise than `first` and following, by which results refer to them.
        """
        known = self._replay(message)
        if not known:
            return None
        markers = [marker for token in known if (marker := self._names.get(token)) is not None]
        if message.tool_calls and self._call_numbers(known) != [*range(first, first + len(message.tool_calls))]:
            return None
        # With thinking off, an answer begins with a block of its own, and nothing ends a thinking.
        opened = Marker.END_THINKING in markers or not markers or markers[0] not in _CLOSERS
        before = [Marker.START_THINKING] if opened else [Marker.START_THINKING, Marker.END_THINKING]
        left = Marker.START_THINKING if opened else None
        for marker in markers:
            if marker in _CLOSERS:
                left = marker
            elif marker in _CLOSERS.values():
                left = None
        after = [_CLOSERS[left]] if left else []
        return [*(self._ids[marker] for marker in before), *known, *(self._ids[marker] for marker in after)]

    def _call_numbers(self, known: Sequence[int]) -> list[int] | None:
        start, end = self._ids[Marker.START_ACTION], self._ids[Marker.END_ACTION]
        if start not in known:
            return None
        block = list(known[list(known).index(start) + 1 :])
        block = block[: block.index(end)] if end in block else block
        try:
            calls = json.loads(self._tokenizer.decode_bytes(block))
            return [int(call["tool_call_id"]) for call in calls]
        except (ValueError, TypeError, KeyError):
            return None


# ---- the checkpoint's own template ----

_CALLS = [ToolCall("a", "bash", '{"cmd": "ls"}'), ToolCall("b", "read", "{}")]
_GOLDEN = (
    Turn([Message("user", "Hi")]),
    Turn([Message("user", "Hi")], reasoning_effort="none"),
    Turn(
        [
            Message("system", "Be terse."),
            Message("user", "List"),
            Message("assistant", reasoning="I should ls.", tool_calls=_CALLS),
            Message("tool", 'a.py\nb "q" <x> é', tool_call_id="a"),
            Message("tool", "zz", tool_call_id="b"),
            Message("assistant", "Two files."),
            Message("user", "Thanks"),
        ],
        [ToolSpec("bash", "Run a command", {"type": "object", "properties": {"cmd": {"type": "string"}}})],
    ),
)


def agrees(template: str) -> bool:
    """Whether the template writes what `prompt` does. Raises TurnError when it can't be parsed."""
    compiled = Template(template)
    try:
        return all(compiled.render(_variables(turn)) == "".join(map(str, prompt(turn))) for turn in _GOLDEN)
    except TurnError:
        return False


def _variables(turn: Turn) -> dict[str, Any]:
    """What transformers hands to a template for the turn."""
    messages: list[dict[str, Any]] = []
    for message in turn.messages:
        shown: dict[str, Any] = {"role": message.role, "content": message.content}
        if message.reasoning:
            shown |= dict.fromkeys(("reasoning", "reasoning_content", "thinking"), message.reasoning)
        if message.tool_calls:
            shown["tool_calls"] = [
                {"id": call.id, "function": {"name": call.name, "arguments": json.loads(call.arguments)}}
                for call in message.tool_calls
            ]
        if message.tool_call_id:
            shown["tool_call_id"] = message.tool_call_id
        messages.append(shown)
    tools = [
        {
            "type": "function",
            "function": {"name": tool.name, "description": tool.description, "parameters": tool.parameters},
        }
        for tool in turn.tools
    ]
    effort = {} if turn.reasoning_effort is None else {"reasoning_effort": turn.reasoning_effort}
    return {
        "messages": messages,
        "tools": tools or None,
        "bos_token": str(Marker.BOS),
        "add_generation_prompt": True,
    } | effort
