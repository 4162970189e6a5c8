"""Any checkpoint's own Jinja chat template, in a sandbox, to ids in which only the template's own text makes markers.

Texts of users and tools go through the template with each marker in them replaced by a stand-in from a private-use
area. The result is cut at the markers that are left, which the template wrote, and stand-ins turn back into text that
is encoded without added tokens.
"""

import datetime
import json
import re
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jinja2
import msgspec
from jinja2.ext import Extension
from jinja2.parser import Parser as JinjaParser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from northchat.chat import schema
from northchat.chat.stream import Parser, Replay, Tokenizer, TurnError
from northchat.chat.tags import END_THINK, TAGS, THINK, TagParser
from northchat.messages import Message, Sampling, Turn

MAX_SOURCE = 1 << 20
MAX_OUTPUT = 16 << 20
MAX_SECONDS = 10.0
MAX_REPEATED = 100_000
END_MARKERS = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<end_of_turn>", "<|end_of_turn|>", "</s>")
"""Markers that end an answer where a template uses them, whatever the config says of the end of a text."""


class TemplateFormat:
    """Raises TurnError when the template can't be parsed."""

    name = "template"
    forces_tools = False

    def __init__(
        self, tokenizer: Tokenizer, source: str, defaults: Sampling, *, bos: int | None, eos: Sequence[int], tools: bool
    ) -> None:
        self.can_call_tools = tools
        self.defaults = defaults
        ends = [tokenizer.token_id(marker) for marker in END_MARKERS if marker in source]
        self.stop_ids: Sequence[int] = list(dict.fromkeys([*eos, *(token for token in ends if token is not None)]))
        self._tokenizer = tokenizer
        self._template = Template(source)
        self._escaper = Escaper(tokenizer.markers)
        names = {token: marker for marker, token in tokenizer.markers.items()}
        self._bos = "" if bos is None else names.get(bos, "")
        self._eos = next((names[token] for token in eos if token in names), "")
        self._tags = tuple(tag for tag in TAGS if tag in source or tag in tokenizer.markers)

    def render(self, turn: Turn, replay: Replay) -> list[int]:
        escapes = self._escaper.start()
        answers: list[Sequence[int]] = []
        messages = [self._message(message, turn, escapes, replay, answers) for message in turn.messages]
        variables: dict[str, Any] = {
            "tools": [_tool(tool, escapes) for tool in turn.tools] if turn.tool_choice != "none" else [],
            "bos_token": self._bos,
            "eos_token": self._eos,
            "add_generation_prompt": True,
        }
        variables["tools"] = variables["tools"] or None
        if turn.reasoning_effort is not None:
            variables["enable_thinking"] = turn.reasoning_effort != "none"
            variables["reasoning_effort"] = turn.reasoning_effort
        return self._encode(self._try(messages, variables), escapes, answers)

    def parser(self, turn: Turn, prompt: Sequence[int]) -> Parser:
        tail = self._tokenizer.decode_bytes(prompt[-8:]).decode(errors="replace").rstrip()
        tools = self.can_call_tools and bool(turn.tools) and turn.tool_choice != "none"
        return TagParser(
            self._tokenizer,
            turn.stop,
            thinking=tail.endswith(THINK),
            tools=tools,
            parallel=turn.parallel_tool_calls,
        )

    def grammar(self, turn: Turn, prompt: Sequence[int]) -> str:
        thinks = self.parser(turn, prompt).channel == "reasoning"
        return schema.text(turn, self.stop_ids, self._tokenizer.token_id(END_THINK) or END_THINK if thinks else None)

    def _try(self, messages: list[dict[str, Any]], variables: dict[str, Any]) -> str:
        """Many templates refuse what every client sends: system messages, or two of one role in a row. Such
        conversations are then put into the order that the template knows."""
        attempts: tuple[Callable[[list[dict[str, Any]]], list[dict[str, Any]]], ...] = (list, _merged, _without_system)
        first: TurnError | None = None
        for arrange in attempts:
            try:
                return self._template.render({**variables, "messages": arrange(messages)})
            except TurnError as error:
                first = first or error
        assert first is not None
        raise first

    def _message(
        self, message: Message, turn: Turn, escapes: "Escapes", replay: Replay, answers: list[Sequence[int]]
    ) -> dict[str, Any]:
        content = escapes.text(message.content)
        if message.role == "assistant" and not message.tool_calls and not message.reasoning:
            known = replay(message)
            if (
                known
                and self._tokenizer.decode_bytes(known).decode(errors="replace").strip() == message.content.strip()
            ):
                content = escapes.stand_in(-1 - len(answers))
                answers.append(known)
        result: dict[str, Any] = {
            "role": "system" if message.role == "developer" else message.role,
            "content": content,
        }
        if message.reasoning:
            result["reasoning_content"] = escapes.text(message.reasoning)
        if message.tool_calls:
            result["tool_calls"] = [
                {
                    "type": "function",
                    "id": escapes.text(call.id),
                    "function": {
                        "name": escapes.text(call.name),
                        "arguments": escapes.value(_arguments(call.arguments)),
                    },
                }
                for call in message.tool_calls
            ]
        if message.role == "tool":
            calls = (call for each in turn.messages for call in each.tool_calls)
            result["tool_call_id"] = escapes.text(message.tool_call_id)
            result["name"] = escapes.text(next((call.name for call in calls if call.id == message.tool_call_id), ""))
        return result

    def _encode(self, text: str, escapes: "Escapes", answers: Sequence[Sequence[int]]) -> list[int]:
        ids: list[int] = []
        for piece, marker, answer in escapes.pieces(text):
            if piece:
                ids += self._tokenizer.encode(piece)
            if marker is not None:
                ids.append(marker)
            if answer is not None:
                ids += answers[answer]
        return ids


