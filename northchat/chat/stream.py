"""From generated ids to events: what every chat format shares.

A format renders a turn to ids and gives a parser for the ids that come back. Parsers are incremental and see no
difference between one long piece and many short ones, so a streamed answer and a whole one are the same events.
"""

import codecs
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Literal, Protocol

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

Channel = Literal["text", "reasoning", "tool", "none"]

Replay = Callable[[Message], Sequence[int] | None]
"""The ids that were generated for an assistant message, or None if it isn't known."""


class TurnError(Exception):
    """A turn can't be rendered; the message says what is wrong with it."""


class Tokenizer(Protocol):
    """What formats need of a tokenizer."""

    @property
    def markers(self) -> Mapping[str, int]:
        """The added tokens, special or not: text -> id."""

    def encode(self, text: str) -> list[int]:
        """Ids of plain text: whatever it contains, none of them is a marker."""

    def token_id(self, marker: str) -> int | None: ...

    def decode_bytes(self, ids: Sequence[int]) -> bytes:
        """Bytes of a piece of text, not necessarily whole UTF-8; joined pieces are the bytes of the joined ids."""


class Parser(Protocol):
    """Turns the ids of one answer into events."""

    @property
    def done(self) -> bool:
        """Nothing more will come of further ids (a stop string matched, or the last permitted tool call ended)."""

    @property
    def called(self) -> bool:
        """At least one tool call was started."""

    @property
    def channel(self) -> Channel:
        """Where the last id went: it tells content's log-probabilities and reasoning's usage apart."""

    def feed(self, ids: Sequence[int]) -> list[Event]: ...

    def finish(self) -> list[Event]:
        """The end of the ids: what was held back."""

    def reopen(self) -> Sequence[int]:
        """Ids after which an answer that ended before it said anything goes on, once; none where that isn't so.

        They are fed to the parser, and to the model, as if they had been generated.
        """

    def close_thinking(self) -> Sequence[int]:
        """Likewise ids that end thinking and begin the answer; none where it isn't thinking."""


class ChatFormat(Protocol):
    name: str
    can_call_tools: bool
    forces_tools: bool
    """Whether tool_choice `required` or a named tool is enforced, not merely asked for."""
    defaults: Sampling
    stop_ids: Sequence[int]

    def render(self, turn: Turn, replay: Replay) -> list[int]:
        """Ids of the prompt, up to where the assistant's answer begins. Raises TurnError."""

    def parser(self, turn: Turn, prompt: Sequence[int]) -> Parser:
        """For one answer to the rendered turn: a prompt may have opened the reasoning already."""

    def grammar(self, turn: Turn, prompt: Sequence[int]) -> str:
        """What tool_choice and response_format make of the answer, for engine/grammar.py; empty: anything.

        Raises SchemaError.
        """


class TextDecoder:
    """Ids -> text, holding back the bytes of a character until it is whole; bytes that are none become U+FFFD."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, ids: Sequence[int]) -> str:
        return self._utf8.decode(self._tokenizer.decode_bytes(ids))

    def finish(self) -> str:
        return self._utf8.decode(b"", final=True)


class StopStrings:
    """Cuts text before the first stop string, and holds back text that may become one.

    First means the one that ends first, and of those the longest: then it doesn't matter how the text is cut up.
    """

    def __init__(self, stops: Iterable[str]) -> None:
        self._stops = [stop for stop in stops if stop]
        self._held = ""
        self.matched: str | None = None

    def feed(self, text: str) -> str:
        if self.matched is not None:
            return ""
        if not self._stops:
            return text
        text = self._held + text
        found = [(at + len(stop), at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            _, at, self.matched = min(found)
            self._held = ""
            return text[:at]
        hold = max(overlap(text, stop) for stop in self._stops)
        self._held = text[len(text) - hold :]
        return text[: len(text) - hold]

    def finish(self) -> str:
        held, self._held = self._held, ""
        return held


def overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a beginning of `stop` but not all of it."""
    for size in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:size]):
            return size
    return 0


class PlainParser:
    """Everything is text, except markers, which are dropped."""

    called = False

    def __init__(self, tokenizer: Tokenizer, stops: Iterable[str]) -> None:
        self._markers = frozenset(tokenizer.markers.values())
        self._decoder = TextDecoder(tokenizer)
        self._stops = StopStrings(stops)
        self.channel: Channel = "text"
        self.done = False

    def feed(self, ids: Sequence[int]) -> list[Event]:
        kept = [token for token in ids if token not in self._markers]
        if ids:
            self.channel = "none" if ids[-1] in self._markers else "text"
        return self._events(self._stops.feed(self._decoder.feed(kept)))

    def finish(self) -> list[Event]:
        return self._events(self._stops.feed(self._decoder.finish()) + self._stops.finish())

    def reopen(self) -> Sequence[int]:
        return ()

    def close_thinking(self) -> Sequence[int]:
        return ()

    def _events(self, text: str) -> list[Event]:
        self.done = self._stops.matched is not None
        return [Text(text)] if text else []


class Accumulator:
    """Events -> the assistant message that they spell."""

    def __init__(self) -> None:
        self._text: list[str] = []
        self._reasoning: list[str] = []
        self._calls: dict[int, tuple[ToolCallStart, list[str]]] = {}
        self.finish: Finish | None = None

    def add(self, event: Event) -> None:
        match event:
            case Text(text):
                self._text.append(text)
            case Reasoning(text):
                self._reasoning.append(text)
            case ToolCallStart():
                self._calls[event.index] = (event, [])
            case ToolCallArguments():
                self._calls[event.index][1].append(event.text)
            case Finish():
                self.finish = event
            case _:
                pass

    @property
    def message(self) -> Message:
        # A call without arguments is a call with none, not with broken JSON.
        calls = [ToolCall(start.id, start.name, "".join(parts) or "{}") for start, parts in self._calls.values()]
        return Message("assistant", "".join(self._text), "".join(self._reasoning), calls)
