"""/v1/chat/completions over TCP: openai-python as the client, and raw requests for what it would not send."""

import json
from typing import Any

import httpx2
import openai
import pytest
from host_rig import Served, until
from openai import OpenAI

HELLO = [{"role": "user", "content": "Hi"}]


@pytest.fixture
def client(served: Served) -> OpenAI:
    served.script.set()
    return OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0)


def ask(served: Served, body: Any, **headers: str) -> httpx2.Response:
    content = body if isinstance(body, (bytes, str)) else json.dumps(body)
    return httpx2.post(
        f"{served.url}/v1/chat/completions", content=content, headers={"content-type": "application/json"} | headers
    )


def events(response: httpx2.Response) -> list[Any]:
    """The data of a stream; every line must be one, a comment, or empty."""
    assert response.headers["content-type"].startswith("text/event-stream")
    data = []
    for line in response.text.split("\n"):
        assert not line or line.startswith(("data: ", ":"))
        if line.startswith("data: "):
            data.append(line.removeprefix("data: "))
    return [each if each == "[DONE]" else json.loads(each) for each in data]


def test_an_answer(client: OpenAI, served: Served) -> None:
    served.script.set(answers=["Hello, wörld 🎉"])
    answer = client.chat.completions.create(model="whatever", messages=HELLO)  # type: ignore[arg-type]
    assert answer.choices[0].message.content == "Hello, wörld 🎉"
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.model == "scripted"
    assert answer.usage is not None
    assert answer.usage.prompt_tokens > 2
    assert answer.usage.completion_tokens == len("Hello, wörld 🎉".encode()) + 1
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


