"""Answers in North's markup: thinking, text and blocks of tool calls, told apart by marker ids.

    thinking <|END_THINKING|> <|START_TEXT|> text <|END_TEXT|>
    thinking <|END_THINKING|> <|START_ACTION|> [{"tool_call_id": "0", "tool_name": ..., ...}, ...] <|END_ACTION|>

Models stray from it, so any order of blocks is taken, and what a block lacks is made up for.
"""

from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum

from northchat.chat.action import ActionScanner
from northchat.chat.stream import Channel, StopStrings, TextDecoder, Tokenizer, TurnError
from northchat.messages import Event, Reasoning, Text

_HOLD = 2000
"""Characters of unmarked prose held back until a marker tells what they are; beyond it they are text."""


class Marker(StrEnum):
    BOS = "<BOS_TOKEN>"
    START_OF_TURN = "<|START_OF_TURN_TOKEN|>"
    END_OF_TURN = "<|END_OF_TURN_TOKEN|>"
    USER = "<|USER_TOKEN|>"
    CHATBOT = "<|CHATBOT_TOKEN|>"
    SYSTEM = "<|SYSTEM_TOKEN|>"
    START_THINKING = "<|START_THINKING|>"
    END_THINKING = "<|END_THINKING|>"
    START_TEXT = "<|START_TEXT|>"
    END_TEXT = "<|END_TEXT|>"
    START_ACTION = "<|START_ACTION|>"
    END_ACTION = "<|END_ACTION|>"
    START_TOOL_RESULT = "<|START_TOOL_RESULT|>"
    END_TOOL_RESULT = "<|END_TOOL_RESULT|>"


def marker_ids(tokenizer: Tokenizer) -> dict[Marker, int]:
    """Raises TurnError when the tokenizer lacks one."""
    ids = {marker: tokenizer.token_id(marker) for marker in Marker}
    if lacking := [marker.value for marker, token in ids.items() if token is None]:
        raise TurnError(f"the tokenizer lacks {', '.join(lacking)}, so this is no North model")
    return {marker: token for marker, token in ids.items() if token is not None}


class NorthParser:
    """`thinking`: the prompt has opened it. Without `tools`, a block of calls is text. `opener` begins an answer."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        ids: Mapping[Marker, int],
        stops: Iterable[str],
        *,
        thinking: bool,
        tools: bool,
        parallel: bool = True,
        opener: Marker = Marker.START_TEXT,
    ) -> None:
        self._names = {token: marker for marker, token in tokenizer.markers.items()}
        self._ids = ids
        self._by_id = {token: marker for marker, token in ids.items()}
        self._decoder = TextDecoder(tokenizer)
        self._stops = StopStrings(stops)
        self._tools = tools
        self._opener = ids[opener]
        self._actions = ActionScanner(parallel)
        self._held: str | None = None if thinking else ""
        """Prose outside any block; None inside one."""
        self._reopened = False
        self._answered = False
        self.channel: Channel = "reasoning" if thinking else "none"

    @property
    def done(self) -> bool:
        return self._stops.matched is not None or self._actions.done

    @property
    def called(self) -> bool:
        return self._actions.calls > 0

    def feed(self, ids: Sequence[int]) -> list[Event]:
        events: list[Event] = []
        for token in ids:
            if self.done:
                break
            name = self._names.get(token)
            if name is None:
                self._text(self._decoder.feed((token,)), events)
            else:
                self._text(self._decoder.finish(), events)
                self._marker(self._by_id.get(token), name, events)
        return events

    def finish(self) -> list[Event]:
        events: list[Event] = []
        if not self.done:
            self._text(self._decoder.finish(), events)
            if self._held:
                self._answer(self._held.strip(), events)
                self._held = None
            self._actions.end(events)
            _put_text(self._stops.finish(), events)
        return events

    def reopen(self) -> Sequence[int]:
        """Ids after which an answer that ended without text or call goes on; none if it had text, or that chance.

        Models now and then end the turn right after thinking. Feed these ids as if they had been generated.
        """
        if self._reopened or self._answered or self.called or self.done or self.channel == "text":
            return ()
        if self._held and self._held.strip():
            return ()
        self._reopened = True
        return self.close_thinking() or (self._opener,)

    def close_thinking(self) -> Sequence[int]:
        """Ids that end thinking and begin the answer; none where it isn't thinking."""
        if self.channel != "reasoning":
            return ()
        return (self._ids[Marker.END_THINKING], self._opener)

    def _marker(self, marker: Marker | None, name: str, events: list[Event]) -> None:
        if self.channel == "tool" and self._actions.in_string:
            self._actions.literal(name)
            return
        match marker:
            case Marker.START_THINKING:
                self._enter("reasoning", events)
            case Marker.START_TEXT:
                self._enter("text", events)
            case Marker.START_ACTION:
                self._enter("tool" if self._tools else "text", events)
            case Marker.END_THINKING:
                # Prose before it was thinking that nobody opened: with thinking off models do that.
                self._enter("none", events)
            case Marker.END_TEXT if self.channel == "text":
                self._enter("none", events)
            case Marker.END_ACTION if self.channel in ("tool", "text"):
                self._enter("none", events)
            case _:
                pass

    def _enter(self, channel: Channel, events: list[Event]) -> None:
        if self._held and self._held.strip():
            # What stands before an answer or a call is not the answer.
            events.append(Reasoning(self._held))
        if self.channel == "tool":
            self._actions.end(events)
        self._held = "" if channel == "none" else None
        self.channel = channel

    def _text(self, text: str, events: list[Event]) -> None:
        if not text:
            return
        if self._held is not None:
            self._held += text
            if len(self._held.strip()) > _HOLD:
                text, self._held, self.channel = self._held.lstrip(), None, "text"
                self._answer(text, events)
        elif self.channel == "reasoning":
            events.append(Reasoning(text))
        elif self.channel == "tool":
            self._actions.feed(text, events)
        else:
            self._answer(text, events)

    def _answer(self, text: str, events: list[Event]) -> None:
        self._answered = self._answered or bool(text.strip())
        _put_text(self._stops.feed(text), events)


def _put_text(text: str, events: list[Event]) -> None:
    if text:
        events.append(Text(text))
