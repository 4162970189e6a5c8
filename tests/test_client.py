import asyncio
import itertools
import time
from pathlib import Path
from typing import Any

import pytest
from scripted import Answer, Request, Scripted, delta, json_answer, serving, sse

from northchat.client import Client, ClientError, Endpoint, ModelInfo
from northchat.messages import Event, Finish, Message, Sampling, Text, Turn

HELLO = Answer(sse(delta("hel"), delta("lo"), delta(finish="stop")))
TURN = Turn(messages=[Message("user", "hi")], sampling=Sampling(temperature=0.5))


def text(events: list[Event]) -> str:
    return "".join(event.text for event in events if isinstance(event, Text))


async def ask(answer: Any, model: str | None = "m") -> tuple[list[Event], Scripted]:
    replies = answer if callable(answer) else lambda request: answer
    async with serving(replies) as server:
        client = Client(Endpoint(server.url, api_key="key"))
        try:
            return [event async for event in client.stream(TURN, model)], server
        finally:
            await client.aclose()


async def test_an_answer_streams_and_the_request_is_what_the_turn_says() -> None:
    events, server = await ask(HELLO)
    assert text(events) == "hello"
    assert isinstance(events[-1], Finish)
    (request,) = server.requests
    assert (request.method, request.path) == ("POST", "/v1/chat/completions")
    assert request.headers["authorization"] == "Bearer key"
    assert request.body["temperature"] == 0.5
    assert request.body["model"] == "m"


@pytest.mark.parametrize(
    ("suffix", "path"),
    [
        ("", "/v1/chat/completions"),
        ("/", "/v1/chat/completions"),
        ("/v1", "/v1/chat/completions"),
        ("/v1/", "/v1/chat/completions"),
        ("/v1/chat/completions", "/v1/chat/completions"),
        ("/api/v3", "/api/v3/chat/completions"),
        ("/v1beta/openai", "/v1beta/openai/chat/completions"),
    ],
)
async def test_base_urls(suffix: str, path: str) -> None:
    async with serving(lambda request: HELLO) as server:
        client = Client(Endpoint(server.url + suffix))
        assert text([event async for event in client.stream(TURN, "m")]) == "hello"
        await client.aclose()
    assert [request.path for request in server.requests] == [path]


@pytest.mark.parametrize("versioned", [True, False])
async def test_a_path_without_version_is_found_out_by_asking_once(versioned: bool) -> None:
    base = "/proxy/v1" if versioned else "/proxy"

    def answer(request: Request) -> Answer:
        if request.path == f"{base}/models":
            return json_answer({"data": []})
        return HELLO if request.path == f"{base}/chat/completions" else json_answer({"error": "no"}, 404)

    async with serving(answer) as server:
        client = Client(Endpoint(server.url + "/proxy"))
        for _ in range(2):
            assert text([event async for event in client.stream(TURN, "m")]) == "hello"
        await client.aclose()
    assert [request.method for request in server.requests] == ["GET", "POST", "POST"]


@pytest.mark.parametrize("url", ["localhost:8000", "ftp://x", "http://", "nonsense", ""])
def test_what_is_no_base_url_is_refused(url: str) -> None:
    with pytest.raises(ClientError, match="no base URL"):
        Client(Endpoint(url))


async def test_over_a_unix_socket(tmp_path: Path) -> None:
    socket = str(tmp_path / "s")
    async with serving(lambda request: HELLO, socket) as server:
        client = Client(Endpoint(server.url, socket))
        assert text([event async for event in client.stream(TURN, "m")]) == "hello"
        await client.aclose()
    with pytest.raises(ClientError, match=r"local engine.*engine status") as caught:
        [event async for event in Client(Endpoint("http://x", str(tmp_path / "none"))).stream(TURN, "m")]
    assert caught.value.retryable


async def test_models_and_their_context_under_every_name() -> None:
    listed = [
        {"id": "vllm", "max_model_len": 10, "owned_by": "vllm"},
        {"id": "router", "context_length": 20},
        {"id": "llama.cpp", "meta": {"n_ctx_train": 30}},
        {"id": "ollama", "max_model_len": None, "meta": None},
        {"object": "no id"},
    ]
    async with serving(lambda request: json_answer({"object": "list", "data": listed})) as server:
        client = Client(Endpoint(server.url))
        found = await client.models()
        await client.aclose()
    assert found == [
        ModelInfo("vllm", 10, "vllm"),
        ModelInfo("router", 20),
        ModelInfo("llama.cpp", 30),
        ModelInfo("ollama", None),
    ]