@pytest.mark.parametrize("per_step", [1, 2, 3, 5, 100])
def test_a_streamed_answer_is_the_same(client: OpenAI, served: Served, per_step: int) -> None:
    text = "日本語 and 🎉 emoji, then STOP here"
    served.script.set(answers=[text], per_step=per_step)
    whole = client.chat.completions.create(model="x", messages=HELLO, stop=["STOP", "and f"])  # type: ignore[arg-type]
    stream = client.chat.completions.create(
        model="x",
        messages=HELLO,  # type: ignore[arg-type]
        stop=["STOP", "and f"],
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    contents = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
    assert "".join(contents) == whole.choices[0].message.content == "日本語 and 🎉 emoji, then "
    assert not any("\ufffd" in content for content in contents)
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "stop"
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert whole.usage is not None
    assert chunks[-1].usage.prompt_tokens == whole.usage.prompt_tokens


def test_the_form_of_a_stream(served: Served) -> None:
    served.script.set(answers=["ab"])
    body = {"messages": HELLO, "stream": True}
    *chunks, done = events(ask(served, body))
    assert done == "[DONE]"
    assert chunks[0]["choices"] == [{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}]
    assert all("role" not in chunk["choices"][0]["delta"] for chunk in chunks[1:])
    assert chunks[-1]["choices"] == [{"index": 0, "delta": {}, "finish_reason": "stop"}]
    # Without include_usage there is neither usage nor a chunk without choices.
    assert all(len(chunk["choices"]) == 1 and "usage" not in chunk for chunk in chunks)
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert chunks[-1]["northchat"]["context_limit"] == 2048
    assert chunks[-1]["northchat"]["tok_s"] == 100.0


def test_a_long_prefill_is_bridged_by_comments(served: Served) -> None:
    served.script.set(answers=["ab"], prefill=0.15)
    response = ask(served, {"messages": HELLO, "stream": True})
    # Never `: ping`, which Continue takes for the end, and never an id.
    comments = [line for line in response.text.split("\n") if line.startswith(":")]
    assert len(comments) >= 3
    assert set(comments) == {": keep-alive"}
    assert all(chunk == "[DONE]" or chunk["choices"][0]["delta"] is not None for chunk in events(response))
    # Progress is for those who ask, as our own front ends do.
    body = {"messages": HELLO, "stream": True, "stream_options": {"include_progress": True}}
    done = [chunk["northchat"].get("prefill_done") for chunk in events(ask(served, body))[1:-1]]
    assert done == sorted(done)
    assert len(set(done)) > 3


def test_an_error_behind_the_headers_is_an_event_and_no_finish(served: Served) -> None:
    served.script.set(error_on="Hi")
    chunks = events(ask(served, {"messages": HELLO, "stream": True}))
    assert chunks[-1]["error"]["code"] == "engine_error"
    assert "scripted failure" in chunks[-1]["error"]["message"]
    assert all(chunk["choices"][0]["finish_reason"] is None for chunk in chunks[:-1])
    response = ask(served, {"messages": HELLO})
    assert response.status_code == 500
    assert response.headers["x-should-retry"] == "false"


def test_length(client: OpenAI, served: Served) -> None:
    served.script.set(answers=["abcdef"])
    for limits in ({"max_tokens": 3}, {"max_completion_tokens": 3}, {"max_tokens": 3, "max_completion_tokens": 9}):
        answer = client.chat.completions.create(model="x", messages=HELLO, **limits)  # type: ignore[call-overload]
        assert answer.choices[0].message.content == "abc"
        assert answer.choices[0].finish_reason == "length"


def test_a_limit_beyond_the_context_is_clamped(client: OpenAI, served: Served) -> None:
    client.chat.completions.create(model="x", messages=HELLO, max_tokens=32_000)  # type: ignore[arg-type]
    limit, prompt = served.script.submits()[-1]
    assert limit == 2048 - len(prompt.encode()) + sum(
        len(marker) - 1 for marker in ("<|im_start|>", "<|im_end|>") for _ in range(prompt.count(marker))
    )


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_that_is_too_long(client: OpenAI, stream: bool) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(
            model="x",
            messages=[{"role": "user", "content": "x" * 3000}],
            stream=stream,
        )
    assert caught.value.code == "context_length_exceeded"
    assert "This model's maximum context length is 2048 tokens." in caught.value.message
    assert "reduce the length of the messages" in caught.value.message


def test_several_answers(client: OpenAI, served: Served) -> None:
    served.script.set(answers=["one", "two", "three"], delay=0.001)
    answer = client.chat.completions.create(model="x", messages=HELLO, n=3)  # type: ignore[arg-type]
    assert sorted(choice.message.content or "" for choice in answer.choices) == ["one", "three", "two"]
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    texts: dict[int, str] = {}
    ends = []
    for chunk in client.chat.completions.create(model="x", messages=HELLO, n=3, stream=True):  # type: ignore[arg-type]
        for choice in chunk.choices:
            texts[choice.index] = texts.get(choice.index, "") + (choice.delta.content or "")
            ends += [choice.index] if choice.finish_reason else []
    assert sorted(texts.values()) == ["one", "three", "two"]
    assert sorted(ends) == [0, 1, 2]


@pytest.mark.parametrize("stream", [False, True])
def test_log_probabilities_belong_to_the_text(client: OpenAI, served: Served, stream: bool) -> None:
    served.script.set(answers=["aé"])
    request: dict[str, Any] = {"model": "x", "messages": HELLO, "logprobs": True, "top_logprobs": 2}
    if stream:
        chunks = list(client.chat.completions.create(**request, stream=True))
        entries = [entry for chunk in chunks for entry in getattr(chunk.choices[0].logprobs, "content", None) or []]
    else:
        logprobs = client.chat.completions.create(**request).choices[0].logprobs
        assert logprobs is not None
        entries = logprobs.content or []
    assert bytes(byte for entry in entries for byte in entry.bytes or []).decode() == "aé"
    assert [entry.logprob for entry in entries] == [-0.25] * 3
    assert [top.token for top in entries[0].top_logprobs] == ["A", "B"]


def test_history_is_replayed_and_texts_forge_nothing(client: OpenAI, served: Served) -> None:
    served.script.set(answers=["  One.  "])
    first = client.chat.completions.create(model="x", messages=HELLO).choices[0].message  # type: ignore[arg-type]
    for answer in (first.content, (first.content or "").strip()):
        messages = [*HELLO, {"role": "assistant", "content": answer}, {"role": "user", "content": "<|im_end|>"}]
        client.chat.completions.create(model="x", messages=messages)  # type: ignore[arg-type]
        _, prompt = served.script.submits()[-1]
        assert "assistant\n  One.  <|im_end|>\n<|im_start|>user\n<|im_end|><|im_end|>\n" in prompt


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}],
        [{"role": "developer", "content": "x"}, {"role": "user", "content": "Hi"}],
        [{"role": "user", "content": "a"}, {"role": "user", "content": "Hi"}],
        [{"role": "user", "content": "a"}, {"role": "system", "content": "b"}, {"role": "user", "content": "Hi"}],
        [
            {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "function": {"name": "f"}}]},
            {"role": "tool", "tool_call_id": "1", "content": [{"type": "text", "text": "Hi"}]},
        ],
        [{"role": "assistant", "content": [], "tool_calls": []}, {"role": "user", "content": "Hi"}],
        [
            {"role": "assistant", "content": "a", "reasoning_content": "b", "refusal": None},
            {"role": "user", "content": "Hi"},
        ],
    ],
)
def test_what_clients_send_is_understood(served: Served, messages: list[Any]) -> None:
    served.script.set()
    response = ask(served, {"messages": messages})
    assert response.status_code == 200
    assert "Hi" in served.script.submits()[-1][1]


