"""POST /v1/completions: plain text or ids, continued."""

import time
import uuid
from collections.abc import AsyncGenerator
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from northchat.chat.stream import TextDecoder
from northchat.engine.protocol import Logprob
from northchat.host import transport
from northchat.host.chat_completions import MAX_CHOICES, StreamOptions, usage_object
from northchat.host.errors import ApiError, bad_request
from northchat.host.sampling import SamplingFields
from northchat.host.turns import Generation, Turns
from northchat.messages import Finish, FinishReason, Text, Usage

MAX_PROMPTS = 64
MAX_LOGPROBS = 20
DEFAULT_MAX_TOKENS = 16
"""OpenAI's, for this route."""


class CompletionRequest(SamplingFields):
    prompt: str | list[str | int | list[int]]
    suffix: str | None = None
    echo: bool | None = None
    logprobs: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None


class _Prompt:
    """One prompt's share of the response: `n` choices from `first` on."""

    def __init__(self, turns: Turns, generation: Generation, first: int, body: CompletionRequest) -> None:
        self.generation = generation
        self.first = first
        self.echo = bool(body.echo)
        self.logprobs = body.logprobs
        self.mute = body.max_tokens == 0
        """Only the prompt is wanted; the core gives one token at least, which is dropped."""
        self._turns = turns

    def prompt_text(self) -> str:
        return _text(self._turns, self.generation.prompt)

    def prompt_entries(self, logprobs: list[Logprob]) -> list[tuple[int, Logprob | None]]:
        """Nothing precedes the first token, so nothing is known of it."""
        head: list[tuple[int, Logprob | None]] = [(self.generation.prompt[0], None)]
        return head + [(entry.token, entry) for entry in logprobs]


class _Choice:
    def __init__(self, turns: Turns, prompt: _Prompt) -> None:
        self.text = ""
        self.reason: FinishReason | None = None
        self._entries: list[tuple[int, Logprob | None]] = []
        self._turns = turns
        self._prompt = prompt
        self._offset = 0
        self._echoed = not prompt.echo

    def take(self, events: list[Any], logprobs: list[Logprob], prompt_logprobs: list[Logprob]) -> tuple[str, Any]:
        """The text and the logprobs object that a piece adds."""
        text = ""
        entries: list[tuple[int, Logprob | None]] = []
        # The prompt's log-probabilities come complete, with the first output that brings a token or the end.
        alone = len(self._prompt.generation.prompt) == 1
        if not self._echoed and (self._prompt.logprobs is None or prompt_logprobs or alone):
            self._echoed = True
            text += self._prompt.prompt_text()
            entries += self._prompt.prompt_entries(prompt_logprobs)
        for event in events:
            if isinstance(event, Text) and not self._prompt.mute:
                text += event.text
            elif isinstance(event, Finish):
                self.reason = "length" if self._prompt.mute else event.reason
        if not self._prompt.mute:
            entries += [(entry.token, entry) for entry in logprobs]
        self.text += text
        self._entries += entries
        return text, self._object(entries) if self._prompt.logprobs is not None else None

    def logprobs(self) -> Any:
        self._offset = 0
        return self._object(self._entries) if self._prompt.logprobs is not None else None

    def _object(self, entries: list[tuple[int, Logprob | None]]) -> dict[str, Any]:
        result: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for token, entry in entries:
            text = _text(self._turns, [token])
            result["tokens"].append(text)
            result["token_logprobs"].append(None if entry is None else max(entry.logprob, -9999.0))
            top = None if entry is None else {_text(self._turns, [at]): max(value, -9999.0) for at, value in entry.top}
            result["top_logprobs"].append(top)
            result["text_offset"].append(self._offset)
            self._offset += len(text)
        return result


def _text(turns: Turns, ids: list[int]) -> str:
    decoder = TextDecoder(turns.tokenizer)
    return decoder.feed(ids) + decoder.finish()


