"""A turn on its way: rendered to ids, submitted to the core, its outputs parsed into events."""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from northchat.chat import schema
from northchat.chat.stream import Accumulator, ChatFormat, Parser, PlainParser, Tokenizer, TurnError
from northchat.engine import protocol
from northchat.host.errors import ApiError, bad_request, context_overflow
from northchat.host.history import History
from northchat.host.state import State
from northchat.host.supervisor import Mailbox, Supervisor
from northchat.messages import Event, Finish, FinishReason, Progress, Sampling, Stats, Turn, Usage

MAX_COMPILE = 2.0
"""Seconds that the look at a grammar may take."""
KEEP_ALIVE = 10.0
"""Seconds of silence after which a waiting client is told that the connection lives."""


@dataclass
class Piece:
    """What one output of the core brought for one choice; no events at all is a sign of life."""

    index: int
    events: list[Event] = field(default_factory=list)
    logprobs: list[protocol.Logprob] = field(default_factory=list)
    """Of the tokens of the content, in their order; they may come before their text does."""
    prompt_logprobs: list[protocol.Logprob] = field(default_factory=list)
    stats: Stats | None = None
    finished: bool = False


class _Choice:
    """One of the n answers to a prompt."""

    def __init__(
        self,
        index: int,
        parser: Parser,
        prompt: int,
        limit: int,
        max_tokens: int,
        named: bool = False,
        history: History | None = None,
    ) -> None:
        self.index = index
        self.rid: int | None = None
        self.usage = Usage(prompt)
        self.finished = False
        self.ids: list[int] = []
        """What was generated or forced, without the id that ended it."""
        self.forced = False
        """The last piece put ids in the model's mouth: generation must go on after them."""
        self._parser = parser
        self._max_tokens = max_tokens
        self._most_thinking = _most_thinking(max_tokens)
        self._named = named
        self._history = history
        self._answer = Accumulator()
        self._stats = Stats(context_used=prompt, context_limit=limit, prefill_total=prompt)

    def take(self, output: protocol.Output, since_submit: float, stop_ids: Sequence[int]) -> Piece:
        """Raises ApiError when the core reports an error."""
        if output.finish == "error":
            self.finished = True
            raise ApiError(500, f"The engine could not go on: {output.message}", code="engine_error", retry=False)
        piece = Piece(self.index, prompt_logprobs=output.prompt_logprobs)
        self._measure(output, since_submit)
        ids = output.ids
        if output.finish == "stop" and ids and ids[-1] in stop_ids:
            ids = ids[:-1]
        for at, token in enumerate(ids):
            before = self._parser.channel
            piece.events += self._parser.feed((token,))
            self.ids.append(token)
            if "reasoning" in (before, self._parser.channel):
                self.usage.reasoning_tokens += 1
            if self._parser.channel == "text" and at < len(output.logprobs):
                piece.logprobs.append(output.logprobs[at])
            if self._parser.done:
                break
        reason: FinishReason | None = output.finish
        self.forced = self._force(reason, piece)
        if self.forced:
            reason = None
        elif self._parser.done:
            reason = "stop"
        elif reason is not None:
            piece.events += self._parser.finish()
        for event in piece.events:
            self._answer.add(event)
        if reason is not None:
            self.finished = piece.finished = True
            # A call that was demanded by name is an answer like any other: OpenAI says `stop` then.
            if reason == "stop" and self._parser.called and not self._named:
                reason = "tool_calls"
            piece.events.append(Finish(reason, self.usage, self._stats))
        elif not piece.events:
            piece.events.append(Progress(self._stats))
        piece.stats = self._stats
        return piece

    def _force(self, reason: FinishReason | None, piece: Piece) -> bool:
        """Ends a thinking that leaves no room for an answer, and opens an answer that ended before it began."""
        if self._parser.done:
            return False
        if reason == "stop":
            ids = self._parser.reopen()
        elif reason is None and self.usage.reasoning_tokens >= self._most_thinking:
            ids = self._parser.close_thinking()
        else:
            return False
        if not ids or self.usage.completion_tokens + len(ids) >= self._max_tokens:
            return False
        piece.events += self._parser.feed(ids)
        self.ids += ids
        self.usage.completion_tokens += len(ids)
        return True

    def _measure(self, output: protocol.Output, since_submit: float) -> None:
        stats = self._stats
        # After forced ids the core counts what was generated before them to the prompt.
        if output.cached is not None and stats.cached_tokens is None:
            stats.cached_tokens = self.usage.cached_tokens = output.cached
        if output.computed:
            stats.prefill_done = min(output.computed, self.usage.prompt_tokens)
        if output.ids:
            self.usage.completion_tokens += len(output.ids)
            if stats.ttft_s is None:
                stats.ttft_s = since_submit
                stats.prefill_done = self.usage.prompt_tokens
        if output.tok_s is not None:
            stats.tok_s = output.tok_s
        stats.context_used = self.usage.prompt_tokens + self.usage.completion_tokens

    def close(self) -> None:
        """Keeps the ids for the next turn, also of a broken-off answer, unless the client saw less than them."""
        if self._history is not None and not self._parser.done:
            self._history.remember(self._answer.message, self.ids)


