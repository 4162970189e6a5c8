"""POST /v1/chat/completions: OpenAI's request -> Turn, events -> chunks or one response.

Tools are passed to models that can call them and refused for others, as `tool_choice: none` never is. Unknown fields
are ignored: clients send many that concern other servers.
"""

import time
import uuid
from collections.abc import AsyncGenerator
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from northchat.chat.stream import Accumulator
from northchat.engine.protocol import Logprob
from northchat.host import transport
from northchat.host.errors import ApiError, bad_request
from northchat.host.sampling import SamplingFields
from northchat.host.turns import Generation, Piece, Turns
from northchat.messages import (
    Finish,
    Message,
    Progress,
    Reasoning,
    Role,
    Stats,
    Text,
    ToolCall,
    ToolCallArguments,
    ToolCallStart,
    ToolSpec,
    Turn,
    Usage,
)

ROLES: tuple[Role, ...] = ("system", "developer", "user", "assistant", "tool")
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh")
MAX_CHOICES = 8
MAX_TOOLS = 512
MAX_TOP_LOGPROBS = 20


class Part(msgspec.Struct):
    type: str = "text"
    text: str | None = None
    refusal: str | None = None


class Function(msgspec.Struct):
    name: str
    arguments: str | dict[str, Any] | None = None


class Call(msgspec.Struct):
    function: Function
    id: str | None = None


class WireMessage(msgspec.Struct):
    role: str
    content: str | list[Part] | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[Call] | None = None
    tool_call_id: str | None = None


class FunctionSpec(msgspec.Struct):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None


class Tool(msgspec.Struct):
    type: str = "function"
    function: FunctionSpec | None = None


class StreamOptions(msgspec.Struct):
    include_usage: bool | None = None
    include_progress: bool | None = None
    """Ours: chunks with an empty delta while the prompt is computed, for their `northchat` object."""


class ChatRequest(SamplingFields):
    messages: list[WireMessage]
    tools: list[Tool] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    max_completion_tokens: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    reasoning_effort: str | None = None
    response_format: dict[str, Any] | None = None


async def chat_completions(request: Request) -> Response:
    body = await transport.read_body(request, ChatRequest)
    n = body.choices(MAX_CHOICES)
    turn = to_turn(body)
    turns: Turns = request.app.state.host.turns()
    generation = await turns.start(turn, n)
    head: dict[str, Any] = {
        "id": f"chatcmpl-{uuid.uuid4().hex}",
        "created": int(time.time()),
        "model": request.app.state.host.state.health.model,
    }
    if body.stream:
        options = body.stream_options or StreamOptions()
        # Our own front ends, on the Unix socket, always show progress.
        if request.scope["server"][1] is None:
            options.include_progress = True
        frames = _stream(turns, generation, head, n, options)
        return transport.EventStream(frames, generation.close)
    try:
        work = _collect(turns, generation, head, n, turn.logprobs is not None)
        result = await transport.unless_gone(request.receive, work)
    finally:
        generation.close()
    return transport.json_response(result)


def to_turn(body: ChatRequest) -> Turn:
    """Raises ApiError naming the field that can't be served."""
    if not body.messages:
        raise bad_request("`messages` is empty; send at least one message.", "messages")
    if body.reasoning_effort is not None and body.reasoning_effort not in EFFORTS:
        raise bad_request(f"reasoning_effort must be one of {', '.join(EFFORTS)}.", "reasoning_effort")
    limits = [limit for limit in (body.max_tokens, body.max_completion_tokens) if limit is not None]
    if any(limit < 1 for limit in limits):
        raise bad_request("max_tokens must be at least 1.", "max_tokens")
    logprobs = None
    if body.logprobs:
        logprobs = body.top_logprobs or 0
        if not 0 <= logprobs <= MAX_TOP_LOGPROBS:
            raise bad_request(f"top_logprobs must be in 0..{MAX_TOP_LOGPROBS}.", "top_logprobs")
    elif body.top_logprobs:
        raise bad_request("top_logprobs needs logprobs: true.", "top_logprobs")
    tools = [_tool(tool, index) for index, tool in enumerate(body.tools or [])]
    if len(tools) > MAX_TOOLS:
        raise bad_request(f"At most {MAX_TOOLS} tools are supported.", "tools")
    return Turn(
        messages=[_message(message, index) for index, message in enumerate(body.messages)],
        tools=tools,
        tool_choice=_tool_choice(body.tool_choice, tools),
        parallel_tool_calls=body.parallel_tool_calls is not False,
        sampling=body.sampling(),
        stop=body.stops(),
        max_tokens=min(limits, default=None),
        reasoning_effort=body.reasoning_effort,
        response_format=body.response_format,
        logprobs=logprobs,
    )


def _message(message: WireMessage, index: int) -> Message:
    where = f"messages[{index}]"
    role = next((role for role in ROLES if role == message.role), None)
    if role is None:
        raise bad_request(f"Unknown role {message.role!r}; use one of {', '.join(ROLES)}.", f"{where}.role")
    calls = [
        ToolCall(call.id or f"call_{index}_{at}", call.function.name, _arguments(call.function.arguments))
        for at, call in enumerate(message.tool_calls or [])
    ]
    return Message(
        role,
        _content(message.content, f"{where}.content"),
        message.reasoning_content or message.reasoning or "",
        calls,
        message.tool_call_id or "",
    )


