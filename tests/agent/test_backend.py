import asyncio
from pathlib import Path
from typing import Any

import pytest
from scripted import Answer, Request, json_answer, serving, sse

from northchat.agent import backend
from northchat.agent.backend import Attachment, BackendError, Choice
from northchat.client import Client, ClientError, Endpoint, Health
from northchat.config import Config


def from_environment(url: str) -> Config:
    return Config(base_url=url, origins={"base_url": "OPENAI_BASE_URL"})


def test_a_named_server_is_the_endpoint_and_gets_the_key() -> None:
    config = Config(base_url="http://x/v1", api_key="k")
    assert backend.endpoint(config) == Endpoint("http://x/v1", api_key="k")


def test_a_gpu_that_is_not_there_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "GPU", Path("/nonexistent"))
    with pytest.raises(BackendError, match=r"no NVIDIA GPU.*--device cpu"):
        backend.endpoint(Config(device="cuda"))


async def test_a_launch_that_fails_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    from northchat.launch import Launch, LaunchError

    def ensure(self: Launch) -> Endpoint:
        raise LaunchError(f"no {self.model} on {self.device}")

    monkeypatch.setattr(Launch, "ensure", ensure)
    with pytest.raises(BackendError, match="no my-model on cpu"):
        await backend.connect(Config(model="my-model"))


def test_a_remote_server_of_the_environment_is_confirmed_once(home: Path) -> None:
    config = from_environment("https://api.example/v1")
    assert backend.needs_confirmation(config)
    backend.confirm(config)
    assert not backend.needs_confirmation(config)
    assert backend.needs_confirmation(from_environment("https://other.example/v1"))


@pytest.mark.parametrize("url", ["http://127.0.0.1:8000/v1", "http://localhost:1", "http://[::1]:8000"])
def test_this_machine_needs_no_confirmation(home: Path, url: str) -> None:
    assert not backend.needs_confirmation(from_environment(url))


def test_neither_does_a_server_that_the_user_named(home: Path) -> None:
    assert not backend.needs_confirmation(Config(base_url="https://x/v1", origins={"base_url": "--base-url"}))
    assert not backend.needs_confirmation(Config())


async def test_servers_are_found_on_ports_and_ours_is_not_offered() -> None:
    listed: Any = {"data": [{"id": "qwen3"}, {"id": "smol", "owned_by": "northchat"}]}
    async with (
        serving(lambda request: json_answer(listed)) as good,
        serving(lambda request: json_answer({"no": 1}, 404)) as bad,
    ):
        ports = {int(good.url.rpartition(":")[2]): "A", int(bad.url.rpartition(":")[2]): "B", 9: "C"}
        assert await backend.find_servers(ports) == [Choice("qwen3", f"{good.url}/v1", "A")]


KNOWN = [Choice("smol", None, "here"), Choice("qwen3", "http://a/v1", "a"), Choice("qwen3", "http://b/v1", "b")]


@pytest.mark.parametrize(
    ("wanted", "model", "url", "key"),
    [
        ("1", "smol", None, None),
        ("3", "qwen3", "http://b/v1", None),
        ("qwen3", "qwen3", "http://a/v1", "k"),
        ("http://c/v1", None, "http://c/v1", None),
        ("another", "another", "http://a/v1", "k"),
        ("./file.gguf", "./file.gguf", "http://a/v1", "k"),
    ],
)
def test_switching(wanted: str, model: str | None, url: str | None, key: str | None) -> None:
    config = Config(base_url="http://a/v1", api_key="k", theme="fjord")
    after = backend.switch(config, wanted, KNOWN)
    assert (after.model, after.base_url, after.api_key, after.theme) == (model, url, key, "fjord")


def states(*found: dict[str, Any], cut: bool = False, wait: float = 0) -> Any:
    def answer(request: Request) -> Answer:
        return Answer([*sse(*found, done=False), wait], cut=cut)

    return answer


async def test_an_attachment_reports_loading_and_becomes_ready() -> None:
    seen: list[Health] = []
    async with serving(states({"status": "loading"}, {"status": "ready", "model": "m"}, wait=30)) as server:
        client = Client(Endpoint(server.url))
        async with Attachment(client, seen.append) as attachment:
            assert (await attachment.ready()).model == "m"
            assert not attachment.lost
        assert [health.status for health in seen] == ["loading", "ready"]
        await asyncio.wait_for(server.cancelled.wait(), 2)
        await client.aclose()


@pytest.mark.parametrize(
    ("script", "match"),
    [
        (states({"status": "failed", "message": "no such model"}, wait=30), "no such model"),
        (states({"status": "failed"}, wait=30), "northchat logs"),
        (states({"status": "loading"}), "left"),
        (states({"status": "loading"}, cut=True), "broke"),
    ],
)
async def test_an_attachment_that_comes_to_nothing(script: Any, match: str) -> None:
    async with serving(script) as server:
        client = Client(Endpoint(server.url))
        async with Attachment(client) as attachment:
            with pytest.raises(ClientError, match=match):
                await attachment.ready()
        await client.aclose()