async def test_without_a_model_the_servers_first_is_asked_and_its_context_known() -> None:
    def answer(request: Request) -> Answer:
        return json_answer({"data": [{"id": "first", "max_model_len": 77}]}) if request.method == "GET" else HELLO

    events, server = await ask(answer, model=None)
    assert server.requests[-1].body["model"] == "first"
    assert isinstance(events[-1], Finish)
    assert events[-1].stats.context_limit == 77


@pytest.mark.parametrize("body", [{"data": []}, {"data": None}, {}])
async def test_a_server_without_models_is_named(body: Any) -> None:
    with pytest.raises(ClientError, match="serves no model"):
        await ask(json_answer(body), model=None)


async def test_keep_alives_split_packets_and_missing_done() -> None:
    stream = b": keep-alive\n\n" + b"".join(sse(delta("h\u00e9l"), delta("lo"), delta(finish="stop"), done=False))
    pieces = [stream[at : at + 7] for at in range(0, len(stream), 7)]
    events, _ = await ask(Answer([*pieces]))
    assert text(events) == "h\u00e9llo"


async def test_a_server_that_does_not_stream() -> None:
    whole = {"choices": [{"message": {"content": "hello"}, "finish_reason": "stop"}], "usage": {"prompt_tokens": 1}}
    events, _ = await ask(json_answer(whole))
    assert text(events) == "hello"


@pytest.mark.parametrize("status", [429, 503])
async def test_a_busy_server_is_asked_again(status: int) -> None:
    replies = iter([json_answer({}, status, retry_after="0"), json_answer({}, status, retry_after="0"), HELLO])
    events, server = await ask(lambda request: next(replies))
    assert text(events) == "hello"
    assert len(server.requests) == 3


async def test_retry_after_is_honoured() -> None:
    replies = iter([json_answer({}, 503, retry_after="0.3"), HELLO])
    start = time.monotonic()
    await ask(lambda request: next(replies))
    assert time.monotonic() - start >= 0.3


async def test_retries_are_bounded_and_the_servers_words_are_kept() -> None:
    count = itertools.count()

    def answer(request: Request) -> Answer:
        next(count)
        return json_answer({"error": {"message": "Queue is full.", "code": "server_overloaded"}}, 503, retry_after="0")

    with pytest.raises(ClientError, match=r"^Queue is full\. Wait a little") as caught:
        await ask(answer)
    assert next(count) == 4
    assert caught.value.retryable
    assert caught.value.code == "server_overloaded"


@pytest.mark.parametrize(
    ("status", "body", "message", "remedy"),
    [
        (400, {"error": {"message": "bad\nthing", "code": 400}}, "bad thing", ""),
        (400, {"error": {"message": "too long", "code": "context_length_exceeded"}}, "too long", "/clear"),
        (401, {}, "wants an API key", "OPENAI_API_KEY"),
        (404, {"error": "model 'x' not found"}, "model 'x' not found", "--model"),
        (422, {"detail": [{"msg": "field required"}]}, "field required", ""),
        (500, {"message": "boom"}, "boom", ""),
    ],
)
async def test_refusals_are_one_line_and_not_repeated(status: int, body: Any, message: str, remedy: str) -> None:
    count = itertools.count()

    def answer(request: Request) -> Answer:
        next(count)
        return json_answer(body, status)

    with pytest.raises(ClientError) as caught:
        await ask(answer)
    assert next(count) == 1
    assert message in caught.value.message
    assert remedy in caught.value.remedy
    assert "\n" not in str(caught.value)


async def test_an_html_error_page_is_not_quoted() -> None:
    with pytest.raises(ClientError, match=r"^HTTP status 502$"):
        await ask(Answer([b"<html><body>Bad gateway</body></html>"], 502, "text/html"))


@pytest.mark.parametrize(
    ("answer", "match"),
    [
        (Answer([b"<html>hello</html>"], kind="text/html"), "answered with text/html"),
        (Answer([b"data: {broken\n\n"]), "no chat completion"),
        (Answer([b'data: {"choices": 5}\n\n']), "no chat completion"),
    ],
)
async def test_what_is_no_completion_points_at_the_base_url(answer: Answer, match: str) -> None:
    with pytest.raises(ClientError, match=match) as caught:
        await ask(answer)
    assert "--base-url" in caught.value.remedy


