import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from northchat import wire
from northchat.messages import (
    Event,
    Finish,
    Message,
    Progress,
    Reasoning,
    Sampling,
    Stats,
    Text,
    ToolCall,
    ToolCallArguments,
    ToolCallEnd,
    ToolCallStart,
    ToolSpec,
    Turn,
    Usage,
)


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def chunk(delta: dict[str, Any] | None = None, finish: str | None = None, **more: Any) -> wire.Chunk:
    choices = [] if delta is None else [{"index": 0, "delta": delta, "finish_reason": finish}]
    return wire.decode_chunk(json.dumps({"choices": choices, **more}))


def call(index: int | None = None, id: str | None = None, name: str | None = None, arguments: Any = None) -> Any:
    entry: dict[str, Any] = {"function": {}}
    entry |= {} if index is None else {"index": index}
    entry |= {} if id is None else {"id": id}
    entry["function"] |= {} if name is None else {"name": name}
    entry["function"] |= {} if arguments is None else {"arguments": arguments}
    return entry


def events(*chunks: wire.Chunk, limit: int | None = None) -> list[Event]:
    reply = wire.Reply(limit, Clock())
    found = [event for one in chunks for event in reply.feed(one)]
    return [*found, *reply.finish()]


def said(*chunks: wire.Chunk) -> list[Event]:
    return [event for event in events(*chunks) if not isinstance(event, Progress | Finish)]


def test_a_plain_turn_sends_only_what_was_asked_for() -> None:
    body = wire.request_body(Turn(messages=[Message("user", "hi")]), "m")
    assert body == {
        "model": "m",
        "messages": [{"role": "user", "content": "hi"}],
        "stream": True,
        "stream_options": {"include_usage": True},
    }


def test_everything_of_a_turn_reaches_the_body() -> None:
    turn = Turn(
        messages=[
            Message("assistant", "", "hm", [ToolCall("c1", "ls", '{"a":1}')], interrupted=True),
            Message("tool", "out", tool_call_id="c1"),
        ],
        tools=[ToolSpec("ls", "lists", {"type": "object"}), ToolSpec("now")],
        tool_choice="ls",
        parallel_tool_calls=False,
        sampling=Sampling(temperature=0.0, top_k=3, seed=7, logit_bias={5: -1.0}),
        stop=["END"],
        max_tokens=9,
        reasoning_effort="none",
        logprobs=2,
    )
    body = json.loads(json.dumps(wire.request_body(turn, "m")))
    assert body["messages"] == [
        {
            "role": "assistant",
            "content": "",
            "reasoning_content": "hm",
            "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "ls", "arguments": '{"a":1}'}}],
        },
        {"role": "tool", "content": "out", "tool_call_id": "c1"},
    ]
    assert [tool["function"]["name"] for tool in body["tools"]] == ["ls", "now"]
    assert body["tools"][1]["function"]["parameters"] == {"type": "object", "properties": {}}
    assert body["tool_choice"] == {"type": "function", "function": {"name": "ls"}}
    wanted = {
        "parallel_tool_calls": False,
        "temperature": 0.0,
        "top_k": 3,
        "seed": 7,
        "logit_bias": {"5": -1.0},
        "stop": ["END"],
        "max_tokens": 9,
        "reasoning_effort": "none",
        "logprobs": True,
        "top_logprobs": 2,
    }
    assert wanted.items() <= body.items()
    assert "min_p" not in body


@pytest.mark.parametrize("field", ["reasoning", "reasoning_content"])
def test_reasoning_under_either_name(field: str) -> None:
    assert said(chunk({field: "hm"}), chunk({"content": "yes"})) == [Reasoning("hm"), Text("yes")]


def test_reasoning_sent_under_both_names_counts_once() -> None:
    assert said(chunk({"reasoning": "hm", "reasoning_content": "hm"})) == [Reasoning("hm")]


def test_nulls_and_empty_chunks_say_nothing() -> None:
    assert said(chunk({"role": "assistant", "content": ""}), chunk({"content": None}), chunk(), chunk(usage=None)) == []
    assert said(wire.decode_chunk('{"choices": null, "id": 1, "unknown": {}}')) == []


def test_a_whole_answer_counts_as_one_chunk() -> None:
    whole = wire.decode_chunk('{"choices":[{"message":{"role":"assistant","content":"hi"},"finish_reason":"stop"}]}')
    assert said(whole) == [Text("hi")]


TWO_CALLS = [
    ToolCallStart(0, "a", "ls"),
    ToolCallArguments(0, '{"p"'),
    ToolCallArguments(0, ":1}"),
    ToolCallEnd(0),
    ToolCallStart(1, "b", "cat"),
    ToolCallArguments(1, "{}"),
    ToolCallEnd(1),
]


def test_tool_calls_as_the_standard_has_them() -> None:
    first = chunk({"tool_calls": [call(0, "a", "ls", "")]})
    pieces = [chunk({"tool_calls": [call(0, arguments=part)]}) for part in ('{"p"', ":1}")]
    second = chunk({"tool_calls": [call(1, "b", "cat", "{}")]})
    assert said(first, *pieces, second, chunk({}, "tool_calls")) == TWO_CALLS


