"""What every SM does in a decode step: static task lists, built on the host.

A step is one program per layer kind (dense first layer, mixture-of-experts layer) and one for the head. A program is,
per SM, a short list of tasks over *units*; a unit is the smallest piece of work, and the same one SM always does it:

- QKV: 8 rows of the fused projection over the whole hidden vector (one chunk of the ring).
- EXPERTS: 8 intermediate channels of one expert: 8 gate rows, 8 up rows, then the same 8 columns of down (three
  chunks).
  In a mixture layer unit u belongs to the expert of rank u // units_per_expert, so the list is static although the
  experts are not.
- ATTENTION: every `splits`-th page of one KV head, from page `split` on.
- OPROJ: 8 of the attention's output channels times the same 8 columns of the output projection (one chunk).
- HEAD: 8 vocabulary rows (one chunk).

EXPERTS and OPROJ yield partial sums of the whole residual, which an SM keeps until its layer ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

UNIT = 8  # rows or channels in a unit
PAGE = 64  # tokens in a KV page
HEAD_DIM = 128
GROUP = 8  # query heads that share a KV head; also the most units whose results are handed over together
WARPS = 8  # consumer warps; a chunk is cut into as many pieces
MAX_TASKS = 8
# Room in the kernel's shared memory, and in the byte that counts SMs.
MAX_OPROJ_UNITS = 32
MAX_QKV_CHANNELS = 128
MAX_SMS = 254


@dataclass(frozen=True)
class Dims:
    """A model's shape. Equal to the struct of the same name in native/dims.h.

    `full_every`: layers with l % full_every == 0 attend to everything, the others to the last `window` tokens. Layer 0
    is dense; rotary positions are applied on sliding layers and on layer 0. Head size is 128, 8 query heads share a KV
    head.
    """

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    experts: int
    top_k: int
    intermediate: int
    dense_intermediate: int
    vocab: int
    window: int
    full_every: int = 4
    rope_theta: float = 50000.0
    eps: float = 1e-6

    def full(self, layer: int) -> bool:
        return layer % self.full_every == 0

    def rotary(self, layer: int) -> bool:
        return layer == 0 or not self.full(layer)

    def index_in_group(self, layer: int) -> int:
        """Which layer of its KV group (full or sliding) a layer is."""
        full_before = -(-layer // self.full_every)
        return full_before if self.full(layer) else layer - full_before

    @property
    def full_layers(self) -> int:
        return -(-self.layers // self.full_every)

    @property
    def sliding_layers(self) -> int:
        return self.layers - self.full_layers

    @property
    def qkv_units(self) -> int:
        return (self.heads + 2 * self.kv_heads) * HEAD_DIM // UNIT

    @property
    def oproj_units(self) -> int:
        return self.heads * HEAD_DIM // UNIT

    @property
    def expert_units(self) -> int:
        """Units of one expert."""
        return self.intermediate // UNIT

    # Sizes in bytes of what the ring carries; native/dims.h has the same.
    @property
    def row_chunk(self) -> int:
        """8 rows times the hidden size, bf16."""
        return UNIT * self.hidden * 2

    @property
    def router_piece(self) -> int:
        """8 hidden channels of the next layer's router, carried behind some QKV chunks."""
        return self.experts * UNIT * 2

    @property
    def column_chunk(self) -> int:
        """8 columns of a matrix with one row per hidden channel and one per router logit, bf16."""
        return (self.hidden + self.experts) * UNIT * 2

    @property
    def expert_unit(self) -> int:
        return 2 * self.row_chunk + self.column_chunk

    @property
    def page_tile(self) -> int:
        """K and V of 64 tokens of one KV head, bf16."""
        return 2 * PAGE * HEAD_DIM * 2

    def router_pieces_before(self, unit: int) -> int:
        """Router pieces that lie before QKV unit `unit`: hidden/8 pieces, spread evenly over the units."""
        return unit * (self.hidden // UNIT) // self.qkv_units

    def qkv_offset(self, unit: int) -> int:
        return unit * self.row_chunk + self.router_pieces_before(unit) * self.router_piece

    def span(self, layer: int, position: int) -> tuple[int, int, int]:
        """(first cached token that `layer` sees from `position`, first page, number of pages)."""
        low = 0 if self.full(layer) else max(0, position - self.window + 1)
        first = low // PAGE
        return low, first, (position - 1) // PAGE - first + 1 if position else 0


NORTH_MINI_CODE = Dims("north_mini_code", 49, 2048, 32, 4, 128, 8, 768, 3072, 262144, 4096)
SMALL = Dims("small", 6, 1024, 16, 2, 32, 4, 64, 192, 2048, 256)


class Op(IntEnum):
    END = 0
    QKV = 1
    EXPERTS = 2
    ATTENTION = 3
    OPROJ = 4
    HEAD = 5


class Kind(IntEnum):
    DENSE = 0
    MIXTURE = 1
    HEAD = 2


class Task(NamedTuple):
    """`count` units from `first`; for ATTENTION the KV head and the split (-1: this SM has no part in it)."""

    op: Op
    first: int
    count: int  # type: ignore[assignment]  # a tuple's method of that name is not wanted


Program = list[Task]


@dataclass(frozen=True)
class Schedule:
    dims: Dims
    num_sms: int
    programs: dict[Kind, list[Program]]

    @property
    def splits(self) -> int:
        """Into how many parts the pages of one KV head are dealt."""
        return self.num_sms // self.dims.kv_heads

    def table(self) -> list[int]:
        """int32 [num_sms, kinds, MAX_TASKS, 4], flat: op, first, count, 0; the form in which the kernel reads it."""
        flat: list[int] = []
        for sm in range(self.num_sms):
            for kind in Kind:
                program = self.programs[kind][sm]
                if len(program) >= MAX_TASKS:
                    raise ValueError(f"SM {sm} has {len(program)} tasks, at most {MAX_TASKS - 1} fit")
                for task in [*program, *[Task(Op.END, 0, 0)] * (MAX_TASKS - len(program))]:
                    flat += [int(task.op), task.first, task.count, 0]
        return flat

    def weight_bytes(self, sm: int, kind: Kind) -> int:
        """Bytes of weights an SM streams in one program."""
        d, total = self.dims, 0
        for op, first, count in self.programs[kind][sm]:
            if op is Op.QKV:
                total += d.qkv_offset(first + count) - d.qkv_offset(first)
            elif op is Op.EXPERTS:
                total += count * d.expert_unit
            elif op is Op.OPROJ:
                total += count * d.column_chunk
            elif op is Op.HEAD:
                total += count * d.row_chunk
        return total


def deal(units: int, shares: Sequence[float]) -> list[int]:
    """Whole numbers that sum to `units` and follow `shares`: cumulative rounding, so a run of SMs is never off by more
    than one.
    """
    total, done, given, out = sum(shares), 0.0, 0, []
    for share in shares:
        done += share
        upto = round(units * done / total)
        out.append(upto - given)
        given = upto
    return out


def build(
    dims: Dims,
    num_sms: int,
    *,
    sm_weights: Sequence[float] | None = None,
    before_attention: int = 11,
    last_experts: int = 0,
    most_qkv: int = 1,
) -> Schedule:
    """Task lists for `num_sms` SMs.

    sm_weights: relative speed of each SM (equal if None). before_attention: chunks that an SM does before its
    attention, QKV and whole expert units; last_experts: expert units after the output projection. The other experts lie
    between the two and cover the way from the slowest attention to the first output channel. most_qkv: QKV units an SM
    may have above the average to make up for fewer expert units. Raises ValueError where the model cannot be dealt to
    that many SMs.
    """
    weights = list(sm_weights) if sm_weights is not None else [1.0] * num_sms
    if num_sms > MAX_SMS:
        raise ValueError(f"at most {MAX_SMS} SMs, got {num_sms}")
    if num_sms < dims.kv_heads or len(weights) != num_sms or min(weights) <= 0:
        raise ValueError(
            f"need at least {dims.kv_heads} SMs and one positive weight for each, got {num_sms} and {len(weights)}"
        )
    programs: dict[Kind, list[Program]] = {}
    splits = num_sms // dims.kv_heads
    for kind, experts in (
        (Kind.DENSE, dims.dense_intermediate // UNIT),
        (Kind.MIXTURE, dims.top_k * dims.expert_units),
    ):
        # An SM with more of one phase gets less of the others: what is left of its share decides who is rounded up.
        chunks = dims.qkv_units + dims.oproj_units + 3 * experts
        share = [chunks * w / sum(weights) for w in weights]
        expert_counts = deal(experts, weights)
        left = [c - 3 * e for c, e in zip(share, expert_counts, strict=True)]
        oproj_counts = apportion(dims.oproj_units, weights, left)
        left = [c - o for c, o in zip(left, oproj_counts, strict=True)]
        qkv_counts = apportion(dims.qkv_units, weights, left, most_qkv)
        qkv = expert = oproj = 0
        programs[kind] = []
        for sm in range(num_sms):
            n_qkv, n_oproj, n_expert = qkv_counts[sm], oproj_counts[sm], expert_counts[sm]
            last = min(last_experts, n_expert)
            head = max(0, min(round((before_attention - n_qkv) / 3), n_expert - last))
            middle = n_expert - head - last
            split = Task(Op.ATTENTION, sm % dims.kv_heads, sm // dims.kv_heads if sm < splits * dims.kv_heads else -1)
            if not n_qkv:
                raise ValueError(f"{dims.name} has too little work for {num_sms} SMs: every SM needs a QKV unit")
            tasks = [
                Task(Op.QKV, qkv, n_qkv),
                Task(Op.EXPERTS, expert, head),
                split,
                Task(Op.EXPERTS, expert + head, middle),
                Task(Op.OPROJ, oproj, n_oproj),
                Task(Op.EXPERTS, expert + head + middle, last),
            ]
            pieces = dims.router_pieces_before(qkv + n_qkv) - dims.router_pieces_before(qkv)
            if n_oproj > MAX_OPROJ_UNITS or pieces * UNIT > MAX_QKV_CHANNELS:
                raise ValueError(
                    f"{dims.name} does not fit {num_sms} SMs: SM {sm} would project {n_oproj} units and route {pieces}"
                )
            programs[kind].append([t for t in tasks if t.count or t.op is Op.ATTENTION])
            qkv, expert, oproj = qkv + n_qkv, expert + n_expert, oproj + n_oproj
    head_counts, at = deal(dims.vocab // UNIT, weights), 0
    programs[Kind.HEAD] = []
    for count in head_counts:
        if not count:
            raise ValueError(f"{dims.name} has too little work for {num_sms} SMs: every SM needs a unit of the head")
        programs[Kind.HEAD].append([Task(Op.HEAD, at, count)])
        at += count
    return Schedule(dims, num_sms, programs)


def apportion(units: int, shares: Sequence[float], left: Sequence[float], above: int = 1) -> list[int]:
    """Each its share of `units` rounded down, the rest one by one to those with most `left`, at most `above` each."""
    low = [int(units * share / sum(shares)) for share in shares]
    out = list(low)
    for _ in range(units - sum(out)):
        best = max(
            (i for i in range(len(out)) if out[i] < low[i] + above), key=lambda i: (left[i] - out[i], -low[i], -i)
        )
        out[best] += 1
    return out
