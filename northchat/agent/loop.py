"""A conversation: what was said, and the next answer as a stream of events."""

from collections.abc import AsyncGenerator
from contextlib import aclosing

from northchat.client import Client
from northchat.messages import (
    Event,
    Finish,
    Message,
    Reasoning,
    Sampling,
    Text,
    ToolCall,
    ToolCallArguments,
    ToolCallStart,
    Turn,
)


class Conversation:
    """Messages only grow at their end, so that the engine's cached prefix stays valid.

    client, model and sampling may be replaced between two answers.
    """

    def __init__(
        self, client: Client, model: str | None = None, sampling: Sampling | None = None, *, system: str = ""
    ) -> None:
        self.client = client
        self.model = model
        self.sampling = sampling or Sampling()
        self._system = system
        self.messages: list[Message] = []
        self.clear()

    def clear(self) -> None:
        self.messages = [Message("system", self._system)] if self._system else []

    async def ask(self, text: str) -> AsyncGenerator[Event]:
        """Send what the user typed and yield the answer's events, which become the next message.

        When the iterator is closed or fails midway, what came so far is kept as an interrupted message; if nothing
        came, the user's message is taken back and may be sent again. Raises ClientError.
        """
        self.messages.append(Message("user", text))
        answer = Message("assistant", tool_calls=[])
        finished = False
        try:
            async with aclosing(self._stream()) as events:
                async for event in events:
                    _add(answer, event)
                    finished = finished or isinstance(event, Finish)
                    yield event
        finally:
            if not finished:
                answer.interrupted = True
                answer.tool_calls = []
            if finished or answer.content or answer.reasoning:
                self.messages.append(answer)
            else:
                self.messages.pop()

    def _stream(self) -> AsyncGenerator[Event]:
        return self.client.stream(Turn(messages=list(self.messages), sampling=self.sampling), self.model)


def _add(answer: Message, event: Event) -> None:
    match event:
        case Text(text):
            answer.content += text
        case Reasoning(text):
            answer.reasoning += text
        case ToolCallStart(_, call, name):
            answer.tool_calls.append(ToolCall(call, name, ""))
        case ToolCallArguments(index, text):
            answer.tool_calls[index].arguments += text
        case Finish(reason):
            answer.interrupted = reason in ("abort", "error")
        case _:
            pass
