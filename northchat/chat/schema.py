"""From tools' JSON schemas and OpenAI's response_format to a grammar of the answer, in llguidance's dialect of Lark.

Markers stand in it as ids, `<[255011]>`. JSON is written as `json.dumps` writes it and as prompts show it: white space
that a model may choose freely is white space that it may never stop writing.
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from northchat.chat.north_parser import Marker
from northchat.chat.stream import TurnError
from northchat.messages import ToolSpec, Turn

MAX_BYTES = 256 << 10
"""Of all schemas of a turn together."""
MAX_DEPTH = 64
MAX_PATTERN = 4 << 10
"""Characters of one regular expression."""
MAX_CALLS = 16
"""In one answer that must be calls."""

_PLACE = re.compile(r"^at \d+\(\d+\): (failed to compile JSON schema: )?|\n\s+\d+ \| .*|<non-verbose/>", re.DOTALL)
_HEAD = '%llguidance {"no_forcing": true}\n'
_STYLE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": ", "coerce_one_of": True}
_NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}
_COMBINING = ("$ref", "allOf", "anyOf", "oneOf", "patternProperties", "unevaluatedProperties")


class SchemaError(TurnError):
    """A schema can't be served; the message is one line. `param`: the field of the request that it came in."""

    def __init__(self, message: str, param: str) -> None:
        super().__init__(message)
        self.param = param


def north(turn: Turn, ids: Mapping[Marker, int], thinking: bool) -> str:
    """Grammar of North's answer to the turn; empty where it may be anything. Raises SchemaError.

    thinking: the prompt has opened it. It is free, up to its end.
    """
    forced = forces_call(turn)
    wanted = _wanted(turn)
    if not forced and wanted is None:
        return ""
    rules = []
    answers = []
    if wanted is not None and not forced:
        rules.append(f"json: %json {wanted}")
        answers.append(f"{_token(ids[Marker.START_TEXT])} json {_token(ids[Marker.END_TEXT])}")
    if turn.tools and turn.tool_choice != "none":
        rules += _action(turn)
        answers.append(f"{_token(ids[Marker.START_ACTION])} action {_token(ids[Marker.END_ACTION])}")
    thought = f"{_others(ids.values())}* {_token(ids[Marker.END_THINKING])} " if thinking else ""
    start = f"start: {thought}({' | '.join(answers)}) {_token(ids[Marker.END_OF_TURN])}"
    return _HEAD + "\n".join([start, *rules])


def text(turn: Turn, stop_ids: Sequence[int], after: int | str | None = None) -> str:
    """Grammar of an answer that is text and ends with one of `stop_ids`; empty where it may be anything.

    after: what ends the thinking that the prompt has opened, a marker or a string. Raises SchemaError.
    """
    wanted = _wanted(turn)
    if wanted is None:
        return ""
    rules = [f"json: %json {wanted}"]
    thought = "" if after is None else "thought /[ \\n]{0,2}/ "
    if isinstance(after, int):
        rules.append(f"thought: {_others([after, *stop_ids])}* {_token(after)}")
    elif after is not None:
        rules.append(f"thought[lazy]: ANYTHING {_literal(after)}\nANYTHING: /(.|\\n)*/")
    return _HEAD + "\n".join([f"start: {thought}json ({' | '.join(map(_token, stop_ids))})", *rules])


def problem(grammar: str) -> str:
    """Why a grammar can't be followed, in one line; empty if it can. Takes milliseconds to a few seconds."""
    # Not for hosts that never see a grammar.
    from llguidance import LLMatcher, LLParserLimits

    limits = LLParserLimits(verbose_errors=False)
    try:
        failed, messages = LLMatcher.validate_grammar_with_warnings(grammar, limits=limits)
    except BaseException as error:  # the library panics on some nonsense, and a panic is no Exception
        return f"it makes no sense ({type(error).__name__})"
    # The message, without place and excerpt of a grammar that nobody wrote.
    return " ".join(_PLACE.sub("", messages[0]).split())[:300] if failed else ""


def forces_call(turn: Turn) -> bool:
    return bool(turn.tools) and turn.tool_choice not in ("auto", "none")


