"""A Turn as the body of an OpenAI chat completion, and the chunks that come back as Events.

Servers differ in small ways; whatever they send that can be understood is understood here.
"""

import time
import uuid
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from northchat.messages import (
    Event,
    Finish,
    FinishReason,
    Message,
    Progress,
    Reasoning,
    Stats,
    Text,
    ToolCallArguments,
    ToolCallEnd,
    ToolCallStart,
    ToolSpec,
    Turn,
    Usage,
)

_FINISH: dict[str, FinishReason] = {
    "length": "length",
    "max_tokens": "length",
    "tool_calls": "tool_calls",
    "function_call": "tool_calls",
    "abort": "abort",
    "error": "error",
}
_RATE_WINDOW_S = 1.0
_PROGRESS_EVERY_S = 0.2


def request_body(turn: Turn, model: str) -> dict[str, Any]:
    """The JSON object for POST /chat/completions; parameters left to the server's defaults are left out."""
    body: dict[str, Any] = {
        "model": model,
        "messages": [_message(message) for message in turn.messages],
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if turn.tools:
        body["tools"] = [{"type": "function", "function": _tool(tool)} for tool in turn.tools]
        if turn.tool_choice in ("none", "required"):
            body["tool_choice"] = turn.tool_choice
        elif turn.tool_choice != "auto":
            body["tool_choice"] = {"type": "function", "function": {"name": turn.tool_choice}}
        if not turn.parallel_tool_calls:
            body["parallel_tool_calls"] = False
    sampling = msgspec.to_builtins(turn.sampling, str_keys=True)
    body.update({name: value for name, value in sampling.items() if value is not None})
    if turn.stop:
        body["stop"] = turn.stop
    if turn.max_tokens is not None:
        body["max_tokens"] = turn.max_tokens
    if turn.reasoning_effort is not None:
        body["reasoning_effort"] = turn.reasoning_effort
    if turn.logprobs is not None:
        body["logprobs"] = True
        body["top_logprobs"] = turn.logprobs
    return body


def _message(message: Message) -> dict[str, Any]:
    wire: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.reasoning:
        wire["reasoning_content"] = message.reasoning
    if message.tool_calls:
        wire["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in message.tool_calls
        ]
    if message.role == "tool":
        wire["tool_call_id"] = message.tool_call_id
    return wire


def _tool(tool: ToolSpec) -> dict[str, Any]:
    return {
        "name": tool.name,
        "description": tool.description,
        "parameters": tool.parameters or {"type": "object", "properties": {}},
    }


class _Function(msgspec.Struct):
    name: str | None = None
    arguments: str | dict[str, Any] | None = None


class _ToolCall(msgspec.Struct):
    index: int | None = None
    id: str | None = None
    function: _Function | None = None


class _Delta(msgspec.Struct):
    content: str | list[Any] | None = None
    reasoning_content: str | None = None
    reasoning: str | dict[str, Any] | None = None
    tool_calls: list[_ToolCall] | None = None


class _Choice(msgspec.Struct):
    delta: _Delta | None = None
    message: _Delta | None = None
    """Of a server that answers without streaming."""
    finish_reason: str | None = None


class _PromptDetails(msgspec.Struct):
    cached_tokens: int | None = None


class _CompletionDetails(msgspec.Struct):
    reasoning_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: _PromptDetails | None = None
    completion_tokens_details: _CompletionDetails | None = None


class _Timings(msgspec.Struct):
    """llama.cpp's own measurements, in its last chunk."""

    prompt_ms: float | None = None
    predicted_per_second: float | None = None


class Chunk(msgspec.Struct):
    """One `data:` object of a stream, or the whole answer of a server that doesn't stream."""

    choices: list[_Choice] | None = None
    usage: _Usage | None = None
    error: Any = None
    northchat: Stats | None = None
    timings: _Timings | None = None


_decoder = msgspec.json.Decoder(Chunk, strict=False)


def decode_chunk(data: str | bytes) -> Chunk:
    """Raises msgspec.MsgspecError when it is no JSON or no chunk."""
    return _decoder.decode(data)


class Reply:
    """Turns the chunks of one answer into events.

    feed() each chunk, then finish() once. Statistics that the engine doesn't send are estimated from when chunks
    arrive (one chunk counts as one token) and marked so. `clock` gives seconds, counted from before the request.
    """

    def __init__(self, context_limit: int | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self.finished: FinishReason | None = None
        self._clock = clock
        self._sent = clock()
        self._usage = Usage()
        self._stats = Stats(context_limit=context_limit, estimated=True)
        self._arrivals: deque[float] = deque()
        self._first = self._last = 0.0
        self._reported = 0.0
        self._calls: dict[int, tuple[int, str]] = {}
        """The server's index -> our index and id."""
        self._open: int | None = None
        self._count = 0

    def feed(self, chunk: Chunk) -> Iterator[Event]:
        if chunk.usage is not None:
            self._take_usage(chunk.usage)
        if chunk.timings is not None:
            self._take_timings(chunk.timings)
        before = self._stats
        if chunk.northchat is not None:
            self._take_stats(chunk.northchat)
        for choice in (chunk.choices or [])[:1]:
            delta = choice.delta or choice.message
            if delta is not None:
                yield from self._delta(delta)
            if choice.finish_reason:
                self.finished = _FINISH.get(choice.finish_reason, "stop")
        if self._stats != before and (not self._stats.estimated or self._report_due()):
            yield Progress(self._stats)

    def finish(self) -> Iterator[Event]:
        """The end of the stream; `finished` is None when the server gave no reason."""
        yield from self._close_call()
        reason = self.finished or "stop"
        if self._count and reason == "stop":
            reason = "tool_calls"
        stats = self._stats
        usage = self._usage
        if stats.estimated and usage.completion_tokens > 1 and self._last - self._first > 0.1:
            stats = msgspec.structs.replace(stats, tok_s=(usage.completion_tokens - 1) / (self._last - self._first))
        if stats.context_used is None and usage.prompt_tokens:
            stats = msgspec.structs.replace(stats, context_used=usage.prompt_tokens + usage.completion_tokens)
        yield Finish(reason, usage, stats)

    def _delta(self, delta: _Delta) -> Iterator[Event]:
        reasoning = delta.reasoning_content or (delta.reasoning if isinstance(delta.reasoning, str) else "")
        if reasoning:
            self._arrived()
            yield Reasoning(reasoning)
        if text := _text(delta.content):
            self._arrived()
            yield from self._close_call()
            yield Text(text)
        for call in delta.tool_calls or []:
            self._arrived()
            yield from self._tool_call(call)

    def _tool_call(self, call: _ToolCall) -> Iterator[Event]:
        function = call.function or _Function()
        key = self._key(call, function)
        known = self._calls.get(key)
        # Servers that give every call the index 0 still give each an id of its own.
        if known is None or (call.id and known[1] != call.id):
            yield from self._close_call()
            number, self._count = self._count, self._count + 1
            known = (number, call.id or f"call_{uuid.uuid4().hex[:12]}")
            self._calls.pop(key, None)
            self._calls[key] = known
            self._open = number
            yield ToolCallStart(number, known[1], function.name or "")
        arguments = function.arguments
        if isinstance(arguments, dict):
            arguments = msgspec.json.encode(arguments).decode()
        if arguments:
            yield ToolCallArguments(known[0], arguments)

    def _key(self, call: _ToolCall, function: _Function) -> int:
        """Which call a delta belongs to, for servers that leave the index out as well."""
        if call.index is not None:
            return call.index
        if not call.id and not function.name and self._calls:
            return next(reversed(self._calls))
        same = (key for key, (_, known) in self._calls.items() if known == call.id)
        return next(same, -1 - self._count)

    def _close_call(self) -> Iterator[Event]:
        if self._open is not None:
            yield ToolCallEnd(self._open)
            self._open = None

    def _arrived(self) -> None:
        if not self._stats.estimated:
            return
        now = self._last = self._clock()
        if not self._first:
            self._first = now
            self._stats = msgspec.structs.replace(self._stats, ttft_s=now - self._sent)
        self._arrivals.append(now)
        while now - self._arrivals[0] > _RATE_WINDOW_S:
            self._arrivals.popleft()
        span = now - self._arrivals[0]
        if span >= _RATE_WINDOW_S / 2:
            self._stats = msgspec.structs.replace(self._stats, tok_s=(len(self._arrivals) - 1) / span)

    def _report_due(self) -> bool:
        now = self._clock()
        if now - self._reported < _PROGRESS_EVERY_S:
            return False
        self._reported = now
        return True

    def _take_stats(self, stats: Stats) -> None:
        if self._stats.estimated:
            self._stats = Stats(context_limit=self._stats.context_limit)
        known = {name: value for name, value in msgspec.structs.asdict(stats).items() if value is not None}
        self._stats = msgspec.structs.replace(self._stats, **known)

    def _take_usage(self, usage: _Usage) -> None:
        prompt, completion = usage.prompt_tokens_details, usage.completion_tokens_details
        self._usage = Usage(
            prompt_tokens=usage.prompt_tokens or 0,
            completion_tokens=usage.completion_tokens or 0,
            cached_tokens=(prompt.cached_tokens or 0) if prompt else 0,
            reasoning_tokens=(completion.reasoning_tokens or 0) if completion else 0,
        )

    def _take_timings(self, timings: _Timings) -> None:
        if timings.predicted_per_second:
            self._stats = msgspec.structs.replace(self._stats, tok_s=timings.predicted_per_second, estimated=False)


def _text(content: str | list[Any] | None) -> str:
    """Content as text; a few servers stream OpenAI's list of parts."""
    if isinstance(content, list):
        return "".join(str(part.get("text") or "") for part in content if isinstance(part, dict))
    return content or ""