class Generation:
    """Answers under way. Iterate it once for their pieces, and always close it: what still runs is aborted then."""

    def __init__(
        self, supervisor: Supervisor, request: protocol.Submit, choices: Sequence[_Choice], stop_ids: Sequence[int]
    ) -> None:
        self.prompt = request.prompt
        self._supervisor = supervisor
        self._request = request
        self._choices = choices
        self._stop_ids = stop_ids
        self._mailbox = Mailbox()
        self._by_rid: dict[int, _Choice] = {}
        self._submitted = time.monotonic()
        self._submit(choices[0])

    @property
    def usage(self) -> Usage:
        """Of all choices together; the prompt counts once."""
        total = Usage(len(self.prompt), cached_tokens=self._choices[0].usage.cached_tokens)
        for choice in self._choices:
            total.completion_tokens += choice.usage.completion_tokens
            total.reasoning_tokens += choice.usage.reasoning_tokens
        return total

    def _submit(self, choice: _Choice) -> None:
        request = self._request
        sampling = request.sampling
        if choice.index and (seed := sampling.seed) is not None:
            sampling = msgspec.structs.replace(sampling, seed=seed + choice.index)
        choice.rid = self._supervisor.submit(
            self._mailbox,
            protocol.Submit(
                0,
                request.prompt + choice.ids,
                request.max_tokens - choice.usage.completion_tokens,
                sampling,
                request.stop_ids,
                request.min_tokens,
                request.prompt_logprobs if choice.index == 0 else None,
                request.grammar,
                len(choice.ids),
            ),
        )
        self._by_rid[choice.rid] = choice

    async def pieces(self) -> AsyncIterator[Piece]:
        """Ends when all choices are finished. Raises ApiError when the core fails or is lost."""
        waiting = list(self._choices[1:])
        while waiting or not all(choice.finished for choice in self._choices):
            outputs = await self._mailbox.take(KEEP_ALIVE)
            if not outputs:
                yield Piece(0)
            for output in outputs:
                choice = self._by_rid.get(output.rid)
                if choice is None or choice.finished:
                    continue
                piece = choice.take(output, time.monotonic() - self._submitted, self._stop_ids)
                if piece.finished and output.finish is None:
                    self._supervisor.abort(output.rid)
                if choice.forced:
                    self._supervisor.abort(output.rid)
                    del self._by_rid[output.rid]
                    self._submit(choice)
                yield piece
                # The other answers wait for the first one's first token: then its prompt is in the prefix cache.
                if waiting and (output.ids or output.finish):
                    for other in waiting:
                        self._submit(other)
                    waiting.clear()

    def close(self) -> None:
        for rid, choice in self._by_rid.items():
            if not choice.finished:
                self._supervisor.abort(rid)
            choice.close()
        self._by_rid.clear()


