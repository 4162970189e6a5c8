"""Who answers: our own engine, the server that was named, or one found on this machine."""

import asyncio
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import Self
from urllib.parse import urlsplit

import msgspec

from northchat import paths
from northchat.client import Client, ClientError, Endpoint, Health
from northchat.config import Config

DEFAULT_MODEL = "smollm2-135m"
SERVERS = {11434: "Ollama", 1234: "LM Studio", 8000: "port 8000", 8080: "port 8080"}
"""Loopback ports where local servers usually listen."""
GPU = Path("/dev/nvidiactl")
_LOOPBACK = {"localhost", "127.0.0.1", "::1"}
_PROBE_S = 1.0


class BackendError(Exception):
    """Nobody can answer: one line with cause and remedy."""


@dataclass(frozen=True)
class Choice:
    """A model that can be switched to; base_url None is our own engine."""

    model: str
    base_url: str | None
    where: str


def endpoint(config: Config) -> Endpoint:
    """Where to send requests, starting our host if need be (half a second at most; loading goes on behind).

    Raises BackendError.
    """
    if config.base_url is not None:
        return Endpoint(config.base_url, api_key=config.api_key)
    from northchat.launch import Launch, LaunchError

    check_device(config)
    try:
        return Launch(config.model or DEFAULT_MODEL, config.device or "cpu").ensure()
    except (LaunchError, paths.PathError) as error:
        raise BackendError(str(error)) from error


def check_device(config: Config) -> None:
    """Raises BackendError when our engine is to run on a device that isn't there."""
    if config.device == "cuda" and not GPU.exists():
        raise BackendError("device cuda: this machine has no NVIDIA GPU, or no driver for it; use --device cpu")


async def connect(config: Config) -> Client:
    """Raises BackendError."""
    try:
        return Client(await asyncio.to_thread(endpoint, config))
    except ClientError as error:
        raise BackendError(str(error)) from error


class Attachment:
    """Our host's view of itself for as long as this is entered; the host counts us as a client meanwhile."""

    def __init__(self, client: Client, on_change: Callable[[Health], None] = lambda health: None) -> None:
        self.health: Health | None = None
        self._client = client
        self._on_change = on_change
        self._settled = asyncio.Event()
        self._error: ClientError | None = None
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self._follow())
        return self

    async def __aexit__(self, *exception: object) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    @property
    def lost(self) -> bool:
        """The host left or died."""
        return self._error is not None

    async def ready(self) -> Health:
        """The state in which requests are served. Raises ClientError when that can't come to be."""
        await self._settled.wait()
        if self._error is not None:
            raise self._error
        assert self.health is not None
        if self.health.status == "failed":
            raise ClientError(self.health.message or "The engine failed; `northchat logs` tells why", code="failed")
        return self.health

    async def _follow(self) -> None:
        try:
            async with aclosing(self._client.attach()) as states:
                async for self.health in states:
                    self._on_change(self.health)
                    if self.health.status == "loading":
                        self._settled.clear()
                    else:
                        self._settled.set()
            raise ClientError("The local engine left", "Start northchat again", retryable=True, code="host_gone")
        except ClientError as error:
            self._error = error
            self._settled.set()


def needs_confirmation(config: Config) -> bool:
    """Whether a remote server stands in the environment alone and the user never agreed to it."""
    if config.base_url is None or config.origins.get("base_url") != "OPENAI_BASE_URL":
        return False
    return urlsplit(config.base_url).hostname not in _LOOPBACK and config.base_url not in _confirmed()


def confirm(config: Config) -> None:
    """Remember that the user agreed."""
    file = _confirmations()
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("a", encoding="utf-8") as lines:
        lines.write(f"{config.base_url}\n")


def _confirmations() -> Path:
    return paths.state_dir() / "confirmed-servers"


def _confirmed() -> list[str]:
    try:
        return _confirmations().read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError):
        return []


async def find_servers(ports: dict[int, str] = SERVERS) -> list[Choice]:
    """Models that servers on this machine's usual ports offer; takes about a second at most."""
    found = await asyncio.gather(*(_probe(port, name) for port, name in ports.items()))
    return [choice for choices in found for choice in choices]


async def _probe(port: int, name: str) -> list[Choice]:
    url = f"http://127.0.0.1:{port}/v1"
    try:
        # A refused connection is the usual case; finding that out needs no HTTP client.
        _, writer = await asyncio.wait_for(asyncio.open_connection("127.0.0.1", port), _PROBE_S)
        writer.close()
        client = Client(Endpoint(url))
        try:
            models = await asyncio.wait_for(client.models(), _PROBE_S)
        finally:
            await client.aclose()
    except (OSError, TimeoutError, ClientError):
        return []
    return [Choice(model.id, url, name) for model in models if model.owned_by != "northchat"]


async def choices(config: Config, client: Client) -> list[Choice]:
    """What `/model` lists: our own default, what the current server has, what is found on this machine."""
    known = [Choice(DEFAULT_MODEL, None, "this machine")]
    if config.base_url is None and config.model not in (None, DEFAULT_MODEL):
        known.append(Choice(str(config.model), None, "this machine"))
    if config.base_url is not None:
        try:
            here = urlsplit(config.base_url).netloc
            known += [Choice(model.id, config.base_url, here) for model in await client.models()]
        except ClientError:
            pass
    ports = {port: name for port, name in SERVERS.items() if urlsplit(config.base_url or "").port != port}
    return known + await find_servers(ports)


def switch(config: Config, wanted: str, known: list[Choice]) -> Config:
    """The settings after `/model WANTED`: a number or name from the list, a URL, or a model for the current server.

    An API key stays with the server it was meant for.
    """
    numbered = {str(number): choice for number, choice in enumerate(known, 1)}
    named = {choice.model: choice for choice in reversed(known)}
    if choice := numbered.get(wanted) or named.get(wanted):
        model, base_url = choice.model, choice.base_url
    elif wanted.startswith(("http://", "https://")):
        model, base_url = None, wanted
    else:
        model, base_url = wanted, config.base_url
    return msgspec.structs.replace(
        config,
        model=model,
        base_url=base_url,
        api_key=config.api_key if base_url == config.base_url else None,
        origins=config.origins | {"model": "/model", "base_url": "/model"},
    )
