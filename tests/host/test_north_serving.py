"""A small random North through the whole engine: HTTP, host, core. What it says is noise, so only form can hold."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from host_rig import Script, Served, set_environment
from north_checkpoint import write_checkpoint
from north_rig import north_tokenizer_file
from openai import OpenAI

from northchat.chat.north_parser import Marker
from northchat.model import catalog
from northchat.model.tokenizer import Tokenizer

PLACE = {"type": "string", "maxLength": 10}
TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "parameters": {"type": "object", "properties": {"place": PLACE}, "required": ["place"]},
        },
    },
    {"type": "function", "function": {"name": "now"}},
]
HELLO: list[Any] = [{"role": "user", "content": "Hello"}]


class North(Served):
    program = ("-m", "northchat.host.main")


@pytest.fixture(scope="module")
def served(short_tmp: Path) -> Iterator[North]:
    folder = short_tmp / "tiny-north"
    folder.mkdir()
    tokenizer = Tokenizer(north_tokenizer_file(folder))
    eos = tokenizer.token_id(Marker.END_OF_TURN)
    write_checkpoint(folder, vocab_size=tokenizer.vocab_size, eos_token_id=eos)
    with pytest.MonkeyPatch.context() as patch:
        set_environment(patch, short_tmp)
        patch.setenv("OMP_NUM_THREADS", "1")
        script = Script.__new__(Script)
        script.path = folder
        served = North(script).wait()
        yield served
        served.stop()


@pytest.fixture
def client(served: North) -> OpenAI:
    return OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0)


@pytest.fixture
def end_thinking(served: North) -> dict[str, int]:
    """A bias, for a random model thinks for long."""
    token = Tokenizer(served.script.path / "tokenizer.json").token_id(Marker.END_THINKING)
    return {str(token): 100}


def test_the_catalog_knows_north(served: North) -> None:
    model = catalog.resolve(str(served.script.path))
    assert (model.format, model.can_call_tools) == ("north", True)
    assert (model.defaults.temperature, model.defaults.top_p) == (1.0, 0.95)


def test_demanded_calls_come_whole_and_streamed(client: OpenAI, end_thinking: dict[str, int]) -> None:
    for seed in range(2):
        asked: dict[str, Any] = {
            "model": "x",
            "messages": HELLO,
            "tools": TOOLS,
            "tool_choice": "required",
            "seed": seed,
            "max_tokens": 2000,
            "logit_bias": end_thinking,
        }
        choice = client.chat.completions.create(**asked).choices[0]
        assert choice.finish_reason == "tool_calls"
        calls: list[Any] = list(choice.message.tool_calls or [])
        assert calls
        for call in calls:
            given = json.loads(call.function.arguments)
            assert call.function.name in ("weather", "now")
            assert list(given) == (["place"] if call.function.name == "weather" else [])
        streamed = [chunk.choices[0].delta for chunk in client.chat.completions.create(**asked, stream=True)]
        names = [call.function.name for delta in streamed for call in delta.tool_calls or [] if call.id]
        assert names == [call.function.name for call in calls]


def test_thinking_that_takes_too_long_is_closed_and_the_call_made_all_the_same(
    client: OpenAI, end_thinking: dict[str, int]
) -> None:
    never = dict.fromkeys(end_thinking, -100)
    choice = client.chat.completions.create(
        model="x",
        messages=HELLO,
        tools=TOOLS,
        tool_choice={"type": "function", "function": {"name": "weather"}},
        parallel_tool_calls=False,
        max_tokens=400,
        logit_bias=never,
        seed=1,
    ).choices[0]
    assert len(choice.message.reasoning_content) > 100  # type: ignore[attr-defined]
    (call,) = choice.message.tool_calls or []
    assert list(json.loads(call.function.arguments)) == ["place"]  # type: ignore[union-attr]


def test_json_by_schema(client: OpenAI, end_thinking: dict[str, int]) -> None:
    properties = {"ok": {"type": "boolean"}, "size": {"enum": [1, 2]}}
    schema = {"type": "object", "properties": properties, "required": ["ok", "size"], "additionalProperties": False}
    message = (
        client.chat.completions.create(
            model="x",
            messages=HELLO,
            response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": True}},
            logit_bias=end_thinking,
        )
        .choices[0]
        .message
    )
    answer = json.loads(message.content or "")
    assert answer["ok"] in (True, False)
    assert answer["size"] in (1, 2)


@pytest.mark.parametrize(
    ("asked", "param", "words"),
    [
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "array"}}}]}, "tools", "f"),
        (
            {
                "tools": [
                    {
                        "type": "function",
                        "function": {"name": "f", "parameters": {"properties": {"a": {"pattern": "("}}}},
                    }
                ]
            },
            "tools",
            "regex",
        ),
    ],
)
def test_schemas_that_can_not_be_enforced_are_refused_at_once(
    client: OpenAI, asked: dict[str, Any], param: str, words: str
) -> None:
    with pytest.raises(openai.BadRequestError) as raised:
        client.chat.completions.create(model="x", messages=HELLO, tool_choice="required", **asked)
    assert raised.value.param == param
    assert raised.value.code == "invalid_schema"
    assert words in raised.value.message.lower()