async def test_an_error_in_the_middle_of_a_stream() -> None:
    error = {"error": {"message": "engine restarted", "code": "engine_restarted"}}
    with pytest.raises(ClientError, match="engine restarted") as caught:
        await ask(Answer(sse(delta("hel"), error, done=False)))
    assert caught.value.retryable
    assert caught.value.code == "engine_restarted"


@pytest.mark.parametrize("cut", [True, False])
async def test_a_stream_that_ends_early_is_an_error_and_never_repeated(cut: bool) -> None:
    count = itertools.count()

    def answer(request: Request) -> Answer:
        next(count)
        return Answer(sse(delta("hel"), done=False), cut=cut)

    with pytest.raises(ClientError, match=r"broke|early") as caught:
        await ask(answer)
    assert caught.value.retryable
    assert next(count) == 1


async def test_nobody_listens() -> None:
    with pytest.raises(ClientError, match=r"Can't reach http://127.0.0.1:9.*--base-url"):
        [event async for event in Client(Endpoint("http://127.0.0.1:9")).stream(TURN, "m")]


@pytest.mark.parametrize("how", ["close the iterator", "cancel the task"])
async def test_to_stop_reading_ends_the_request_on_the_server(how: str) -> None:
    async with serving(lambda request: Answer([*sse(delta("hel"), done=False), 30.0])) as server:
        client = Client(Endpoint(server.url))
        events = client.stream(TURN, "m")
        assert await anext(events) == Text("hel")
        if how == "close the iterator":
            await events.aclose()
        else:

            async def read() -> None:
                async for _ in events:
                    pass

            task = asyncio.create_task(read())
            await asyncio.sleep(0.05)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        await asyncio.wait_for(server.cancelled.wait(), 2)
        await client.aclose()


async def test_stopping_while_data_arrives_leaves_nothing_behind(tmp_path: Path) -> None:
    """Readable and cancelled in the same turn of the event loop."""
    complaints: list[Any] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: complaints.append(context))
    more = asyncio.Event()
    parts = [*sse(delta("hel"), done=False), more, *sse(delta("lo"), done=False), 30.0]
    socket = str(tmp_path / "s")
    async with serving(lambda request: Answer(parts), socket) as server:
        client = Client(Endpoint(server.url, socket))
        events = client.stream(TURN, "m")
        assert await anext(events) == Text("hel")

        async def read() -> None:
            async for _ in events:
                pass

        task = asyncio.create_task(read())
        await asyncio.sleep(0.05)
        more.set()
        for _ in range(3):
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.wait_for(server.cancelled.wait(), 2)
        await client.aclose()
    assert complaints == []


async def test_a_proxy_of_the_environment_is_not_asked_for_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    monkeypatch.setenv("ALL_PROXY", "http://127.0.0.1:9")
    events, _ = await ask(HELLO)
    assert text(events) == "hello"


async def test_attach_tells_each_change_until_the_host_leaves() -> None:
    states = [{"status": "loading", "progress": {"what": "weights", "done": 1, "total": 2}}, {"status": "ready"}]
    async with serving(lambda request: Answer([b": keep-alive\n\n", *sse(*states, done=False)])) as server:
        client = Client(Endpoint(server.url))
        found = [health async for health in client.attach()]
        await client.aclose()
    assert [health.status for health in found] == ["loading", "ready"]
    assert found[0].progress is not None
    assert found[0].progress.total == 2
    assert server.requests[0].path == "/northchat/attach"


async def test_attach_raises_when_the_host_is_killed() -> None:
    async with serving(lambda request: Answer(sse({"status": "ready"}, done=False), cut=True)) as server:
        client = Client(Endpoint(server.url))
        states = client.attach()
        assert (await anext(states)).status == "ready"
        with pytest.raises(ClientError):
            await anext(states)
        await client.aclose()


async def test_health_is_read_from_a_loading_host_too() -> None:
    async with serving(lambda request: json_answer({"status": "loading", "dtype": None}, 503)) as server:
        client = Client(Endpoint(server.url))
        assert (await client.health()).status == "loading"
        await client.aclose()