def _arguments(text: str) -> Any:
    """Templates want the object, not its text."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _tool(tool: msgspec.Struct, escapes: "Escapes") -> dict[str, Any]:
    return {"type": "function", "function": escapes.value(msgspec.structs.asdict(tool))}


def _merged(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One system message, at the beginning; neighbours of one role, other than tool, joined."""
    system = [message["content"] for message in messages if message["role"] == "system"]
    result = [{"role": "system", "content": "\n\n".join(system)}] if system else []
    for message in messages:
        if message["role"] == "system":
            continue
        last = result[-1] if result else None
        plain = message.keys() == {"role", "content"}
        if last and plain and last.keys() == {"role", "content"} and last["role"] == message["role"]:
            result[-1] = {**last, "content": f"{last['content']}\n\n{message['content']}"}
        else:
            result.append(message)
    return result


def _without_system(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    merged = _merged(messages)
    if not merged or merged[0]["role"] != "system":
        return merged
    system, *rest = merged
    if rest and rest[0]["role"] == "user":
        return [{**rest[0], "content": f"{system['content']}\n\n{rest[0]['content']}"}, *rest[1:]]
    return [{"role": "user", "content": system["content"]}, *rest]


class Escaper:
    """Knows the markers of a tokenizer; white space alone is none."""

    def __init__(self, markers: Mapping[str, int]) -> None:
        self.markers = {marker: token for marker, token in markers.items() if marker.strip()}
        longest_first = sorted(self.markers, key=len, reverse=True)
        self.pattern = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
        self.joined = "\0".join(self.markers)
        self._longest = max(map(len, self.markers), default=1)
        self._beginnings = {marker[:size] for marker in self.markers for size in range(1, len(marker))}
        self._ends = {marker[size:] for marker in self.markers for size in range(1, len(marker))}

    def edges(self, text: str) -> tuple[int, int]:
        """Lengths of the beginning and the end of a text that markers could be completed with."""
        sizes = range(min(self._longest, len(text)), 0, -1)
        head = next((size for size in sizes if text[:size] in self._ends), 0)
        tail = next((size for size in sizes if text[len(text) - size :] in self._beginnings), 0)
        return head, tail

    def start(self) -> "Escapes":
        return Escapes(self)


class Escapes:
    """The stand-ins of one rendering. A random number in them keeps texts from forging one."""

    def __init__(self, escaper: Escaper) -> None:
        self._escaper = escaper
        self._nonce = secrets.randbelow(10**12)
        self._originals: list[str] = []

    def stand_in(self, number: int) -> str:
        """Digits between private-use characters: no filter of a template changes them."""
        return f"\uf8f0{self._nonce}\uf8f1{number}\uf8f2"

    def text(self, text: str) -> str:
        """The text without markers, and without ends of which the template's own text could complete one."""
        if not text:
            return text
        if text in self._escaper.joined:
            return self._replace(text)
        head, tail = self._escaper.edges(text)
        if head + tail >= len(text):
            return self._replace(text)
        middle = text[head : len(text) - tail]
        return (
            (self._replace(text[:head]) if head else "")
            + self._escaper.pattern.sub(lambda match: self._replace(match[0]), middle)
            + (self._replace(text[len(text) - tail :]) if tail else "")
        )

    def value(self, value: Any) -> Any:
        """The same for every string of a JSON value. Words of schemas are left alone: templates compare them."""
        match value:
            case str():
                plain = value.isalnum() and not self._escaper.pattern.search(value)
                return value if plain else self.text(value)
            case dict():
                return {self.value(key): self.value(item) for key, item in value.items()}
            case list():
                return [self.value(item) for item in value]
            case _:
                return value

    def pieces(self, rendered: str) -> "list[tuple[str, int | None, int | None]]":
        """The rendered text, cut up: text to encode, then a marker's id or the number of a replayed answer."""
        stand_in = re.compile(f"\uf8f0{self._nonce}\uf8f1(-?\\d+)\uf8f2")
        cut = re.compile(
            f"(?P<marker>{self._escaper.pattern.pattern})|\uf8f0{self._nonce}\uf8f1-(?P<answer>\\d+)\uf8f2"
        )
        result: list[tuple[str, int | None, int | None]] = []
        at = 0

        def restore(text: str) -> str:
            return stand_in.sub(lambda match: self._originals[int(match[1])], text)

        for match in cut.finditer(rendered):
            before = restore(rendered[at : match.start()])
            marker = self._escaper.markers[match["marker"]] if match["marker"] else None
            answer = int(match["answer"]) - 1 if match["answer"] else None
            result.append((before, marker, answer))
            at = match.end()
        result.append((restore(rendered[at:]), None, None))
        return result

    def _replace(self, text: str) -> str:
        self._originals.append(text)
        return self.stand_in(len(self._originals) - 1)


class Template:
    """A compiled template. Raises TurnError when it can't be parsed."""

    def __init__(self, source: str) -> None:
        if len(source) > MAX_SOURCE:
            raise TurnError(f"the model's chat template is over {MAX_SOURCE >> 10} KiB")
        try:
            self._template = _environment().from_string(source)
        except (jinja2.TemplateError, RecursionError) as error:
            raise TurnError(f"the model's chat template is damaged: {error}") from error

    def render(self, variables: Mapping[str, Any]) -> str:
        """Raises TurnError with the template's own words when it raises, or when it takes too long or much."""
        parts: list[str] = []
        size = 0
        deadline = time.monotonic() + MAX_SECONDS
        try:
            for part in self._template.generate(variables):
                parts.append(part)
                size += len(part)
                if size > MAX_OUTPUT or time.monotonic() > deadline:
                    raise TurnError("the model's chat template takes too long or writes too much")
        except _Raised as error:
            raise TurnError(str(error)) from error
        except TurnError:
            raise
        except Exception as error:  # a template can provoke any
            raise TurnError(f"the model's chat template failed: {error or type(error).__name__}") from error
        return "".join(parts)


class _Raised(Exception):
    """A template's raise_exception."""


class _Environment(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset({"*", "**", "%"})

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        # 'a' * 10**9 and 9**9**9 are one step each, but no small one.
        numbers = isinstance(left, (int, float)) and isinstance(right, (int, float))
        if operator == "**" or (operator == "*" and not numbers and _size(left) * _size(right) > MAX_REPEATED):
            raise jinja2.TemplateRuntimeError(f"`{operator}` is not allowed here")
        if operator == "%" and isinstance(left, str):
            raise jinja2.TemplateRuntimeError("formatting with `%` is not allowed here")
        return super().call_binop(context, operator, left, right)


def _size(value: Any) -> int:
    return value if isinstance(value, int) else len(value)


class _Generation(Extension):
    """{% generation %} marks answers for training; here it is nothing."""

    tags: set[str] = {"generation"}  # noqa: RUF012

    def parse(self, parser: JinjaParser) -> jinja2.nodes.Node | list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> _Environment:
    environment = _Environment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _Generation]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    return environment


def _raise(message: str) -> None:
    raise _Raised(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own escapes HTML, which templates for models don't want."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
