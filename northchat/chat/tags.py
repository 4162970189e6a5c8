"""Answers with `<think>` and `<tool_call>` tags, as most open models write them: reasoning, text and JSON calls.

<think>reasoning</think>text<tool_call>{"name": ..., "arguments": {...}}</tool_call>
"""

import uuid
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from northchat.chat.stream import Channel, StopStrings, TextDecoder, Tokenizer, overlap
from northchat.messages import Event, Reasoning, Text, ToolCallArguments, ToolCallEnd, ToolCallStart

THINK, END_THINK = "<think>", "</think>"
CALL, END_CALL = "<tool_call>", "</tool_call>"
TAGS = (THINK, END_THINK, CALL, END_CALL)


class _Call(msgspec.Struct):
    name: str
    arguments: dict[str, Any] | str = {}


class TagParser:
    """A call that is no JSON, or is cut off, is given back as the text that it is."""

    def __init__(
        self, tokenizer: Tokenizer, stops: Iterable[str], *, thinking: bool, tools: bool, parallel: bool = True
    ) -> None:
        """`thinking`: the prompt has opened the reasoning already. `tools`: whether calls are looked for."""
        self._dropped = frozenset(token for marker, token in tokenizer.markers.items() if marker not in TAGS)
        self._decoder = TextDecoder(tokenizer)
        self._stops = StopStrings(stops)
        self._opens = (THINK, CALL) if tools else (THINK,)
        self._parallel = parallel
        self._held = ""
        self._bare = thinking
        """Nothing but blanks since reasoning began or ended: these belong to the markup."""
        self._calls = 0
        self.channel: Channel = "reasoning" if thinking else "text"
        self.done = False

    @property
    def called(self) -> bool:
        return self._calls > 0

    def feed(self, ids: Sequence[int]) -> list[Event]:
        events: list[Event] = []
        for token in ids:
            if token not in self._dropped and not self.done:
                self._scan(self._decoder.feed((token,)), events)
        return events

    def finish(self) -> list[Event]:
        events: list[Event] = []
        self._scan(self._decoder.finish(), events)
        held, self._held = self._held, ""
        if self.channel == "tool":
            self._call(held, "", events)
        else:
            self._put(held, events)
        if not self.done:
            self._text(self._stops.finish(), events)
        return events

    def reopen(self) -> Sequence[int]:
        return ()

    def close_thinking(self) -> Sequence[int]:
        return ()

    def _scan(self, text: str, events: list[Event]) -> None:
        # What was held before had no tag, at most the beginning of one.
        start = max(0, len(self._held) - len(END_CALL))
        self._held += text
        while not self.done:
            closing = {"reasoning": (END_THINK,), "tool": (END_CALL,)}.get(self.channel, self._opens)
            found = [(at, tag) for tag in closing if (at := self._held.find(tag, start)) >= 0]
            if not found:
                break
            at, tag = min(found)
            before, self._held, start = self._held[:at], self._held[at + len(tag) :], 0
            if tag == END_CALL:
                self._call(before, END_CALL, events)
            else:
                self._put(before, events)
                self._bare = tag != CALL
            self.channel = {THINK: "reasoning", CALL: "tool"}.get(tag, "text")  # type: ignore[assignment]
        if self.channel != "tool" and not self.done:
            closing = (END_THINK,) if self.channel == "reasoning" else self._opens
            keep = max(overlap(self._held, tag) for tag in closing)
            ready, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
            self._put(ready, events)

    def _put(self, text: str, events: list[Event]) -> None:
        if self._bare:
            text = text.lstrip()
            self._bare = not text
        if self.channel == "reasoning":
            if text:
                events.append(Reasoning(text))
        else:
            self._text(self._stops.feed(text), events)
            self.done = self.done or self._stops.matched is not None

    def _text(self, text: str, events: list[Event]) -> None:
        if not text:
            return
        if events and isinstance(last := events[-1], Text):
            last.text += text
        else:
            events.append(Text(text))

    def _call(self, body: str, end: str, events: list[Event]) -> None:
        try:
            call = msgspec.json.decode(body.strip(), type=_Call)
        except (msgspec.DecodeError, RecursionError):
            self.channel = "text"
            self._put(f"{CALL}{body}{end}", events)
            return
        arguments = call.arguments if isinstance(call.arguments, str) else msgspec.json.encode(call.arguments).decode()
        index, self._calls = self._calls, self._calls + 1
        events += [
            ToolCallStart(index, f"call_{uuid.uuid4().hex[:24]}", call.name),
            ToolCallArguments(index, arguments),
            ToolCallEnd(index),
        ]
        self.done = not self._parallel
