"""Keeps a connection to whoever answers: starts our host, follows its state, starts it again when it died."""

import asyncio
import threading
from collections.abc import Callable
from contextlib import aclosing
from typing import TypeVar
from urllib.parse import urlsplit

from northchat.agent import backend
from northchat.client import Client, ClientError, Endpoint, Health
from northchat.config import Config

RESTARTS = 3
"""In a row, without having been ready in between; then the user decides."""

Result = TypeVar("Result")
Locate = Callable[[Config], Endpoint]


class Link:
    """`client` is None until there is somebody to talk to.

    on_health is told each change of our host; on_lost that it went away and is being started again; on_failure that
    nobody can answer until `run` is called anew.
    """

    def __init__(
        self,
        config: Config,
        *,
        on_health: Callable[[Health], None],
        on_lost: Callable[[str], None],
        on_failure: Callable[[str, str], None],
        locate: Locate = backend.endpoint,
        client: Callable[[Endpoint], Client] = Client,
    ) -> None:
        self.config = config
        self.client: Client | None = None
        self.health: Health | None = None
        self._on_health, self._on_lost, self._on_failure = on_health, on_lost, on_failure
        self._locate, self._make_client = locate, client

    @property
    def remote(self) -> str:
        """Host and port of a server that isn't ours."""
        return urlsplit(self.config.base_url).netloc if self.config.base_url else ""

    @property
    def ready(self) -> bool:
        return self.client is not None and self.health is not None and self.health.status == "ready"

    async def run(self) -> None:
        """Returns when nobody can answer; being cancelled is the usual end."""
        lost = 0
        try:
            while True:
                try:
                    self.client = self._make_client(await _in_thread(lambda: self._locate(self.config)))
                    if self.remote:
                        await self._greet(self.client)
                        return
                    await self._follow(self.client)
                    why = "The engine has left"
                except backend.BackendError as error:
                    self._on_failure(str(error), "")
                    return
                except ClientError as error:
                    if self.remote:
                        self._on_failure(error.message, error.remedy)
                        return
                    why = error.message
                if self.health is not None and self.health.status == "failed":
                    return
                lost = 1 if self.ready else lost + 1
                self.health = None
                if lost > RESTARTS:
                    self._on_failure(f"The engine ended {lost} times in a row", "`northchat logs` tells more")
                    return
                self._on_lost(why)
                await asyncio.sleep(0.25 * 2**lost)
        finally:
            if self.client is not None and not self.remote:
                await self.client.aclose()
                self.client = None

    async def aclose(self) -> None:
        if self.client is not None:
            await self.client.aclose()
            self.client = None

    async def _follow(self, client: Client) -> None:
        async with aclosing(client.attach()) as states:
            async for self.health in states:
                self._on_health(self.health)
                if self.health.status == "failed":
                    self._on_failure(self.health.message or "The engine failed; `northchat logs` tells more", "")

    async def _greet(self, client: Client) -> None:
        models = await client.models()
        name = self.config.model or (models[0].id if models else "")
        limit = next((model.max_model_len for model in models if model.id == name), None)
        self.health = Health(status="ready", model=name, max_model_len=limit)
        self._on_health(self.health)


async def _in_thread(function: Callable[[], Result]) -> Result:
    """As asyncio.to_thread, but leaving the app needn't wait for it."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Result] = loop.create_future()

    def settle(result: Result | None, error: BaseException | None) -> None:
        if future.done():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)  # type: ignore[arg-type]

    def work() -> None:
        result, failure = None, None
        try:
            result = function()
        except BaseException as error:  # handed to the one who waits
            failure = error
        if not loop.is_closed():
            loop.call_soon_threadsafe(settle, result, failure)

    threading.Thread(target=work, daemon=True).start()
    return await future
