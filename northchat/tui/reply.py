"""One answer on its way to the screen: events come as fast as they like, the transcript changes at a steady rate."""

import time

import msgspec

from northchat.messages import Event, Finish, Progress, Reasoning, Stats, Text
from northchat.tui.blocks import Answer, Block, Failure, Thinking
from northchat.tui.status import StatusBar
from northchat.tui.transcript import Transcript

FLUSH_S = 1 / 10
STATUS_S = 1 / 4
MAX_SHARE = 0.25
"""Of the time that drawing may take; a text that is slow to lay out is drawn less often."""
MAX_WAIT_S = 0.5
"""However slow it is."""


class Reply:
    """`take` events, `flush` now and then, `end` once."""

    def __init__(self, transcript: Transcript, status: StatusBar) -> None:
        self._transcript = transcript
        self._status = status
        self._open: Thinking | Answer | None = None
        self._dirty: list[Block] = []
        self._next_flush = 0.0
        self._next_status = 0.0
        self._phase, self._stats = "waiting", Stats()

    def take(self, event: Event) -> None:
        match event:
            case Text(text):
                self._write(Answer, text)
                self._phase = "answering"
            case Reasoning(text):
                self._write(Thinking, text)
                self._phase = "thinking"
            case Progress(stats):
                self._take_stats(stats)
            case Finish():
                self._take_stats(event.stats)
                self._next_status = 0.0
            case _:
                pass  # no tools are offered yet, so none are called

    def flush(self) -> None:
        now = time.monotonic()
        if now >= self._next_status:
            self._next_status = now + STATUS_S
            self._show_status()
        if not self._dirty or now < self._next_flush:
            return
        dirty, self._dirty = self._dirty, []
        # Processor time: a flush that only had to wait for its turn is no reason to draw less often.
        before = time.thread_time()
        for block in dirty:
            self._transcript.changed(block)
        self._next_flush = now + min((time.thread_time() - before) / MAX_SHARE, MAX_WAIT_S)

    def end(self, remark: str = "", failure: Failure | None = None) -> None:
        """Nothing more comes. `remark` says why the text stops where it does."""
        self._close(remark)
        if failure is not None:
            self._transcript.add(failure)
        self._next_flush = 0.0
        self.flush()

    @property
    def stats(self) -> Stats:
        return self._stats

    def _write(self, kind: type[Answer] | type[Thinking], text: str) -> None:
        if not isinstance(self._open, kind):
            if self._open is None and not text.strip():
                return  # models like to begin with line ends
            self._close()
            self._open = kind()
            self._transcript.add(self._open)
            self._next_flush = 0.0
        self._open.write(text)
        if self._open not in self._dirty:
            self._dirty.append(self._open)
        if not self._next_flush:
            self.flush()

    def _close(self, remark: str = "") -> None:
        if isinstance(self._open, Answer):
            self._open.end(remark)
        elif self._open is not None:
            self._open.end()
            if remark:
                self._open = Answer()
                self._transcript.add(self._open)
                self._open.end(remark)
        if self._open is not None and self._open not in self._dirty:
            self._dirty.append(self._open)
        self._open = None

    def _take_stats(self, stats: Stats) -> None:
        """Later figures replace earlier ones; what a chunk doesn't mention stays."""
        mentioned = {name: value for name, value in msgspec.structs.asdict(stats).items() if value is not None}
        if stats.tok_s is None:
            mentioned.pop("estimated")
        self._stats = msgspec.structs.replace(self._stats, **mentioned)

    def _show_status(self) -> None:
        stats = self._stats
        phase, done, total = self._phase, stats.prefill_done, stats.prefill_total
        detail = ""
        if phase == "waiting" and total:
            phase, detail = "reading", f"{done or 0:,} of {total:,} tokens"
        self._status.show(phase=phase, detail=detail, stats=stats)
