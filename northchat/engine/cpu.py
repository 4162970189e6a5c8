"""The executor on the CPU, in torch: a step runs when it is submitted, its result waits to be polled."""

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, Protocol

import torch

from northchat.engine.executor import PAGE, Batch, ExecutorError, KVGroup, Progress, Row, Sampled
from northchat.engine.protocol import Logprob
from northchat.engine.sampler import logprobs, sample
from northchat.engine.threads import Threads
from northchat.model import cohere2_moe, llama
from northchat.model.checkpoint import open_weights
from northchat.model.paged_kv import PagedKV, Plan, Span

MAX_THREADS = 16
"""Beyond so many cores memory, not arithmetic, limits decoding."""
DENSE_COPY = 512 << 20
"""A bfloat16 copy of 4-bit weights may take so many bytes, and a quarter of what is available."""
LOGIT_ROWS = 128
"""Prompt positions whose logits are held at once for prompt_logprobs."""


class Config(Protocol):
    @property
    def kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def vocab(self) -> int: ...
    @property
    def max_context(self) -> int: ...
    @property
    def groups(self) -> tuple[tuple[tuple[int, ...], int | None], ...]:
        """Layers that share page tables, with their window."""


class Model(Protocol):
    """What the executor needs of a model of model/."""

    @property
    def config(self) -> Config: ...
    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def label(self) -> str: ...
    def hidden(self, ids: torch.Tensor, plans: Sequence[Plan], kvs: Sequence[PagedKV]) -> torch.Tensor: ...
    def logits(self, hidden: torch.Tensor) -> torch.Tensor: ...


def kv_groups(config: Config, dtype: torch.dtype, page_size: int = PAGE) -> tuple[KVGroup, ...]:
    """A page of a group takes layers * 2 * kv_heads * page_size * head_dim values."""
    layer_bytes = 2 * config.kv_heads * page_size * config.head_dim * dtype.itemsize
    return tuple(
        KVGroup("full" if window is None else "sliding", layers, window, len(layers) * layer_bytes)
        for layers, window in config.groups
    )


