"""Questions and answers: one answer at a time, what is asked meanwhile in a queue."""

import asyncio
from collections.abc import Callable
from contextlib import aclosing

from textual.app import App
from textual.widgets import Static
from textual.worker import Worker

from northchat.agent.loop import Conversation
from northchat.client import Client, ClientError, Endpoint
from northchat.config import Config
from northchat.messages import Finish, Sampling
from northchat.sanitize import clean
from northchat.tui.blocks import Failure, UserText
from northchat.tui.link import Link
from northchat.tui.reply import FLUSH_S, Reply
from northchat.tui.status import StatusBar
from northchat.tui.transcript import Transcript

NOWHERE = "http://localhost/v1"
"""Base URL of a client that is never used."""
RETRY = "Enter on the empty prompt tries again"
_REMARKS = {"length": "Cut off at the token limit.", "error": "The engine failed here."}


class Talk:
    """`link` may be replaced between two answers; `retry` is what Enter on the empty prompt does after a failure."""

    def __init__(self, app: App[None], transcript: Transcript, status: StatusBar, link: Link, config: Config) -> None:
        self.link = link
        self.retry: Callable[[], None] | None = None
        self.queue_line = Static(id="queue", markup=False)
        sampling = Sampling(temperature=config.temperature, top_p=config.top_p, seed=config.seed)
        # The client comes with the first answer.
        self.conversation = Conversation(Client(Endpoint(NOWHERE)), None, sampling, system=config.system)
        self._app, self._transcript, self._status = app, transcript, status
        self._queue: list[str] = []
        self._worker: Worker[None] | None = None
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def answering(self) -> bool:
        return not self._idle.is_set()

    def send(self, text: str) -> None:
        self._queue.append(text)
        self.pump()

    def pump(self) -> None:
        """Sends the next message if somebody listens."""
        if self._queue and self.link.ready and not self.answering:
            text = self._queue.pop(0)
            self._idle.clear()
            self._worker = self._app.run_worker(self._answer(text), name="answer")
        self._show_queue()

    def stop(self) -> list[str]:
        """Begins to end the answer, which keeps what came so far; the messages that were waiting."""
        if self._worker is not None and self.answering:
            self._worker.cancel()
        unsent, self._queue = self._queue, []
        self._show_queue()
        return unsent

    async def stopped(self) -> None:
        """Returns when no answer is under way."""
        await self._idle.wait()

    async def _answer(self, text: str) -> None:
        assert self.link.client is not None
        assert self.link.health is not None
        conversation = self.conversation
        conversation.client, conversation.model = self.link.client, self.link.health.model
        kept = len(conversation.messages)
        self._transcript.follow = True
        self._transcript.add(UserText(text))
        reply = Reply(self._transcript, self._status)
        flusher = self._app.set_interval(FLUSH_S, reply.flush)
        remark, failure = "", None
        try:
            async with aclosing(conversation.ask(text)) as events:
                async for event in events:
                    reply.take(event)
                    if isinstance(event, Finish):
                        remark = _REMARKS.get(event.reason, "")
        except asyncio.CancelledError:
            remark = "Stopped."
        except ClientError as error:
            failure = Failure(error.message, error.remedy, RETRY)
            self.retry = lambda: self._ask_again(text, kept)
        finally:
            flusher.stop()
            reply.end(remark, failure)
        self._status.show(phase="failed" if failure else "ready" if self.link.ready else "starting", detail="")
        self._idle.set()
        if not failure:
            self.pump()

    def _ask_again(self, text: str, kept: int) -> None:
        """Takes back what a failed answer left in the conversation, and asks once more."""
        del self.conversation.messages[kept:]
        self._queue.insert(0, text)
        self.pump()

    def _show_queue(self) -> None:
        waiting = [clean(text).partition("\n")[0] for text in self._queue]
        self.queue_line.display = bool(waiting)
        if waiting:
            self.queue_line.update("\n".join(f"next  {line}" for line in waiting))
