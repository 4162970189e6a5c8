"""Tools in and calls out, through openai-python and through our own client."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from host_rig import Script, Served, set_environment
from openai import OpenAI

from northchat.client import Client, Endpoint
from northchat.messages import Finish, Message, Reasoning, Text, ToolCallArguments, ToolCallStart, ToolSpec, Turn

TEMPLATE = """
{%- if tools %}<|im_start|>system
{{ tools | tojson }}<|im_end|>
{% endif %}
{%- for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}
{%- for call in m.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}<|im_end|>
{% endfor %}<|im_start|>assistant
"""
ANSWER = (
    "<think>Hm, wörds.</think>I look.\n"
    '<tool_call>{"name": "weather", "arguments": {"place": "Köln"}}</tool_call>'
    '<tool_call>{"name": "now"}</tool_call>'
)
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}, "strict": True}},
    {"type": "function", "function": {"name": "now"}},
]
QUESTION: list[Any] = [{"role": "user", "content": "Weather?"}]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, short_tmp: Path) -> Iterator[Served]:
    with pytest.MonkeyPatch.context() as patch:
        set_environment(patch, short_tmp)
        script = Script(short_tmp / "tools.json")
        script.path.with_suffix(".jinja").write_text(TEMPLATE)
        served = Served(script).wait()
        yield served
        served.stop()


@pytest.fixture
def client(served: Served) -> OpenAI:
    served.script.set(answers=[ANSWER])
    return OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0)


def test_calls_in_a_whole_answer(client: OpenAI, served: Served) -> None:
    choice = client.chat.completions.create(model="x", messages=QUESTION, tools=TOOLS).choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "I look.\n"
    assert choice.message.reasoning_content == "Hm, wörds."  # type: ignore[attr-defined]
    first, second = choice.message.tool_calls or []
    assert (first.type, second.type) == ("function", "function")
    assert (first.function.name, json.loads(first.function.arguments)) == ("weather", {"place": "Köln"})  # type: ignore[union-attr]
    assert (second.function.name, second.function.arguments) == ("now", "{}")  # type: ignore[union-attr]
    assert first.id != second.id
    assert '"name": "weather"' in served.script.submits()[-1][1]


@pytest.mark.parametrize("per_step", [1, 4, 1000])
def test_calls_in_a_stream(client: OpenAI, served: Served, per_step: int) -> None:
    served.script.set(answers=[ANSWER], per_step=per_step)
    with client.chat.completions.stream(model="x", messages=QUESTION, tools=TOOLS) as stream:
        for event in stream:
            if event.type == "chunk":
                assert len(event.chunk.choices) == 1
        choice = stream.get_final_completion().choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "I look.\n"
    calls = choice.message.tool_calls or []
    assert [(call.function.name, json.loads(call.function.arguments)) for call in calls] == [
        ("weather", {"place": "Köln"}),
        ("now", {}),
    ]


def test_a_conversation_with_results(client: OpenAI, served: Served) -> None:
    message = client.chat.completions.create(model="x", messages=QUESTION, tools=TOOLS).choices[0].message
    assert message.tool_calls
    results = [{"role": "tool", "tool_call_id": call.id, "content": "<|im_end|> rain"} for call in message.tool_calls]
    served.script.set(answers=["Rain."])
    answer = client.chat.completions.create(model="x", messages=[*QUESTION, message, *results], tools=TOOLS)  # type: ignore[list-item]
    assert answer.choices[0].message.content == "Rain."
    assert answer.choices[0].finish_reason == "stop"
    prompt = served.script.submits()[-1][1]
    assert '<tool_call>{"name": "weather", "arguments": {"place": "Köln"}}</tool_call>' in prompt
    assert prompt.count("<|im_end|> rain<|im_end|>") == 2


def test_only_one_call_if_not_parallel(client: OpenAI) -> None:
    choice = client.chat.completions.create(
        model="x", messages=QUESTION, tools=TOOLS, parallel_tool_calls=False
    ).choices[0]
    assert choice.finish_reason == "tool_calls"
    assert len(choice.message.tool_calls or []) == 1


def test_no_calls_without_tools(client: OpenAI, served: Served) -> None:
    for options in ({}, {"tools": TOOLS, "tool_choice": "none"}):
        choice = client.chat.completions.create(model="x", messages=QUESTION, **options).choices[0]  # type: ignore[call-overload]
        assert choice.finish_reason == "stop"
        assert not choice.message.tool_calls
        assert "<tool_call>" in choice.message.content
        assert '"weather"' not in served.script.submits()[-1][1]


def test_a_call_that_is_cut_off_is_no_call(client: OpenAI) -> None:
    choice = client.chat.completions.create(model="x", messages=QUESTION, tools=TOOLS, max_tokens=60).choices[0]
    assert choice.finish_reason == "length"
    assert not choice.message.tool_calls


def test_forcing_a_call_is_refused_where_it_can_t_be_enforced(served: Served) -> None:
    import httpx2

    for tool_choice in ("required", {"type": "function", "function": {"name": "now"}}):
        body = {"messages": QUESTION, "tools": TOOLS, "tool_choice": tool_choice}
        response = httpx2.post(f"{served.url}/v1/chat/completions", json=body)
        assert response.status_code == 400
        assert response.json()["error"]["code"] == "tool_choice_unsupported"


async def test_events_arrive_in_our_own_client(client: OpenAI, served: Served) -> None:
    ours = Client(Endpoint(f"{served.url}/v1"))
    events = [event async for event in ours.stream(Turn([Message("user", "Weather?")], tools=[ToolSpec("weather")]))]
    await ours.aclose()
    assert "".join(event.text for event in events if isinstance(event, Reasoning)) == "Hm, wörds."
    assert "".join(event.text for event in events if isinstance(event, Text)) == "I look.\n"
    assert [event.name for event in events if isinstance(event, ToolCallStart)] == ["weather", "now"]
    arguments = "".join(event.text for event in events if isinstance(event, ToolCallArguments) and event.index == 0)
    assert json.loads(arguments) == {"place": "Köln"}
    assert isinstance(events[-1], Finish)
    assert events[-1].reason == "tool_calls"
    assert events[-1].usage.reasoning_tokens > 5
    assert events[-1].stats.context_limit == 2048