def test_tool_calls_without_index() -> None:
    pieces = [
        call(id="a", name="ls", arguments='{"p"'),
        call(arguments=":1}"),
        call(id="b", name="cat", arguments="{}"),
    ]
    assert said(*(chunk({"tool_calls": [piece]}) for piece in pieces)) == TWO_CALLS


def test_tool_calls_that_all_have_index_0() -> None:
    pieces = [call(0, "a", "ls", '{"p"'), call(0, "a", arguments=":1}"), call(0, "b", "cat", "{}")]
    assert said(chunk({"tool_calls": pieces})) == TWO_CALLS


def test_tool_calls_without_id_get_one_and_object_arguments_become_json() -> None:
    start, arguments, end = said(chunk({"tool_calls": [call(name="ls", arguments={"p": [1]})]}))
    assert isinstance(start, ToolCallStart)
    assert start.id
    assert arguments == ToolCallArguments(0, '{"p":[1]}')
    assert end == ToolCallEnd(0)


@pytest.mark.parametrize(
    ("sent", "reason"),
    [("stop", "stop"), ("length", "length"), ("abort", "abort"), ("content_filter", "stop"), (None, "stop")],
)
def test_finish_reasons(sent: str | None, reason: str) -> None:
    assert events(chunk({"content": "x"}, sent))[-1].reason == reason


def test_calls_end_in_tool_calls_whatever_the_server_says() -> None:
    assert events(chunk({"tool_calls": [call(0, "a", "ls", "{}")]}, "stop"))[-1].reason == "tool_calls"


def test_usage_and_context() -> None:
    usage = {
        "prompt_tokens": 7,
        "completion_tokens": 3,
        "total_tokens": 10,
        "prompt_tokens_details": {"cached_tokens": 4},
        "completion_tokens_details": None,
    }
    finish = events(chunk({"content": "x"}, "stop"), chunk(usage=usage), limit=100)[-1]
    assert isinstance(finish, Finish)
    assert finish.usage == Usage(7, 3, 4, 0)
    assert (finish.stats.context_used, finish.stats.context_limit) == (10, 100)


def test_our_engines_figures_come_through_unmarked_and_add_up() -> None:
    found = events(
        chunk(northchat={"prefill_done": 1, "prefill_total": 2}),
        chunk({"content": "x"}, northchat={"tok_s": 50.0}),
        chunk({}, "stop", northchat={"context_limit": 8192}),
    )
    known = Stats(tok_s=50.0, prefill_done=1, prefill_total=2, context_limit=8192)
    assert found[0] == Progress(Stats(prefill_done=1, prefill_total=2))
    assert found[-1] == Finish("stop", Usage(), known)


def test_other_servers_figures_are_estimated_from_arrival() -> None:
    clock = Clock()
    reply = wire.Reply(clock=clock)
    clock.now += 0.5
    found: list[Event] = []
    for _ in range(40):
        found += reply.feed(chunk({"content": "x"}))
        clock.now += 0.05
    reports = [event.stats for event in found if isinstance(event, Progress)]
    assert all(stats.estimated for stats in reports)
    assert reports[-1].tok_s == pytest.approx(20, rel=0.01)
    assert reports[-1].ttft_s == pytest.approx(0.5)
    assert len(reports) <= 12
    list(reply.feed(chunk(usage={"prompt_tokens": 1, "completion_tokens": 79})))
    (finish,) = reply.finish()
    assert isinstance(finish, Finish)
    assert finish.stats.tok_s == pytest.approx(40, rel=0.01)


def test_llama_cpp_timings_are_the_engines_own() -> None:
    finish = events(chunk({"content": "x"}, "stop", timings={"predicted_per_second": 33.0, "prompt_n": 4}))[-1]
    assert isinstance(finish, Finish)
    assert (finish.stats.tok_s, finish.stats.estimated) == (33.0, False)


deltas = st.fixed_dictionaries(
    {},
    optional={
        "content": st.none() | st.text(max_size=3),
        "reasoning": st.none() | st.text(max_size=3),
        "tool_calls": st.none()
        | st.lists(
            st.builds(
                call,
                st.none() | st.integers(0, 2),
                st.none() | st.sampled_from(["", "a", "b"]),
                st.none() | st.sampled_from(["", "ls"]),
                st.none() | st.text(max_size=3),
            ),
            max_size=2,
        ),
    },
)


@given(st.lists(deltas))
def test_whatever_comes_calls_are_opened_once_and_closed(sent: list[dict[str, Any]]) -> None:
    found = events(*(chunk(delta) for delta in sent))
    assert "".join(e.text for e in found if isinstance(e, Text)) == "".join(d.get("content") or "" for d in sent)
    starts = [e.index for e in found if isinstance(e, ToolCallStart)]
    assert starts == list(range(len(starts)))
    assert [e.index for e in found if isinstance(e, ToolCallEnd)] == starts
    opened = 0
    for event in found:
        match event:
            case ToolCallStart(index):
                opened = index + 1
            case ToolCallArguments(index):
                assert index < opened
            case _:
                pass
    assert isinstance(found[-1], Finish)