async def completions(request: Request) -> Response:
    body = await transport.read_body(request, CompletionRequest)
    turns: Turns = request.app.state.host.turns()
    n = body.choices(MAX_CHOICES)
    inputs = _inputs(body)
    _check(body)
    prompts: list[_Prompt] = []

    def close() -> None:
        for prompt in prompts:
            prompt.generation.close()

    head: dict[str, Any] = {
        "id": f"cmpl-{uuid.uuid4().hex}",
        "object": "text_completion",
        "created": int(time.time()),
        "model": request.app.state.host.state.health.model,
    }
    max_tokens = DEFAULT_MAX_TOKENS if body.max_tokens is None else max(1, body.max_tokens)
    try:
        for at, text in enumerate(inputs):
            generation = await turns.complete(
                text,
                n=n,
                max_tokens=max_tokens,
                sampling=body.sampling(),
                stop=body.stops(),
                logprobs=body.logprobs,
                prompt_logprobs=body.logprobs if body.echo else None,
            )
            prompts.append(_Prompt(turns, generation, at * n, body))
        if body.stream:
            options = body.stream_options or StreamOptions()
            return transport.EventStream(_stream(turns, prompts, head, n, options), close)
        result = await transport.unless_gone(request.receive, _collect(turns, prompts, head, n))
    except BaseException:
        close()
        raise
    close()
    return transport.json_response(result)


def _inputs(body: CompletionRequest) -> list[str | list[int]]:
    prompt = body.prompt
    if isinstance(prompt, str):
        return [prompt]
    if prompt and all(isinstance(item, int) for item in prompt):
        return [[item for item in prompt if isinstance(item, int)]]
    items = [item for item in prompt if not isinstance(item, int)]
    if not items or len(items) < len(prompt):
        raise bad_request("prompt must be a string, strings, token ids, or lists of token ids.", "prompt")
    if len(items) > MAX_PROMPTS:
        raise bad_request(f"At most {MAX_PROMPTS} prompts are supported.", "prompt")
    return items


def _check(body: CompletionRequest) -> None:
    if body.suffix:
        raise bad_request("suffix is not supported: this model can't fill in the middle.", "suffix")
    if body.logprobs is not None and not 0 <= body.logprobs <= MAX_LOGPROBS:
        raise bad_request(f"logprobs must be in 0..{MAX_LOGPROBS}.", "logprobs")
    if body.max_tokens is not None and body.max_tokens < (0 if body.echo else 1):
        raise bad_request("max_tokens must be at least 1, or 0 with echo.", "max_tokens")


def _usage(prompts: list[_Prompt]) -> Usage:
    total = Usage()
    for prompt in prompts:
        usage = prompt.generation.usage
        total.prompt_tokens += usage.prompt_tokens
        total.completion_tokens += 0 if prompt.mute else usage.completion_tokens
        total.cached_tokens += usage.cached_tokens
    return total


async def _stream(
    turns: Turns, prompts: list[_Prompt], head: dict[str, Any], n: int, options: StreamOptions
) -> AsyncGenerator[bytes, None]:
    try:
        for prompt in prompts:
            choices = [_Choice(turns, prompt) for _ in range(n)]
            async for piece in prompt.generation.pieces():
                if not piece.events:
                    yield transport.KEEP_ALIVE
                choice = choices[piece.index]
                text, logprobs = choice.take(piece.events, piece.logprobs, piece.prompt_logprobs)
                if text or choice.reason:
                    data = {
                        "index": prompt.first + piece.index,
                        "text": text,
                        "logprobs": logprobs,
                        "finish_reason": choice.reason,
                    }
                    yield transport.event({**head, "choices": [data], "northchat": piece.stats})
    except ApiError as error:
        yield transport.event(error.body())
        return
    if options.include_usage:
        yield transport.event({**head, "choices": [], "usage": usage_object(_usage(prompts))})
    yield transport.DONE


async def _collect(turns: Turns, prompts: list[_Prompt], head: dict[str, Any], n: int) -> dict[str, Any]:
    data = []
    for prompt in prompts:
        choices = [_Choice(turns, prompt) for _ in range(n)]
        async for piece in prompt.generation.pieces():
            choices[piece.index].take(piece.events, piece.logprobs, piece.prompt_logprobs)
        data += [
            {
                "index": prompt.first + index,
                "text": choice.text,
                "logprobs": choice.logprobs(),
                "finish_reason": choice.reason,
            }
            for index, choice in enumerate(choices)
        ]
    return {**head, "choices": data, "usage": usage_object(_usage(prompts))}