def test_unknown_and_null_fields_are_ignored(served: Served) -> None:
    served.script.set()
    extras = {"prompt_cache_key": "x", "store": False, "metadata": {}, "user": "u", "verbosity": "low", "strict": True}
    nulls = dict.fromkeys(
        ("tools", "tool_choice", "parallel_tool_calls", "stop", "max_tokens", "n", "seed", "logit_bias")
    )
    response = ask(served, {"messages": HELLO, "tools": [], **extras, **nulls})
    assert response.status_code == 200


TOOL = {"type": "function", "function": {"name": "f", "parameters": {}}}


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, "messages[0].content"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": "many"}, "max_tokens"),
        ({"n": 0}, "n"),
        ({"n": 9}, "n"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": 1e400}, None),
        ({"top_p": 0}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"top_logprobs": 21, "logprobs": True}, "top_logprobs"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"stop": ["x"] * 17}, "stop"),
        ({"logit_bias": {"a": 1}}, "logit_bias"),
        ({"logit_bias": {"99999": 1}}, "logit_bias"),
        ({"seed": 1 << 70}, "seed"),
        ({"reasoning_effort": "much"}, "reasoning_effort"),
        ({"response_format": {"type": "xml"}}, "response_format"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "x"}}}}, "response_format"),
        ({"tools": [TOOL]}, "tools"),
        ({"tools": [{"type": "web_search"}]}, "tools[0]"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "g"}}}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": "always"}, "tool_choice"),
    ],
)
def test_bad_fields_are_named(served: Served, change: dict[str, Any], param: str | None) -> None:
    response = ask(served, {"messages": HELLO, **change})
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert error["param"] == param
    assert error["message"]
    assert "\n" not in error["message"]


def test_tools_are_no_error_when_none_is_to_be_called(served: Served) -> None:
    served.script.set()
    assert ask(served, {"messages": HELLO, "tools": [TOOL], "tool_choice": "none"}).status_code == 200


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ("", 400),
        ("{", 400),
        ("[]", 400),
        ('"x"', 400),
        ("null", 400),
        ("{}", 400),
        (b"\xff\xfe", 400),
        pytest.param('{"messages": ' + "[" * 100_000, 400, id="deep"),
        pytest.param('{"messages": [{"role": "user", "content": "' + "x" * (33 << 20) + '"}]}', 413, id="huge"),
    ],
)
def test_bodies_that_are_no_requests(served: Served, body: str | bytes, status: int) -> None:
    response = ask(served, body)
    assert response.status_code == status
    assert response.json()["error"]["message"]


def test_other_content_types_are_refused(served: Served) -> None:
    response = ask(served, {"messages": HELLO}, **{"content-type": "text/plain"})
    assert response.status_code == 415
    assert response.json()["error"]["code"] == "unsupported_media_type"


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_ends_its_request(served: Served, stream: bool) -> None:
    served.script.set(delay=0.05)
    before = len(served.script.log)
    with pytest.raises(httpx2.TimeoutException):
        httpx2.post(
            f"{served.url}/v1/chat/completions", json={"messages": [HELLO[0] | {"content": "x" * 200}]}, timeout=0.3
        ) if not stream else _read_a_little(served)
    until(lambda: any(line.startswith("abort") for line in served.script.log[before:]))


def _read_a_little(served: Served) -> None:
    body = {"messages": [HELLO[0] | {"content": "x" * 200}], "stream": True}
    with httpx2.stream("POST", f"{served.url}/v1/chat/completions", json=body, timeout=0.5) as response:
        next(response.iter_lines())
        raise httpx2.ReadTimeout("enough")
