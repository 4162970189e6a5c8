"""What the scheduler hands to a device each step, and what comes back.

A step has a decode lane (one new token each, latency-bound) and a prefill lane (chunks of prompts,
arithmetic-bound). The CPU runs the lanes in turn; a GPU may interleave them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from northchat.engine.protocol import Logprob, Sampling

PAGE = 64
"""Tokens in a KV page."""


@dataclass(frozen=True)
class KVGroup:
    """Layers that share page tables: all those that keep every token, or all with one sliding window."""

    name: str
    layers: tuple[int, ...]
    window: int | None
    """Keys a query sees, itself included; None: all."""
    page_bytes: int
    """Bytes of one page over all layers of the group, K and V."""


@dataclass
class Row:
    """One request's share of a step."""

    rid: int
    tokens: Sequence[int]
    """Ids to compute, at positions start, start+1, ...; a decode row has one. -1 in a decode row launched before its
    predecessor's result was polled stands for the token that this request sampled last, still on the device."""
    start: int
    pages: tuple[Sequence[int], ...]
    """Per KV group: physical page of each logical page 0..ceil((start+len)/PAGE)-1; -1 where a sliding group let go."""
    sample: bool
    """Whether the last position's logits are sampled (false for all but a prompt's last chunk)."""
    sampling: Sampling
    stop_ids: Sequence[int] = ()
    banned: Sequence[int] = ()
    """Ids that must not be sampled now (stop ids before min_tokens)."""
    history: Sequence[int] = ()
    """All ids before the sampled one, prompt and output (for penalties); shared with the scheduler, don't change it."""
    prompt_len: int = 0
    """How many of `history` are the prompt."""
    prompt_logprobs: int | None = None
    mask: bytes | None = None
    """Bit n % 8 of byte n // 8: whether id n may be sampled, ids beyond its end may not; None: any may."""


@dataclass
class Batch:
    decode: list[Row] = field(default_factory=list)
    prefill: list[Row] = field(default_factory=list)


@dataclass
class Sampled:
    rid: int
    token: int | None
    """None where the row asked for no sample."""
    logprob: Logprob | None = None
    prompt_logprobs: list[Logprob] = field(default_factory=list)


Progress = Callable[[str, int, int], None]
"""what, bytes done, bytes total"""


class Executor(Protocol):
    """A model on a device with its KV pools. Made by `load`-functions of engine/cpu.py and engine/cuda.py."""

    device: str
    dtype: str
    vocab_size: int
    max_context: int
    """The model's own limit, tokens."""
    groups: tuple[KVGroup, ...]

    def allocate(self, pages: Sequence[int]) -> None:
        """Allocate the KV pools, one per group, of so many pages each. Called once, before the first submit."""

    def free_memory(self) -> int:
        """Bytes that the KV pools may take."""

    def submit(self, batch: Batch) -> int:
        """Launch a step; returns a handle. Rows of one request never stand in two lanes of a batch."""

    def poll(self, handle: int) -> list[Sampled]:
        """Wait for that step: one Sampled per row, decode lane first. Raises ExecutorError when the device failed."""

    def release(self, rid: int) -> None:
        """The request is over: forget its sampler state (seeded generator, last token)."""


class ExecutorError(Exception):
    """The device can't go on; the message names cause and remedy in one line."""
