"""Answers with think and tool_call tags."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_stream import cut

from northchat.chat.stream import Accumulator
from northchat.chat.tags import TagParser
from northchat.messages import Event, Message, Text, ToolCallStart
from northchat.model.tokenizer import Tokenizer


def ids_of(tokenizer: Tokenizer, text: str) -> list[int]:
    """As a model writes it: tags are single ids."""
    ids: list[int] = []
    while text:
        found = [(text.find(marker), marker) for marker in tokenizer.markers if marker in text]
        at, marker = min(found, default=(len(text), ""))
        ids += tokenizer.encode(text[:at]) + ([tokenizer.markers[marker]] if marker else [])
        text = text[at + len(marker) :]
    return ids


def parse(
    tokenizer: Tokenizer, ids: list[int], seed: int | None = None, stops: tuple[str, ...] = (), **options: bool
) -> tuple[Message, TagParser]:
    parser = TagParser(tokenizer, stops, **{"thinking": False, "tools": True, **options})
    answer = Accumulator()
    events: list[Event] = []
    for piece in [ids] if seed is None else cut(ids, seed):
        events += parser.feed(piece)
    for event in events + parser.finish():
        answer.add(event)
    return answer.message, parser


def without_ids(message: Message) -> bytes:
    for call in message.tool_calls:
        call.id = ""
    return msgspec.json.encode(message)


def test_reasoning_text_and_calls(tokenizer: Tokenizer) -> None:
    call = '<tool_call>\n{"name": "get", "arguments": {"place": "Köln"}}\n</tool_call>'
    ids = ids_of(tokenizer, f"<think>\nLet me see.\n</think>\n\nI look.{call}{call}<|im_end|>")
    message, parser = parse(tokenizer, ids)
    assert message.reasoning == "Let me see.\n"
    assert message.content == "I look."
    assert [(each.name, each.arguments) for each in message.tool_calls] == [("get", '{"place":"Köln"}')] * 2
    assert len({each.id for each in message.tool_calls}) == 2
    assert parser.called
    assert not parser.done


def test_reasoning_that_the_prompt_has_opened(tokenizer: Tokenizer) -> None:
    message, _ = parse(tokenizer, ids_of(tokenizer, "hm</think>yes"), thinking=True)
    assert (message.reasoning, message.content) == ("hm", "yes")


def test_only_one_call_when_calls_may_not_be_parallel(tokenizer: Tokenizer) -> None:
    call = '<tool_call>{"name": "get"}</tool_call>'
    message, parser = parse(tokenizer, ids_of(tokenizer, call + call), parallel=False)
    assert len(message.tool_calls) == 1
    assert message.tool_calls[0].arguments == "{}"
    assert parser.done


@pytest.mark.parametrize(
    "body",
    ["no JSON", '{"arguments": {}}', '{"name": 3}', pytest.param("[" * 100_000, id="deep"), '{"name": "f", "argu'],
)
def test_what_is_no_call_is_given_back_as_text(tokenizer: Tokenizer, body: str) -> None:
    message, parser = parse(tokenizer, ids_of(tokenizer, f"so: <tool_call>{body}</tool_call> done"))
    assert message.content == f"so: <tool_call>{body}</tool_call> done"
    assert not message.tool_calls
    assert not parser.called


def test_a_call_whose_end_is_missing_counts_if_it_is_whole(tokenizer: Tokenizer) -> None:
    message, _ = parse(tokenizer, ids_of(tokenizer, '<tool_call>{"name": "get", "arguments": {"a": 1}}'))
    assert message.tool_calls[0].arguments == '{"a":1}'


def test_calls_are_text_when_no_tools_were_offered(tokenizer: Tokenizer) -> None:
    text = '<tool_call>{"name": "get"}</tool_call>'
    message, _ = parse(tokenizer, ids_of(tokenizer, text), tools=False)
    assert message.content == text


def test_stop_strings_concern_text_only(tokenizer: Tokenizer) -> None:
    ids = ids_of(tokenizer, "<think>STOP</think>one STOP two")
    message, parser = parse(tokenizer, ids, stops=("STOP",))
    assert (message.reasoning, message.content) == ("STOP", "one ")
    assert parser.done


def test_a_call_is_seen_before_the_answer_ends(tokenizer: Tokenizer) -> None:
    parser = TagParser(tokenizer, (), thinking=False, tools=True)
    events = parser.feed(ids_of(tokenizer, '<tool_call>{"name": "get"}</tool_call>'))
    assert isinstance(events[0], ToolCallStart)
    assert parser.feed(tokenizer.encode("x")) == [Text("x")]


PIECES = st.sampled_from(
    [
        *(
            "<think>",
            "</think>",
            "<tool_call>",
            "</tool_call>",
            "<|im_end|>",
            "<",
            "<thi",
            "</tool",
            "nk>",
            "STOP",
            "ST",
        ),
        *("text ", "\n", '{"name": "f", "arguments": {"x": "ü"}}', '{"name"', "🎉"),
    ]
)


@given(st.lists(PIECES, max_size=12).map("".join), st.integers(), st.booleans(), st.booleans())
def test_events_don_t_depend_on_the_pieces(
    tokenizer: Tokenizer, text: str, seed: int, thinking: bool, tools: bool
) -> None:
    for ids in (ids_of(tokenizer, text), tokenizer.encode(text)):
        options = {"thinking": thinking, "tools": tools}
        whole, first = parse(tokenizer, ids, stops=("STOP",), **options)
        parts, second = parse(tokenizer, ids, seed, stops=("STOP",), **options)
        assert without_ids(whole) == without_ids(parts)
        assert (first.done, first.called) == (second.done, second.called)