def _content(content: str | list[Part] | None, where: str) -> str:
    if isinstance(content, str):
        return content
    texts = []
    for part in content or []:
        if part.type not in ("text", "input_text", "output_text", "refusal"):
            raise bad_request(f"Unsupported content part `{part.type}`: this model reads text only.", where)
        texts.append(part.text or part.refusal or "")
    return "\n".join(texts)


def _arguments(arguments: str | dict[str, Any] | None) -> str:
    if isinstance(arguments, dict):
        return msgspec.json.encode(arguments).decode()
    return arguments or "{}"


def _tool(tool: Tool, index: int) -> ToolSpec:
    if tool.type != "function" or tool.function is None:
        raise bad_request(f"Unsupported tool type {tool.type!r}; only functions are supported.", f"tools[{index}]")
    return ToolSpec(tool.function.name, tool.function.description or "", tool.function.parameters or {})


def _tool_choice(choice: str | dict[str, Any] | None, tools: list[ToolSpec]) -> str:
    if choice is None:
        return "auto"
    if isinstance(choice, dict):
        function = choice.get("function")
        name = function.get("name") if isinstance(function, dict) else None
        if not isinstance(name, str):
            raise bad_request("tool_choice must be auto, none, required or name a function.", "tool_choice")
        if all(tool.name != name for tool in tools):
            raise bad_request(f"tool_choice names {name!r}, which is not among the tools.", "tool_choice")
        return name
    if choice not in ("auto", "none", "required"):
        raise bad_request("tool_choice must be auto, none, required or name a function.", "tool_choice")
    if choice == "required" and not tools:
        raise bad_request("tool_choice `required` needs tools.", "tool_choice")
    return choice


def usage_object(usage: Usage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        "completion_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
    }


async def _stream(
    turns: Turns, generation: Generation, head: dict[str, Any], n: int, options: StreamOptions
) -> AsyncGenerator[bytes, None]:
    head = {**head, "object": "chat.completion.chunk"}
    held: list[list[Logprob]] = [[] for _ in range(n)]

    def chunk(index: int, delta: dict[str, Any], stats: Stats | None = None, reason: str | None = None) -> bytes:
        choice: dict[str, Any] = {"index": index, "delta": delta, "finish_reason": reason}
        if held[index] and ("content" in delta or reason):
            choice["logprobs"] = _logprobs(turns, held[index])
            held[index] = []
        data = {**head, "choices": [choice]}
        if stats is not None:
            data["northchat"] = stats
        return transport.event(data)

    for index in range(n):
        yield chunk(index, {"role": "assistant", "content": ""})
    try:
        async for piece in generation.pieces():
            held[piece.index] += piece.logprobs
            if not piece.events:
                yield transport.KEEP_ALIVE
            for event in piece.events:
                match event:
                    case Finish(reason):
                        yield chunk(piece.index, {}, event.stats, reason)
                    case Progress(stats):
                        if options.include_progress:
                            yield chunk(piece.index, {}, stats)
                    case _:
                        if (delta := _delta(event)) is not None:
                            yield chunk(piece.index, delta, piece.stats)
    except ApiError as error:
        yield transport.event(error.body())
        return
    if options.include_usage:
        yield transport.event({**head, "choices": [], "usage": usage_object(generation.usage)})
    yield transport.DONE


def _delta(event: object) -> dict[str, Any] | None:
    match event:
        case Text(text):
            return {"content": text}
        case Reasoning(text):
            return {"reasoning_content": text}
        case ToolCallStart(index, id, name):
            function = {"name": name, "arguments": ""}
            return {"tool_calls": [{"index": index, "id": id, "type": "function", "function": function}]}
        case ToolCallArguments(index, text):
            return {"tool_calls": [{"index": index, "function": {"arguments": text}}]}
        case _:
            return None


async def _collect(
    turns: Turns, generation: Generation, head: dict[str, Any], n: int, logprobs: bool
) -> dict[str, Any]:
    answers = [Accumulator() for _ in range(n)]
    chosen: list[list[Logprob]] = [[] for _ in range(n)]
    async for piece in generation.pieces():
        _gather(answers[piece.index], chosen[piece.index], piece)
    choices = []
    for index, answer in enumerate(answers):
        finish = answer.finish
        assert finish is not None
        choices.append(
            {
                "index": index,
                "message": _message_object(answer.message),
                "logprobs": _logprobs(turns, chosen[index]) if logprobs else None,
                "finish_reason": finish.reason,
            }
        )
    first = answers[0].finish
    return {
        **head,
        "object": "chat.completion",
        "choices": choices,
        "usage": usage_object(generation.usage),
        "northchat": first.stats if first else None,
    }


def _gather(answer: Accumulator, chosen: list[Logprob], piece: Piece) -> None:
    for event in piece.events:
        answer.add(event)
    chosen += piece.logprobs


def _message_object(message: Message) -> dict[str, Any]:
    result: dict[str, Any] = {"role": "assistant", "content": message.content, "refusal": None}
    if message.reasoning:
        result["reasoning_content"] = message.reasoning
    if message.tool_calls:
        result["content"] = message.content or None
        result["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in message.tool_calls
        ]
    return result


def _logprobs(turns: Turns, entries: list[Logprob]) -> dict[str, Any]:
    return {"content": [_logprob(turns, entry) for entry in entries], "refusal": None}


def _logprob(turns: Turns, entry: Logprob) -> dict[str, Any]:
    top = [turns.token_object(token, logprob) for token, logprob in entry.top]
    return {**turns.token_object(entry.token, entry.logprob), "top_logprobs": top}
