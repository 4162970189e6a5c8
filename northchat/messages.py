"""What a conversation is made of: messages and turns going in, events coming out.

These types are what front ends, the host and the chat formats share; they know nothing of HTTP or token ids.
"""

from typing import Any, Literal

import msgspec

Role = Literal["system", "developer", "user", "assistant", "tool"]
FinishReason = Literal["stop", "length", "tool_calls", "abort", "error"]


class ToolCall(msgspec.Struct, omit_defaults=True):
    id: str
    name: str
    arguments: str = "{}"
    """JSON text of an object, as OpenAI's protocol has it."""


class Message(msgspec.Struct, omit_defaults=True):
    role: Role
    content: str = ""
    reasoning: str = ""
    tool_calls: list[ToolCall] = []
    tool_call_id: str = ""
    """Of a tool message: the call it answers."""
    interrupted: bool = False
    """Of an assistant message: it was stopped before its end."""


class ToolSpec(msgspec.Struct, omit_defaults=True):
    name: str
    description: str = ""
    parameters: dict[str, Any] = {}
    """JSON Schema of the arguments."""


class Sampling(msgspec.Struct, omit_defaults=True):
    """What a user asked for; None leaves the choice to the model's own defaults."""

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[int, float] = {}
    seed: int | None = None


class Turn(msgspec.Struct, omit_defaults=True):
    """One request for an assistant message."""

    messages: list[Message]
    tools: list[ToolSpec] = []
    tool_choice: str = "auto"
    """auto, none, required, or the name of one tool."""
    parallel_tool_calls: bool = True
    sampling: Sampling = msgspec.field(default_factory=Sampling)
    stop: list[str] = []
    max_tokens: int | None = None
    reasoning_effort: str | None = None
    """none switches thinking off where the model can think."""
    response_format: dict[str, Any] | None = None
    """OpenAI's json_object or json_schema; None: text."""
    logprobs: int | None = None
    """Number of alternatives reported beside each chosen token."""


class Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    reasoning_tokens: int = 0


class Stats(msgspec.Struct, omit_defaults=True):
    """What our engine knows and other servers don't: the `northchat` object beside each chunk."""

    tok_s: float | None = None
    """Decode rate of this request as the core measured it, over the last second or so."""
    prefill_done: int | None = None
    prefill_total: int | None = None
    cached_tokens: int | None = None
    ttft_s: float | None = None
    """From submission in the host to the first token out of the core."""
    context_used: int | None = None
    context_limit: int | None = None
    estimated: bool = False
    """tok_s and ttft_s were measured by the client from the arrival of chunks, not by the engine."""


class Text(msgspec.Struct, tag="text"):
    text: str


class Reasoning(msgspec.Struct, tag="reasoning"):
    text: str


class ToolCallStart(msgspec.Struct, tag="tool_call_start"):
    index: int
    id: str
    name: str


class ToolCallArguments(msgspec.Struct, tag="tool_call_arguments"):
    index: int
    text: str
    """The next piece of the arguments' JSON text."""


class ToolCallEnd(msgspec.Struct, tag="tool_call_end"):
    index: int


class Progress(msgspec.Struct, tag="progress"):
    """Stats alone, when nothing was generated yet (queueing, prefill) or between tokens."""

    stats: Stats


class Finish(msgspec.Struct, tag="finish"):
    reason: FinishReason
    usage: Usage
    stats: Stats = msgspec.field(default_factory=Stats)


Event = Text | Reasoning | ToolCallStart | ToolCallArguments | ToolCallEnd | Progress | Finish