class Turns:
    """What the HTTP routes ask for answers. Made when the model's tokenizer is there."""

    def __init__(
        self, tokenizer: Tokenizer, chat: ChatFormat, eos: Sequence[int], supervisor: Supervisor, state: State
    ) -> None:
        self.tokenizer = tokenizer
        self.chat = chat
        self._eos = eos
        self._supervisor = supervisor
        self._state = state
        self._history = History()

    async def start(self, turn: Turn, n: int = 1) -> Generation:
        """Raises ApiError when the turn can't be answered: before anything of a response is sent."""
        self._check_tools(turn)
        limit = self._limit()
        try:
            # Templates and tokenizers take tens of milliseconds for a long conversation; others stream meanwhile.
            prompt = await asyncio.to_thread(self.chat.render, turn, self._history.recall)
        except TurnError as error:
            raise bad_request(str(error), "messages") from error
        if len(prompt) >= limit:
            raise context_overflow(limit, len(prompt), "messages")
        form = await self._grammar(turn, prompt)
        stop_ids = list(self.chat.stop_ids)
        named = turn.tool_choice not in ("auto", "none", "required")
        max_tokens = _clamp(turn.max_tokens, limit - len(prompt))
        choices = [
            _Choice(index, self.chat.parser(turn, prompt), len(prompt), limit, max_tokens, named, self._history)
            for index in range(n)
        ]
        sampling = self._resolve(turn.sampling, turn.logprobs)
        request = protocol.Submit(0, prompt, max_tokens, sampling, stop_ids, grammar=form)
        return Generation(self._supervisor, request, choices, stop_ids)

    async def complete(
        self,
        prompt: str | list[int],
        *,
        n: int,
        max_tokens: int | None,
        sampling: Sampling,
        stop: Sequence[str],
        logprobs: int | None,
        prompt_logprobs: int | None,
    ) -> Generation:
        """Continues plain text or ids. Raises ApiError as start() does."""
        limit = self._limit()
        ids = prompt if isinstance(prompt, list) else await asyncio.to_thread(self.tokenizer.encode, prompt)
        if not ids:
            raise bad_request("The prompt is empty; give at least one token.", "prompt")
        vocab = self._supervisor.vocab_size
        if not all(0 <= token < vocab for token in ids):
            raise bad_request(f"The prompt has a token id outside the vocabulary of {vocab}.", "prompt")
        if len(ids) >= limit:
            raise context_overflow(limit, len(ids), "prompt")
        most = _clamp(max_tokens, limit - len(ids))
        choices = [_Choice(index, PlainParser(self.tokenizer, stop), len(ids), limit, most) for index in range(n)]
        request = protocol.Submit(
            0,
            ids,
            most,
            self._resolve(sampling, logprobs),
            list(self._eos),
            prompt_logprobs=prompt_logprobs,
        )
        return Generation(self._supervisor, request, choices, self._eos)

    def token_object(self, token: int, logprob: float) -> dict[str, Any]:
        """As OpenAI shows a token beside its log-probability."""
        data = self.tokenizer.decode_bytes((token,))
        # JSON has no -inf.
        return {"token": data.decode(errors="replace"), "logprob": max(logprob, -9999.0), "bytes": list(data)}

    def _limit(self) -> int:
        limit = self._state.health.max_model_len
        if self._state.health.status != "ready" or limit is None:
            raise self._supervisor.unavailable()
        return limit

    async def _grammar(self, turn: Turn, prompt: Sequence[int]) -> str:
        """Of the answer, looked at before the request is queued."""
        try:
            form = await asyncio.to_thread(self.chat.grammar, turn, prompt)
        except schema.SchemaError as error:
            raise bad_request(f"{error}.", error.param, "invalid_schema") from error
        if form:
            try:
                async with asyncio.timeout(MAX_COMPILE):
                    problem = await asyncio.to_thread(schema.problem, form)
            except TimeoutError:
                problem = f"it takes over {MAX_COMPILE:.0f} s to prepare"
            if problem:
                param = "tools" if turn.response_format is None else "response_format"
                raise bad_request(f"The JSON schema can't be enforced: {problem}", param, "invalid_schema")
        return form

    def _check_tools(self, turn: Turn) -> None:
        if not turn.tools or turn.tool_choice == "none":
            return
        if not self.chat.can_call_tools:
            raise bad_request(
                f"{self._state.health.model} can't call tools: leave `tools` out, or serve a model that can.",
                "tools",
                "tools_unsupported",
            )
        if turn.tool_choice != "auto" and not self.chat.forces_tools:
            raise bad_request(
                f"{self._state.health.model} can't be made to call a tool: use tool_choice `auto`.",
                "tool_choice",
                "tool_choice_unsupported",
            )

    def _resolve(self, asked: Sampling, logprobs: int | None) -> protocol.Sampling:
        own = self.chat.defaults
        vocab = self._supervisor.vocab_size
        if any(token >= vocab for token in asked.logit_bias):
            raise bad_request(f"logit_bias has a token id outside the vocabulary of {vocab}.", "logit_bias")

        def pick(name: str, neutral: float) -> float:
            value = getattr(asked, name)
            if value is None:
                value = getattr(own, name)
            return neutral if value is None else value

        return protocol.Sampling(
            temperature=pick("temperature", 1.0),
            top_k=int(pick("top_k", 0)),
            top_p=pick("top_p", 1.0),
            min_p=pick("min_p", 0.0),
            presence_penalty=pick("presence_penalty", 0.0),
            frequency_penalty=pick("frequency_penalty", 0.0),
            repetition_penalty=pick("repetition_penalty", 1.0),
            logit_bias=asked.logit_bias,
            seed=asked.seed,
            logprobs=logprobs,
        )


def _clamp(asked: int | None, room: int) -> int:
    # Agents ask for 32,000 tokens whatever the context; to refuse that would help nobody.
    return room if asked is None else min(asked, room)


def _most_thinking(max_tokens: int) -> int:
    """Tokens after which thinking is closed, so that an answer fits behind it."""
    reserve = max(64, min(512, max_tokens // 4))
    return max(max_tokens - reserve, max_tokens // 4)
