"""Grammars of answers: what they let through and what not, id by id, as the engine applies them."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from north_rig import encode_with_markers, north_tokenizer_file

from northchat.chat import schema
from northchat.chat.north import North, prompt
from northchat.chat.north_parser import Marker, marker_ids
from northchat.chat.schema import SchemaError
from northchat.chat.stream import Accumulator
from northchat.chat.template import TemplateFormat
from northchat.engine.grammar import Grammars, Matcher
from northchat.messages import Message, Sampling, ToolCall, ToolSpec, Turn
from northchat.model.tokenizer import Tokenizer

BASH = ToolSpec("bash", "Run", {"type": "object", "properties": {"cmd": {"type": "string"}}, "required": ["cmd"]})
READ = ToolSpec("read", "Read", {"properties": {"lines": {"type": "array", "items": {"enum": [1, 2]}}}})
NOW = ToolSpec("now")
CALLS = "<|START_ACTION|>[\n    {}\n]<|END_ACTION|><|END_OF_TURN_TOKEN|>"
LS = '{"tool_call_id": "0", "tool_name": "bash", "parameters": {"cmd": "ls"}}'
OBJECT = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}


class Rig:
    def __init__(self, folder: Path) -> None:
        path = north_tokenizer_file(folder)
        self.tokenizer = Tokenizer(path)
        self.ids = marker_ids(self.tokenizer)
        self.north = North(self.tokenizer, Sampling())
        self._grammars = Grammars(path, self.tokenizer.vocab_size + 7)

    def grammar(self, **turn: Any) -> str:
        """Of an answer after thinking was opened."""
        return self.north.grammar(self.turn(**turn), [self.ids[Marker.START_THINKING]])

    @staticmethod
    def turn(**turn: Any) -> Turn:
        return Turn(turn.pop("messages", [Message("user", "Hi")]), turn.pop("tools", [BASH, READ, NOW]), **turn)

    def matcher(self, grammar: str) -> Matcher:
        return self._grammars.start(grammar, ()).result()

    def accepts(self, grammar: str, text: str) -> bool:
        """Whether every id of the text is allowed where it comes, and nothing is missing at its end."""
        matcher = self.matcher(grammar)
        ids = encode_with_markers(self.tokenizer, text)
        for token in ids[:-1]:
            if token not in allowed(matcher):
                return False
            matcher.accept(token)
        return ids[-1] in allowed(matcher)


def allowed(matcher: Matcher) -> list[int]:
    return [index for index in range(8 * len(matcher.mask)) if matcher.mask[index // 8] >> index % 8 & 1]


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Rig:
    return Rig(tmp_path_factory.mktemp("tokenizer"))


# ---- calls ----


def test_what_history_shows_of_calls_is_what_the_grammar_asks_for(rig: Rig) -> None:
    calls = [
        ToolCall("a", "bash", '{"cmd": "ls \\"a b\\"\\n | wc"}'),
        ToolCall("b", "read", '{"lines": [1, 2]}'),
        ToolCall("c", "now", "{}"),
        ToolCall("d", "read", "{}"),
    ]
    shown = "".join(map(str, prompt(Turn([Message("assistant", reasoning="Hm.", tool_calls=calls)]))))
    answer = shown[shown.index("Hm.") : shown.rindex("<|START_OF_TURN_TOKEN|>")]
    assert answer.endswith("<|END_OF_TURN_TOKEN|>")
    assert rig.accepts(rig.grammar(tool_choice="required"), answer)


def test_calls_are_numbered_on_as_the_prompt_numbers_them(rig: Rig) -> None:
    before = [Message("assistant", tool_calls=[ToolCall("x", "now"), ToolCall("y", "now")]), Message("user", "Go on")]
    grammar = rig.grammar(tool_choice="required", messages=before)
    assert rig.accepts(grammar, "<|END_THINKING|>" + CALLS.format(LS.replace('"0"', '"2"')))
    assert not rig.accepts(grammar, "<|END_THINKING|>" + CALLS.format(LS))


@pytest.mark.parametrize(
    ("call", "fits"),
    [
        (LS, True),
        (LS.replace("bash", "sh"), False),
        (LS.replace("cmd", "command"), False),
        (LS.replace('"ls"', "1"), False),
        (LS.replace('{"cmd": "ls"}', "{}"), False),
        (LS.replace('"cmd": "ls"', '"cmd": "ls", "made_up": 1'), False),
        (LS.replace("ls", r"grep a\|b"), False),
        (LS.replace("ls", r"grep a\\|b"), True),
        (LS.replace('bash", "parameters": {"cmd": "ls"}', 'now", "parameters": {}'), True),
        (LS.replace('bash", "parameters": {"cmd": "ls"}', 'now", "parameters": {"a": 1}'), False),
        (LS.replace('bash", "parameters": {"cmd": "ls"}', 'read", "parameters": {"lines": [3]}'), False),
    ],
)
def test_a_call_must_fit_its_tool(rig: Rig, call: str, fits: bool) -> None:
    assert rig.accepts(rig.grammar(tool_choice="required"), "<|END_THINKING|>" + CALLS.format(call)) is fits


@pytest.mark.parametrize(
    "answer",
    [
        "Hm<|END_THINKING|><|START_TEXT|>No.<|END_TEXT|><|END_OF_TURN_TOKEN|>",
        "Hm<|END_OF_TURN_TOKEN|>",
        "Hm<|END_THINKING|><|END_OF_TURN_TOKEN|>",
        CALLS.format(LS),
        "<|START_TEXT|>Hm<|END_THINKING|>" + CALLS.format(LS),
        "<|END_THINKING|>" + CALLS.format(LS).replace("<|END_ACTION|>", ""),
    ],
)
def test_nothing_but_thinking_and_calls_will_do(rig: Rig, answer: str) -> None:
    assert not rig.accepts(rig.grammar(tool_choice="required"), answer)


def test_thinking_is_free(rig: Rig) -> None:
    matcher = rig.matcher(rig.grammar(tool_choice="required"))
    markers = set(rig.ids.values())
    for _ in range(3):
        # Bytes that are no UTF-8 by themselves too, and the end of thinking; of ids that stand for nothing no matter.
        free = set(range(rig.tokenizer.vocab_size)) - markers | {rig.ids[Marker.END_THINKING]}
        assert free <= set(allowed(matcher))
        assert markers & set(allowed(matcher)) == {rig.ids[Marker.END_THINKING]}
        matcher.accept(0)


def test_without_thinking_the_call_comes_at_once(rig: Rig) -> None:
    turn = rig.turn(tool_choice="required", reasoning_effort="none")
    grammar = rig.north.grammar(turn, rig.north.render(turn, lambda message: None))
    assert rig.accepts(grammar, CALLS.format(LS))
    assert not rig.accepts(grammar, "Hm<|END_THINKING|>" + CALLS.format(LS))


def test_a_named_tool_and_a_single_call(rig: Rig) -> None:
    named = rig.grammar(tool_choice="bash")
    assert rig.accepts(named, "<|END_THINKING|>" + CALLS.format(LS))
    assert not rig.accepts(named, "<|END_THINKING|>" + CALLS.format(LS.replace("bash", "now")))
    two = "<|END_THINKING|>" + CALLS.format(LS + ",\n    " + LS.replace('"0"', '"1"'))
    assert rig.accepts(rig.grammar(tool_choice="required"), two)
    assert not rig.accepts(rig.grammar(tool_choice="required", parallel_tool_calls=False), two)


def test_nothing_is_enforced_unless_asked_for(rig: Rig) -> None:
    assert rig.grammar() == rig.grammar(tool_choice="none") == rig.grammar(response_format={"type": "text"}) == ""


SCHEMAS: list[dict[str, Any]] = [
    {},
    {"type": "object", "properties": {"s": {"type": "string", "maxLength": 8}, "n": {"type": "number"}}},
    {"type": "object", "properties": {"e": {"enum": ["<|END_ACTION|>", "ü", None]}}, "required": ["e"]},
    {"oneOf": [{"type": "object", "required": ["b"], "properties": {"b": {"type": "boolean"}}}]},
    {"$defs": {"x": {"type": "integer"}}, "type": "object", "properties": {"x": {"$ref": "#/$defs/x"}}},
    {"type": "object", "properties": {"p": {"type": "string", "pattern": "^[a-c]{2}$", "format": "made-up"}}},
]


@settings(deadline=None, max_examples=40)
@given(seed=st.integers(0, 10**9), chosen=st.lists(st.sampled_from(SCHEMAS), min_size=1, max_size=4))
def test_whatever_is_drawn_parses_to_calls_that_fit(rig: Rig, seed: int, chosen: list[dict[str, Any]]) -> None:
    tools = [ToolSpec(f"tool_{index}", "", each) for index, each in enumerate(chosen)]
    turn = rig.turn(tools=tools, tool_choice="required")
    prompt = rig.north.render(turn, lambda message: None)
    matcher, draw = rig.matcher(rig.north.grammar(turn, prompt)), random.Random(seed)
    parser, answer = rig.north.parser(turn, prompt), Accumulator()
    ends = {rig.ids[Marker.END_THINKING]} | set(rig.tokenizer.encode('"]}'))
    for _ in range(3000):
        choices = allowed(matcher)
        assert not matcher.problem
        # Ends are preferred, or a number would go on for ever.
        token = draw.choice(sorted(ends & set(choices)) or choices) if draw.random() < 0.4 else draw.choice(choices)
        if token == rig.ids[Marker.END_OF_TURN]:
            break
        for event in parser.feed((token,)):
            answer.add(event)
        matcher.accept(token)
    else:
        raise AssertionError("no end")
    for event in parser.finish():
        answer.add(event)
    assert answer.message.content == ""
    assert answer.message.tool_calls
    for call in answer.message.tool_calls:
        given = json.loads(call.arguments)
        wanted = tools[int(call.name.removeprefix("tool_"))].parameters
        assert isinstance(given, dict)
        assert set(wanted.get("required", ())) <= set(given)
        if wanted == {}:
            assert given == {}
        assert given.get("e") in ("<|END_ACTION|>", "ü", None)
        assert isinstance(given.get("x", 0), int)


# ---- response_format ----


def test_json_answers(rig: Rig) -> None:
    text = "Hm.<|END_THINKING|><|START_TEXT|>{}<|END_TEXT|><|END_OF_TURN_TOKEN|>"
    any_object = rig.grammar(tools=[], response_format={"type": "json_object"})
    assert rig.accepts(any_object, text.format('{"a": [1, {"b": null}]}'))
    assert not rig.accepts(any_object, text.format("[1]"))
    assert not rig.accepts(any_object, text.format("```json\n{}```"))
    by_schema = {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": OBJECT}}
    grammar = rig.grammar(tools=[], response_format=by_schema)
    assert rig.accepts(grammar, text.format('{"a": 12}'))
    assert not rig.accepts(grammar, text.format('{"a": "12"}'))
    assert not rig.accepts(grammar, text.format('{"b": 12}'))
    # A model that may call tools may still do so; one that must, does.
    both = rig.grammar(response_format=by_schema)
    calls = "<|END_THINKING|>" + CALLS.format(LS)
    assert rig.accepts(both, text.format('{"a": 12}'))
    assert rig.accepts(both, calls)
    assert not rig.accepts(rig.grammar(response_format=by_schema, tool_choice="required"), text.format('{"a": 12}'))


def test_json_answers_of_other_formats(rig: Rig) -> None:
    wanted = Turn([Message("user", "Hi")], response_format={"type": "json_object"})
    end = rig.ids[Marker.END_OF_TURN]
    plain = TemplateFormat(rig.tokenizer, "{{ messages[0].content }}", Sampling(), bos=None, eos=[end], tools=False)
    grammar = plain.grammar(wanted, rig.tokenizer.encode("Hi"))
    assert rig.accepts(grammar, '{"a": 1}<|END_OF_TURN_TOKEN|>')
    assert not rig.accepts(grammar, 'Sure: {"a": 1}<|END_OF_TURN_TOKEN|>')
    thinking = plain.grammar(wanted, rig.tokenizer.encode("Hi<think>"))
    assert rig.accepts(thinking, 'Hm {</think>\n\n{"a": 1}<|END_OF_TURN_TOKEN|>')
    assert not rig.accepts(thinking, 'Hm</think>No {"a": 1}<|END_OF_TURN_TOKEN|>')
    assert not rig.accepts(thinking, "Hm<|END_OF_TURN_TOKEN|>")


# ---- what is refused ----


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        (nested(100), "nested over 64 levels deep"),
        ({"properties": {"a": {"pattern": "a" * 5000}}}, "pattern of over 4096 characters"),
        ({"properties": {"a": {"enum": ["x" * 50] * 6000}}}, "over 256 KB"),
        ({"type": "array"}, "must be an object"),
    ],
)
def test_schemas_of_tools_beyond_the_limits_are_refused(rig: Rig, parameters: dict[str, Any], message: str) -> None:
    with pytest.raises(SchemaError, match=message) as raised:
        rig.grammar(tools=[NOW, ToolSpec("big", "", parameters)], tool_choice="required")
    assert raised.value.param == "tools"
    assert "\n" not in str(raised.value)
    rig.grammar(tools=[NOW, ToolSpec("big", "", parameters)])


@pytest.mark.parametrize(
    "parameters",
    [
        {"type": "object", "properties": {"a": {"type": "colour"}}},
        {"type": "object", "properties": {"a": {"type": "string", "pattern": "(?=x)y"}}},
        {"type": "object", "properties": {"a": {"type": "string", "pattern": "("}}},
        {"type": "object", "properties": {"a": {"$ref": "#/$defs/none"}}},
        {"type": "object", "properties": {"a": {"$ref": "http://127.0.0.1/x"}}},
        {"type": "object", "properties": 3},
        # The library panics when it shows so much of it.
        {"multipleOf": "a" * 97 + "ü" * 20},
        {"multipleOf": "a" * 98 + "ü" * 20},
    ],
    ids=json.dumps,
)
def test_schemas_that_make_no_sense_are_explained_in_one_line(rig: Rig, parameters: dict[str, Any]) -> None:
    wanted = {"type": "json_schema", "json_schema": {"schema": parameters}}
    problem = schema.problem(rig.grammar(tools=[], response_format=wanted))
    assert problem
    assert "\n" not in problem
    assert "start:" not in problem
    assert len(problem) <= 300


def test_the_costliest_schemas_are_looked_at_in_time(rig: Rig) -> None:
    costly = [
        {"type": "object", "properties": {"a": {"pattern": "^(([a-z]{1,40}[0-9]{1,40}){1,40}){1,10}$"}}},
        {"type": "object", "properties": {"a": {"enum": [f"x{n}" for n in range(20000)]}}},
        {"type": "object", "properties": {f"p{n}": {"type": "string"} for n in range(500)}},
    ]
    for parameters in costly:
        assert schema.problem(rig.grammar(tools=[ToolSpec("f", "", parameters)], tool_choice="f")) == ""