class CpuExecutor:
    """A model with its KV pools; see `executor.Executor`."""

    def __init__(self, model: Model, page_size: int = PAGE) -> None:
        c = model.config
        self._threads = Threads(torch.get_num_threads())
        self.device = f"CPU, {torch.get_num_threads()} threads"
        self.dtype = model.label
        self.vocab_size = c.vocab
        self.max_context = c.max_context
        self.groups = kv_groups(c, model.dtype, page_size)
        self._model, self._page_size = model, page_size
        self._kvs: list[PagedKV] = []
        self._last: dict[int, int] = {}
        self._done: dict[int, list[Sampled]] = {}
        self._handles = 0

    def allocate(self, pages: Sequence[int]) -> None:
        c, dtype = self._model.config, self._model.dtype
        try:
            self._kvs = [
                PagedKV(len(group.layers), c.kv_heads, c.head_dim, count, self._page_size, dtype, group.window)
                for group, count in zip(self.groups, pages, strict=True)
            ]
        except RuntimeError as error:
            wanted = sum(n * group.page_bytes for n, group in zip(pages, self.groups, strict=True)) >> 20
            raise ExecutorError(f"no memory for {wanted} MiB of KV cache; close other programs") from error

    def free_memory(self) -> int:
        return available_memory()

    @torch.inference_mode()
    def submit(self, batch: Batch) -> int:
        """Runs the step: all decode rows in one pass, then all chunks in one. Raises ExecutorError."""
        self._handles += 1
        with self._threads.step() if batch.decode and not batch.prefill else contextlib.nullcontext():
            self._done[self._handles] = self._run(batch.decode) + self._run(batch.prefill)
        return self._handles

    def poll(self, handle: int) -> list[Sampled]:
        return self._done.pop(handle)

    def release(self, rid: int) -> None:
        self._last.pop(rid, None)

    def _run(self, rows: Sequence[Row]) -> list[Sampled]:
        if not rows:
            return []
        if not self._kvs:
            raise ExecutorError("the KV pools are not allocated")
        ids = [self._last[row.rid] if token == -1 else token for row in rows for token in row.tokens]
        plans = [
            kv.plan([Span(row.start, len(row.tokens), row.pages[group]) for row in rows])
            for group, kv in enumerate(self._kvs)
        ]
        hidden = self._model.hidden(torch.tensor(ids), plans, self._kvs)
        results = [Sampled(row.rid, None) for row in rows]
        ends = [reach.first + reach.length for reach in plans[0].reaches]
        for row, end, result in zip(rows, ends, results, strict=True):
            if row.prompt_logprobs is not None:
                result.prompt_logprobs = self._prompt_logprobs(row, hidden[end - len(row.tokens) : end])
        sampled = [i for i, row in enumerate(rows) if row.sample]
        if sampled:
            last = hidden if len(sampled) == hidden.shape[0] else hidden[[ends[i] - 1 for i in sampled]]
            chosen = sample(self._model.logits(last), [rows[i] for i in sampled])
            for i, (token, logprob) in zip(sampled, chosen, strict=True):
                results[i].token, results[i].logprob = token, logprob
                self._last[rows[i].rid] = token
        return results

    def _prompt_logprobs(self, row: Row, hidden: torch.Tensor) -> list[Logprob]:
        """Of the prompt tokens that follow those of the row."""
        targets = row.history[row.start + 1 : min(row.start + len(row.tokens) + 1, row.prompt_len)]
        found: list[Logprob] = []
        for at in range(0, len(targets), LOGIT_ROWS):
            ids = targets[at : at + LOGIT_ROWS]
            found += logprobs(self._model.logits(hidden[at : at + len(ids)]), ids, row.prompt_logprobs or 0)
        return found


def load(path: Path, dtype: Literal["auto", "float32"], progress: Progress) -> CpuExecutor:
    """Load a GGUF file or a Hugging Face directory.

    float32: every weight is dequantised, for comparisons. auto: what was stored as Q4_0 or Q4_1 stays 4-bit, all else
    is bfloat16. Raises ModelError.
    """
    torch.set_num_threads(threads())
    weights = open_weights(path)
    size = path.stat().st_size if path.is_file() else sum(f.stat().st_size for f in path.glob("*.safetensors"))

    def loaded(share: float) -> None:
        progress("weights", int(size * share), size)

    exact = dtype == "float32"
    width = torch.float32 if exact else torch.bfloat16
    with torch.inference_mode():
        if weights.config["model_type"] == "cohere2_moe":
            return CpuExecutor(cohere2_moe.load(weights, width, loaded))
        # Four bits and a scale are a quarter of bfloat16.
        keep_dense = not exact and 4 * size < min(DENSE_COPY, available_memory() // 4)
        return CpuExecutor(llama.load(weights, width, not exact, keep_dense, loaded))


def threads() -> int:
    """Physical cores that this process may use, at most MAX_THREADS: siblings share the units that matter here."""
    cores = set()
    for cpu in os.sched_getaffinity(0):
        siblings = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
        try:
            cores.add(siblings.read_text())
        except OSError:
            cores.add(str(cpu))
    count = len(cores)
    with contextlib.suppress(OSError, ValueError):
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        count = min(count, max(1, round(int(quota) / int(period))))
    return min(count, MAX_THREADS)


def available_memory() -> int:
    """Bytes that can be taken without swapping: the machine's, or the control group's where that is less."""
    fields = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    available = int(fields["MemAvailable"].split()[0]) << 10
    with contextlib.suppress(OSError, ValueError):
        limit = int(Path("/sys/fs/cgroup/memory.max").read_text())
        available = min(available, limit - int(Path("/sys/fs/cgroup/memory.current").read_text()))
    return max(0, available)
