"""Which requests a step brings forward, and by how much.

There are no phases: a request has tokens (prompt and output) of which so many are computed, and each step
computes some that aren't. One token to go is a decode row; more are a chunk of prefill. That one rule covers chunked
prefill, prefix hits and what follows a preemption.

Requests are served in order of arrival, and every running one is older than every waiting one. Admission is
optimistic: it asks for room for the tokens known now, not for those that max_tokens allows. When pages run out,
the newest gives its own back and is computed again later, so the oldest always gets on.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from northchat.engine.executor import Batch, Row, Sampled
from northchat.engine.kv_cache import KVCache, Table
from northchat.engine.protocol import Output, Submit


class Constraint(Protocol):
    """What an answer is held to; see grammar.Matcher."""

    mask: bytes
    problem: str

    def accept(self, token: int) -> None: ...


@dataclass(eq=False, slots=True)
class Request:
    submit: Submit
    ids: list[int]
    """Prompt and output so far; shared with the rows in flight, only ever appended to."""
    limit: int
    """Length of `ids` at which the request ends."""
    table: Table
    computed: int = 0
    """Tokens that launched steps cover."""
    sampling: int = 0
    """Launched rows whose sampled token isn't known yet."""
    flying: int = 0
    """Launched rows that aren't published yet."""
    cached: int | None = None
    """Prompt tokens found cached at the first admission."""
    announced: bool = False
    reported: int = 0
    """Prompt log-probabilities published so far; a preempted request computes them twice."""
    over: bool = False
    constraint: Constraint | None = None

    @property
    def todo(self) -> int:
        """Tokens that can be launched now; 0 when what is in flight ends the request, or decides what may follow."""
        if self.sampling and self.constraint is not None:
            return 0
        total = len(self.ids) + self.sampling
        return total - self.computed if total < self.limit or not self.sampling else 0


@dataclass
class Launch:
    """A step on its way: what the executor gets, and whose rows they are, decode lane first."""

    batch: Batch = field(default_factory=Batch)
    decode: list[tuple[Request, int, int]] = field(default_factory=list)
    """Request and its token range [start, end), of each row of the lane."""
    prefill: list[tuple[Request, int, int]] = field(default_factory=list)

    @property
    def rows(self) -> list[tuple[Request, int, int]]:
        return self.decode + self.prefill