def _action(turn: Turn) -> list[str]:
    """Rules for calls, numbered on from those of the conversation as prompts number them."""
    tools = [tool for tool in turn.tools if turn.tool_choice in ("auto", "required", tool.name)]
    texts = [_parameters(tool) for tool in tools]
    _check_size(texts, "tools")
    first = sum(len(message.tool_calls) for message in turn.messages)
    count = MAX_CALLS if turn.parallel_tool_calls else 1
    rules = ['action: "[\\n    " call_0']
    for index in range(count):
        head = f'{{"tool_call_id": "{first + index}", "tool_name": '
        more = f' | ",\\n    " call_{index + 1}' if index + 1 < count else ""
        rules.append(f'call_{index}: {_literal(head)} tool "}}" ("\\n]"{more})')
    rules.append(f"tool: {' | '.join(f'tool_{index}' for index in range(len(tools)))}")
    for index, (tool, parameters) in enumerate(zip(tools, texts, strict=True)):
        head = f'{json.dumps(tool.name, ensure_ascii=False)}, "parameters": '
        rules.append(f"tool_{index}: {_literal(head)} %json {parameters}")
    return rules


def _parameters(tool: ToolSpec) -> str:
    """An object in any case. Parameters that the schema doesn't name are left out unless it asks for them: models make
    them up."""
    schema = tool.parameters or _NO_PARAMETERS
    if schema.get("type", "object") != "object":
        raise SchemaError(f"the parameters of tool {tool.name!r} must be an object", "tools")
    if not any(key in schema for key in _COMBINING):
        closed = {"additionalProperties": False} if "properties" in schema else {}
        schema = {"type": "object"} | closed | schema
    # What can't be enforced of a tool's schema is left to the tool; an answer's schema is a promise.
    return _schema(schema, f"the schema of tool {tool.name!r}", "tools", lenient=True)


def _wanted(turn: Turn) -> str | None:
    """The schema that response_format asks for, as text."""
    wanted = turn.response_format or {}
    kind = wanted.get("type", "text")
    if kind == "text":
        return None
    if kind == "json_object":
        schema: Any = {"type": "object"}
    elif kind == "json_schema":
        outer = wanted.get("json_schema")
        schema = outer.get("schema") if isinstance(outer, dict) else wanted.get("schema")
    else:
        raise SchemaError("response_format must be text, json_object or json_schema", "response_format")
    if not isinstance(schema, dict):
        raise SchemaError("response_format `json_schema` needs a schema that is an object", "response_format")
    found = _schema(schema, "the schema of response_format", "response_format", lenient=False)
    _check_size([found], "response_format")
    return found


def _schema(schema: dict[str, Any], name: str, param: str, lenient: bool) -> str:
    _check(schema, name, param)
    style = _STYLE | ({"lenient": True} if lenient else {})
    return json.dumps(schema | {"x-guidance": style})


def _check(schema: dict[str, Any], name: str, param: str) -> None:
    level: list[Any] = [schema]
    for _ in range(MAX_DEPTH):
        inner: list[Any] = []
        for value in level:
            if isinstance(value, dict):
                pattern = value.get("pattern")
                if isinstance(pattern, str) and len(pattern) > MAX_PATTERN:
                    raise SchemaError(f"{name} has a pattern of over {MAX_PATTERN} characters; shorten it", param)
                inner += value.values()
            elif isinstance(value, list):
                inner += value
        level = inner
        if not level:
            return
    raise SchemaError(f"{name} is nested over {MAX_DEPTH} levels deep; make it flatter", param)


def _check_size(texts: Iterable[str], param: str) -> None:
    if sum(len(each.encode("utf-8", "replace")) for each in texts) > MAX_BYTES:
        raise SchemaError(f"the schemas of {param} are over {MAX_BYTES >> 10} KB together; make them smaller", param)


def _token(token: int) -> str:
    return f"<[{token}]>"


def _others(tokens: Iterable[int]) -> str:
    """Any id but these."""
    return f"<[^{','.join(map(str, sorted(tokens)))}]>"


def _literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
