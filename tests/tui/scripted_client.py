"""A client whose answers are written down beforehand."""

import asyncio
import re
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field

from screens import screen
from textual.pilot import Pilot

from northchat.client import Client, ClientError, Endpoint, Health, ModelInfo
from northchat.config import Config
from northchat.messages import Event, Finish, Progress, Stats, Text, Turn, Usage
from northchat.tui.app import ChatApp

READY = Health("ready", model="smollm2-135m", device="CPU", dtype="int4", max_model_len=8192, can_call_tools=False)
LOADING = Health("loading", model="smollm2-135m", device="CPU")
Step = Event | float | ClientError | asyncio.Event
"""What comes next: an event, a pause in seconds, an error, or a wait until the test goes on."""


STATS = Stats(tok_s=80.0, ttft_s=0.21, context_used=50, context_limit=8192, cached_tokens=12)
FINISH = Finish("stop", Usage(20, 30, 12), STATS)


def answer(text: str) -> list[Step]:
    """Word by word."""
    return [*(Text(word) for word in re.findall(r"\s*\S+\s*", text)), Progress(STATS), FINISH]


@dataclass
class Script:
    """`answers` are used up one by one; each `states` list is one life of the host."""

    answers: list[list[Step]] = field(default_factory=list)
    states: list[list[Health | float | ClientError | asyncio.Event]] = field(default_factory=lambda: [[READY]])
    served: list[str] = field(default_factory=lambda: ["qwen3"])
    turns: list[Turn] = field(default_factory=list)
    models_asked: list[str | None] = field(default_factory=list)
    closed: int = 0
    located: list[Config] = field(default_factory=list)

    def locate(self, config: Config) -> Endpoint:
        self.located.append(config)
        return Endpoint(config.base_url or "http://localhost/v1")

    def client(self, endpoint: Endpoint) -> "ScriptedClient":
        return ScriptedClient(endpoint, self)

    def app(self, config: Config | None = None, prompt: str | None = None) -> ChatApp:
        return ChatApp(config or Config(model="smollm2-135m"), prompt, locate=self.locate, make_client=self.client)


class ScriptedClient(Client):
    def __init__(self, endpoint: Endpoint, script: Script) -> None:
        super().__init__(endpoint)
        self._script = script

    async def models(self) -> list[ModelInfo]:
        return [ModelInfo(name, 4096) for name in self._script.served]

    async def attach(self) -> AsyncGenerator[Health]:
        for state in self._script.states.pop(0):
            if isinstance(state, Health):
                yield state
            else:
                await _wait(state)
        await asyncio.sleep(3600)

    async def stream(self, turn: Turn, model: str | None = None) -> AsyncGenerator[Event]:
        self._script.turns.append(turn)
        self._script.models_asked.append(model)
        try:
            for step in self._script.answers.pop(0):
                if isinstance(step, float | ClientError | asyncio.Event):
                    await _wait(step)
                else:
                    yield step
        finally:
            self._script.closed += 1


async def _wait(step: object) -> None:
    match step:
        case float():
            await asyncio.sleep(step)
        case asyncio.Event():
            await step.wait()
        case ClientError():
            raise step


async def until(pilot: Pilot[None], condition: Callable[[], object], seconds: float = 5.0) -> None:
    """Waits for a condition (a function); a test that waits for a time would be slow or flaky."""
    for _ in range(int(seconds / 0.01)):
        if condition():
            return
        await pilot.pause(0.01)
    raise AssertionError("it did not come to be:\n" + "\n".join(shown_by(pilot)))


def shown_by(pilot: Pilot[None]) -> list[str]:
    return screen(pilot.app)


async def sees(pilot: Pilot[None], text: str) -> None:
    await until(pilot, lambda: any(text in line for line in shown_by(pilot)))


async def sees_no(pilot: Pilot[None], text: str) -> None:
    await until(pilot, lambda: not any(text in line for line in shown_by(pilot)))