class Scheduler:
    """Requests from arrival to their last token.

    `chunk` bounds the prefill tokens of a step, `mixed_chunk` those of a step that decodes too (others wait for
    their next token meanwhile); `max_rows` bounds the requests that run at once.
    """

    def __init__(
        self, cache: KVCache, vocab_size: int, max_model_len: int, chunk: int, mixed_chunk: int, max_rows: int
    ) -> None:
        self.cache = cache
        self.vocab_size = vocab_size
        self.max_model_len = max_model_len
        self.chunk = chunk
        self.mixed_chunk = mixed_chunk
        self.max_rows = max_rows
        self.running: list[Request] = []
        self.waiting: deque[Request] = deque()
        self.preemptions = 0
        self.retired: list[int] = []
        """Requests that are over and have no row in flight; whoever drives this empties it."""
        self._by_rid: dict[int, Request] = {}
        self._full = False

    @property
    def busy(self) -> bool:
        return bool(self.running or self.waiting)

    def add(self, submit: Submit, constraint: Constraint | None = None) -> Output | None:
        """Queue a request, or say why it can't be served."""
        problem = self._problem(submit)
        if problem:
            return Output(rid=submit.rid, finish="error", message=problem)
        table = self.cache.table()
        table.marks.append((len(submit.prompt) - 1) // self.cache.page_size)
        limit = min(len(submit.prompt) + submit.max_tokens, self.max_model_len)
        request = Request(submit, list(submit.prompt), limit, table, constraint=constraint)
        self._by_rid[submit.rid] = request
        self.waiting.append(request)
        return None

    def abort(self, rid: int) -> Output | None:
        """End a request in whatever state it is; None when it is over already."""
        request = self._by_rid.get(rid)
        if request is None:
            return None
        self._end(request)
        return Output(rid=rid, finish="abort")

    def schedule(self) -> Launch:
        """The next step: a token for each request that decodes, chunks for those that don't yet."""
        self._admit()
        sizes = self._sizes()
        launch = Launch()
        for request in self.running:
            size = sizes.get(request, 0)
            while size and not self.cache.grow(request.table, request.computed, request.computed + size):
                victim = self.running[-1]
                self._preempt(victim)
                if victim is request:
                    break
            else:
                if size:
                    self._launch(request, size, launch)
        for request, _, end in launch.rows:
            # Only now: a row never reads pages that another row of the same step writes.
            self.cache.offer(request.table, request.ids, end)
        return launch

    def publish(self, launch: Launch, sampled: Sequence[Sampled]) -> list[Output]:
        """Take a step's results in. Tokens of requests that ended meanwhile are dropped."""
        outputs = []
        for (request, start, end), result in zip(launch.rows, sampled, strict=True):
            request.flying -= 1
            if request.over:
                if not request.flying:
                    self.retired.append(request.submit.rid)
                continue
            outputs.append(self._publish_row(request, start, end, result))
        return outputs

    def _admit(self) -> None:
        """Let waiting requests in, oldest first, while there are rows and pages for all that is known of them."""
        while self.waiting and len(self.running) < self.max_rows and not self._full:
            request = self.waiting[0]
            hit = 0 if self._wants_prompt_logprobs(request) else self.cache.lookup(request.table, request.ids)
            if not self.cache.admits(request.table, hit, len(request.ids), self._reserved()):
                # Asking again is pointless (and costs a look at the whole prompt) until a request gives pages back.
                self._full = bool(self.running)
                return
            self.waiting.popleft()
            self.cache.acquire(request.table, hit)
            request.computed = hit
            if request.cached is None:
                request.cached = hit
            self.running.append(request)

    def _reserved(self) -> list[int]:
        """Pages per group that running requests need for the tokens they have, and one more each."""
        total = [0] * len(self.cache.pools)
        for request in self.running:
            demand = self.cache.demand(request.table, len(request.ids) + self.cache.page_size)
            total = [a + b for a, b in zip(total, demand, strict=True)]
        return total

    def _sizes(self) -> dict[Request, int]:
        """Tokens for each running request: one to decode, else an equal share of the chunk, shortest first.

        What a short prompt leaves goes to the longer ones, so it isn't held up behind them.
        """
        sizes = {request: request.todo for request in self.running}
        prefills = sorted((r for r, todo in sizes.items() if todo > 1), key=sizes.__getitem__)
        budget = self.chunk if len(prefills) == len(sizes) else self.mixed_chunk
        for index, request in enumerate(prefills):
            sizes[request] = min(sizes[request], -(-budget // (len(prefills) - index)))
            budget -= sizes[request]
        return sizes

    def _launch(self, request: Request, size: int, launch: Launch) -> None:
        submit, ids, start = request.submit, request.ids, request.computed
        end = start + size
        total = len(ids) + request.sampling
        sample = end == total < request.limit
        constraint = request.constraint
        banned = constraint is None and total - len(submit.prompt) < submit.min_tokens
        row = Row(
            rid=submit.rid,
            tokens=ids[start:end] or (-1,),
            start=start,
            pages=request.table.pages,
            sample=sample,
            sampling=submit.sampling,
            stop_ids=submit.stop_ids,
            banned=submit.stop_ids if banned else (),
            history=ids,
            prompt_len=len(submit.prompt),
            prompt_logprobs=submit.prompt_logprobs if self._wants_prompt_logprobs(request) else None,
            mask=constraint.mask if sample and constraint is not None else None,
        )
        if sample and size == 1 and start > 0 and row.prompt_logprobs is None:
            launch.batch.decode.append(row)
            launch.decode.append((request, start, end))
        else:
            launch.batch.prefill.append(row)
            launch.prefill.append((request, start, end))
        request.computed = end
        request.sampling += sample
        request.flying += 1

    def _publish_row(self, request: Request, start: int, end: int, result: Sampled) -> Output:
        submit = request.submit
        output = Output(rid=submit.rid)
        if not request.announced:
            request.announced = True
            output.cached = request.cached
        if len(request.ids) == len(submit.prompt):
            output.computed = min(end, len(submit.prompt))
        if result.prompt_logprobs:
            output.prompt_logprobs = result.prompt_logprobs[max(0, request.reported - start) :]
            request.reported += len(output.prompt_logprobs)
        if result.token is not None:
            request.sampling -= 1
            request.ids.append(result.token)
            output.ids = [result.token]
            if result.logprob is not None:
                output.logprobs = [result.logprob]
            self.cache.offer(request.table, request.ids, request.computed)
        if output.ids and result.token in submit.stop_ids:
            output.finish = "stop"
        elif len(request.ids) >= request.limit and end >= len(submit.prompt):
            output.finish = "length"
        elif result.token is not None and (constraint := request.constraint) is not None:
            constraint.accept(result.token)
            if constraint.problem:
                output.finish, output.message = "error", constraint.problem
        if output.finish:
            request.table.marks.append(request.table.offered)
            self._end(request)
        return output

    def _preempt(self, request: Request) -> None:
        if len(self.running) == 1:
            raise RuntimeError("one request alone doesn't fit the KV pools")
        self.running.remove(request)
        self.cache.release(request.table)
        request.computed = 0
        self.waiting.appendleft(request)
        self.preemptions += 1
        self._full = False

    def _end(self, request: Request) -> None:
        request.over = True
        del self._by_rid[request.submit.rid]
        (self.waiting if request in self.waiting else self.running).remove(request)
        self.cache.release(request.table)
        self._full = False
        if not request.flying:
            self.retired.append(request.submit.rid)

    def _wants_prompt_logprobs(self, request: Request) -> bool:
        last = len(request.submit.prompt) - 1
        return request.submit.prompt_logprobs is not None and request.computed <= last and request.reported < last

    def _problem(self, submit: Submit) -> str:
        if not submit.prompt:
            return "the prompt is empty"
        if len(submit.prompt) >= self.max_model_len:
            return (
                f"the prompt has {len(submit.prompt)} tokens, but prompt and answer together can have "
                f"{self.max_model_len} at most; shorten the conversation or start a new one"
            )
        if not 0 <= min(submit.prompt) <= max(submit.prompt) < self.vocab_size:
            return f"the prompt has token ids outside of 0..{self.vocab_size - 1}"
        return ""
