"""Runs the megakernel's own schedule in torch, from the same packed buffers, on any device.

Every SM is a coroutine that walks its task list, computes from the byte ranges that the kernel's ring would carry, and
stops where the kernel would wait. If all of them stop, the schedule has a cycle and `Deadlock` is raised. Arithmetic is
fp32 throughout. `reference_step` is the model written down plainly, from unpacked weights, to compare with.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator, Sequence

import torch

from northchat.engine.megakernel import Get, LayerWeights, Weights, rope_table, unpack_columns, unpack_rows
from northchat.engine.schedule import GROUP, HEAD_DIM, PAGE, UNIT, Dims, Kind, Op, Program, Schedule

Wait = Generator[tuple[str, int], None, None]
"""Yields (counter, goal) while the counter is below the goal."""


class Deadlock(RuntimeError):
    """Every SM waits; carries what each waits for."""


def floats(buffer: torch.Tensor, first: int, count: int) -> torch.Tensor:
    """fp32 values of `count` bytes of a flat bf16 buffer, from byte `first`."""
    return buffer[first // 2 : (first + count) // 2].float()


class Interpreter:
    """One sequence's steps. Pools as `kv_pool` makes them, on the CPU or a GPU.

    After a step: `produced` counts how often each (layer, op, unit) was computed, `streamed` the weight bytes of each
    (SM, layer), `logits` [vocab] and `hidden` [layers + 1, hidden] are fp32, `routing` the experts of each layer by
    rank.
    """

    def __init__(self, weights: Weights, schedule: Schedule, kv_full: torch.Tensor, kv_sliding: torch.Tensor) -> None:
        self.w, self.schedule, self.dims = weights, schedule, weights.dims
        self.pools = (kv_full, kv_sliding)
        self.logits = torch.zeros(self.dims.vocab)
        self.hidden = torch.zeros(self.dims.layers + 1, self.dims.hidden)
        self.routing: list[list[int]] = []
        self.produced: Counter[tuple[int, Op, int]] = Counter()
        self.streamed: Counter[tuple[int, int]] = Counter()

    def step(
        self,
        token: int,
        position: int,
        page_table_full: Sequence[int],
        page_table_sliding: Sequence[int],
        *,
        force_routing: torch.Tensor | None = None,
    ) -> int:
        """As Megakernel.step, greedy; the logits are always kept. Raises Deadlock."""
        d, schedule = self.dims, self.schedule
        device = self.pools[0].device
        self.produced.clear()
        self.streamed.clear()
        self.counters: Counter[str] = Counter()
        self.routing = [[] for _ in range(d.layers)]
        self.token, self.position, self.tables, self.forced = (
            token,
            position,
            (page_table_full, page_table_sliding),
            force_routing,
        )
        self.rope = rope_table(d, position + 1, device)[position].float()
        self.sums = torch.zeros(d.layers, d.hidden + d.experts, device=device)
        self.qkv = torch.zeros(d.qkv_units * UNIT, device=device)
        self.partials = torch.zeros(schedule.splits, d.heads, HEAD_DIM, device=device)
        self.softmax = torch.full((schedule.splits, d.heads, 2), float("-inf"), device=device)
        waiting = {sm: self._sm(sm) for sm in range(schedule.num_sms)}
        stuck: dict[int, tuple[str, int]] = {}
        while waiting:
            stuck.clear()
            for sm in list(waiting):
                try:
                    stuck[sm] = next(waiting[sm])
                except StopIteration:
                    del waiting[sm]
            # A round in which every SM stops on a counter that nobody will raise is the last one.
            if waiting and len(stuck) == len(waiting) and all(self.counters[c] < goal for c, goal in stuck.values()):
                raise Deadlock(f"all SMs wait: {dict(list(stuck.items())[:8])}")
        return int(self.logits.argmax())

    def _until(self, counter: str, goal: int) -> Wait:
        while self.counters[counter] < goal:
            yield counter, goal

    def _sm(self, sm: int) -> Wait:
        d, n = self.dims, self.schedule.num_sms
        h = unpack_rows(floats(self.w.head, self.token // UNIT * d.row_chunk, d.row_chunk)[None], d.hidden)[
            self.token % UNIT
        ]
        for layer in range(d.layers + 1):
            if layer:
                yield from self._until("residual", layer * n)
                h = h + self.sums[layer - 1, : d.hidden]
            if sm == 0:
                self.hidden[layer] = h
            scale = torch.rsqrt(h.square().mean() + d.eps)
            weights = self.w.layers[layer] if layer < d.layers else None
            x = h * (weights.norm if weights else self.w.norm).float()
            kind = Kind.HEAD if layer == d.layers else Kind.MIXTURE if layer else Kind.DENSE
            program = self.schedule.programs[kind][sm]
            if weights is None:
                for task in program:
                    for unit in range(task.first, task.first + task.count):
                        rows = unpack_rows(floats(self.w.head, unit * d.row_chunk, d.row_chunk)[None], d.hidden)
                        self.logits[unit * UNIT : (unit + 1) * UNIT] = rows @ x * scale
                        self._count(sm, layer, Op.HEAD, unit, d.row_chunk)
                return
            acc = torch.zeros(d.hidden + d.experts, device=h.device)
            yield from self._layer(sm, layer, program, weights, h, x, scale, acc)
            self.sums[layer] += acc
            self.counters["residual"] += 1

    def _layer(
        self,
        sm: int,
        layer: int,
        program: Program,
        w: LayerWeights,
        h: torch.Tensor,
        x: torch.Tensor,
        scale: torch.Tensor,
        acc: torch.Tensor,
    ) -> Wait:
        d = self.dims
        experts: list[int] = []
        for op, first, count in program:
            if op is Op.QKV:
                for unit in range(first, first + count):
                    self._project_in(sm, layer, unit, w, h, x, scale, acc)
            elif op is Op.EXPERTS:
                if layer and not experts:
                    experts = self._route(layer, first == 0)
                for unit in range(first, first + count):
                    rank, channel = divmod(unit, d.expert_units) if layer else (0, unit)
                    index = experts[rank] * d.expert_units + channel if layer else unit
                    at = index * d.expert_unit
                    gate, up = (
                        unpack_rows(floats(w.experts, at + i * d.row_chunk, d.row_chunk)[None], d.hidden) @ x * scale
                        for i in range(2)
                    )
                    middle = torch.nn.functional.silu(gate) * up
                    if layer:
                        middle = middle * torch.sigmoid(self.sums[layer - 1, d.hidden + experts[rank]] * scale)
                    self._columns(w.experts, at + 2 * d.row_chunk, middle, acc)
                    self._count(sm, layer, Op.EXPERTS, unit, d.expert_unit)
            elif op is Op.ATTENTION:
                yield from self._attend(layer, first, count)
            elif op is Op.OPROJ:
                channels = torch.arange(first * UNIT, (first + count) * UNIT, device=h.device)
                heads = channels // HEAD_DIM
                for g in range(int(heads[0]) // GROUP, int(heads[-1]) // GROUP + 1):
                    yield from self._until(f"attention {g}", (layer + 1) * self.schedule.splits)
                _, _, pages = d.span(layer, self.position)
                m, total = self.softmax[: min(self.schedule.splits, pages + 1), heads].unbind(-1)
                weight = torch.exp2(m - m.max(0).values)
                part = self.partials[: len(m)].reshape(len(m), -1)[:, channels]
                out = (weight * part).sum(0) / (weight * total).sum(0)
                for unit in range(first, first + count):
                    self._columns(w.oproj, unit * d.column_chunk, out[(unit - first) * UNIT :][:UNIT], acc)
                    self._count(sm, layer, Op.OPROJ, unit, d.column_chunk)

    def _project_in(
        self,
        sm: int,
        layer: int,
        unit: int,
        w: LayerWeights,
        h: torch.Tensor,
        x: torch.Tensor,
        scale: torch.Tensor,
        acc: torch.Tensor,
    ) -> None:
        d, at = self.dims, self.dims.qkv_offset(unit)
        y = unpack_rows(floats(w.qkv, at, d.row_chunk)[None], d.hidden) @ x * scale
        piece = d.router_pieces_before(unit)
        if d.router_pieces_before(unit + 1) > piece:
            router = floats(w.qkv, at + d.row_chunk, d.router_piece).view(d.experts, UNIT)
            acc[d.hidden :] += router @ h[piece * UNIT : (piece + 1) * UNIT]
        head, row = divmod(unit * UNIT, (GROUP + 2) * HEAD_DIM)
        part, dim = divmod(row, HEAD_DIM)
        if d.rotary(layer) and part <= GROUP:
            cos, sin = self.rope[dim // 2 : (dim + UNIT) // 2].unbind(-1)
            y = torch.stack([y[0::2] * cos - y[1::2] * sin, y[1::2] * cos + y[0::2] * sin], dim=-1).flatten()
        self.qkv[unit * UNIT : (unit + 1) * UNIT] = y
        if part >= GROUP:
            group = 0 if d.full(layer) else 1
            page = self.tables[group][self.position // PAGE]
            tile = self.pools[group][d.index_in_group(layer), page, head, part - GROUP]
            tile[self.position % PAGE, dim : dim + UNIT] = y.bfloat16()
        self.counters[f"qkv {head}"] += 1
        self._count(sm, layer, Op.QKV, unit, d.qkv_offset(unit + 1) - at)

    def _route(self, layer: int, keep: bool) -> list[int]:
        d = self.dims
        if self.forced is not None:
            chosen = [int(e) for e in self.forced[layer]]
        else:
            chosen = (
                torch.sort(self.sums[layer - 1, d.hidden :], descending=True, stable=True).indices[: d.top_k].tolist()
            )
        if keep:
            self.routing[layer] = chosen
        return chosen

    def _attend(self, layer: int, head: int, split: int) -> Wait:
        if split < 0:
            return
        d, splits = self.dims, self.schedule.splits
        low, first, pages = d.span(layer, self.position)
        mine, newest = range(split, pages, splits), split == pages % splits
        if mine or newest:
            yield from self._until(f"qkv {head}", (layer + 1) * d.qkv_units // d.kv_heads)
            q, k, v = self.qkv.view(d.kv_heads, GROUP + 2, HEAD_DIM)[head].tensor_split([GROUP, GROUP + 1])
            group = 0 if d.full(layer) else 1
            keys, values = [], []
            for index in mine:
                tile = self.pools[group][d.index_in_group(layer), self.tables[group][first + index], head].float()
                start = (first + index) * PAGE
                seen = slice(max(0, low - start), min(PAGE, self.position - start))
                keys.append(tile[0, seen])
                values.append(tile[1, seen])
            if newest:
                keys.append(k.bfloat16().float())
                values.append(v.bfloat16().float())
            scores = q @ torch.cat(keys).T * (HEAD_DIM**-0.5 * 1.4426950408889634)
            m = scores.max(-1).values
            p = torch.exp2(scores - m[:, None])
            rows = slice(head * GROUP, (head + 1) * GROUP)
            self.partials[split, rows] = p @ torch.cat(values)
            self.softmax[split, rows] = torch.stack([m, p.sum(-1)], dim=-1)
        self.counters[f"attention {head}"] += 1

    def _columns(self, buffer: torch.Tensor, at: int, m: torch.Tensor, acc: torch.Tensor) -> None:
        d = self.dims
        rows, router = unpack_columns(floats(buffer, at, d.column_chunk)[None], d.hidden)
        acc[: d.hidden] += rows @ m
        acc[d.hidden :] += router @ m

    def _count(self, sm: int, layer: int, op: Op, unit: int, size: int) -> None:
        self.produced[layer, op, unit] += 1
        self.streamed[sm, layer] += size


def reference_step(
    dims: Dims,
    get: Get,
    token: int,
    position: int,
    cache: list[tuple[torch.Tensor, torch.Tensor]],
    *,
    force_routing: torch.Tensor | None = None,
    routing: list[torch.Tensor] | None = None,
    hidden: list[torch.Tensor] | None = None,
) -> torch.Tensor:
    """Logits [vocab] of one token in fp32 from a checkpoint's own tensors: parallel attention and mixture block,
    RMSNorm, sigmoid top-k.

    cache[layer]: keys and values [kv_heads, tokens, 128] of all earlier tokens; replaced by one token more, rounded to
    bf16 as a cache would hold them. routing and hidden, if given, receive each layer's experts and input.
    """
    d = dims
    h = get("model.embed_tokens.weight")[token].float()
    cos, sin = rope_table(d, position + 1, h.device)[position].float().unbind(-1)

    def norm(name: str) -> torch.Tensor:
        return h * torch.rsqrt(h.square().mean() + d.eps) * get(name).float()

    def rotate(x: torch.Tensor) -> torch.Tensor:
        return torch.stack([x[:, 0::2] * cos - x[:, 1::2] * sin, x[:, 1::2] * cos + x[:, 0::2] * sin], dim=-1).flatten(
            1
        )

    for layer in range(d.layers):
        name = f"model.layers.{layer}."
        if hidden is not None:
            hidden.append(h.clone())
        x = norm(name + "input_layernorm.weight")
        q, k, v = ((get(f"{name}self_attn.{p}_proj.weight").float() @ x).view(-1, HEAD_DIM) for p in "qkv")
        if d.rotary(layer):
            q, k = rotate(q), rotate(k)
        keys = torch.cat([cache[layer][0], k.bfloat16().float()[:, None]], dim=1)
        values = torch.cat([cache[layer][1], v.bfloat16().float()[:, None]], dim=1)
        cache[layer] = keys, values
        if not d.full(layer):
            keys, values = keys[:, -d.window :], values[:, -d.window :]
        scores = torch.einsum("gqd,gtd->gqt", q.view(d.kv_heads, GROUP, HEAD_DIM), keys) * HEAD_DIM**-0.5
        out = torch.einsum("gqt,gtd->gqd", scores.softmax(-1), values).flatten()
        attention = get(name + "self_attn.o_proj.weight").float() @ out
        if layer == 0:
            gate, up = (get(f"{name}mlp.{p}_proj.weight").float() @ x for p in ("gate", "up"))
            ffn = get(name + "mlp.down_proj.weight").float() @ (torch.nn.functional.silu(gate) * up)
        else:
            logits = get(name + "mlp.gate.weight").float() @ x
            chosen = (
                force_routing[layer].long()
                if force_routing is not None
                else torch.sort(logits, descending=True, stable=True).indices[: d.top_k]
            )
            if routing is not None:
                routing.append(chosen)
            ffn = torch.zeros_like(h)
            gate_up, down = get(name + "mlp.experts.gate_up_proj"), get(name + "mlp.experts.down_proj")
            for e in chosen.tolist():
                gate, up = (gate_up[e].float() @ x).chunk(2)
                ffn += down[e].float() @ (torch.nn.functional.silu(gate) * up) * torch.sigmoid(logits[e])
        h = h + attention + ffn
    if hidden is not None:
        hidden.append(h.clone())
    h = norm("model.norm.weight")
    return get("model.embed_tokens.weight").float() @ h


def random_weights(dims: Dims, seed: int = 0, device: str | torch.device = "cpu") -> Get:
    """Seeded random bf16 tensors with the statistics of the real model's layer 1, made when asked for.

    Standard deviations: q 0.03074, k 0.05046, v 0.01320, o 0.02061, router 0.08388, gate 0.02188, up 0.02144, down
    0.0268; norms 0.2410 +- 0.0469; embedding 0.05 (assumed). Names as in `Weights.pack`, experts fused.
    """
    d, q, kv = dims, dims.heads * HEAD_DIM, dims.kv_heads * HEAD_DIM
    matrices: dict[str, tuple[float, tuple[int, ...]]] = {
        "q_proj": (0.03074, (q, d.hidden)),
        "k_proj": (0.05046, (kv, d.hidden)),
        "v_proj": (0.01320, (kv, d.hidden)),
        "o_proj": (0.02061, (d.hidden, q)),
        "gate": (0.08388, (d.experts, d.hidden)),
        "gate_proj": (0.02188, (d.dense_intermediate, d.hidden)),
        "up_proj": (0.02144, (d.dense_intermediate, d.hidden)),
        "down_proj": (0.0268, (d.hidden, d.dense_intermediate)),
        "gate_up_proj": (0.02166, (d.experts, 2 * d.intermediate, d.hidden)),
        "experts.down_proj": (0.0268, (d.experts, d.hidden, d.intermediate)),
        "embed_tokens": (0.05, (d.vocab, d.hidden)),
    }

    def get(name: str) -> torch.Tensor:
        kind = name.removesuffix(".weight").rsplit(".", 1)[-1]
        generator = torch.Generator(device).manual_seed(hash_name(name, seed))
        if kind in ("input_layernorm", "norm"):
            return torch.empty(d.hidden, device=device).normal_(0.2410, 0.0469, generator=generator).bfloat16()
        spread, shape = matrices["experts.down_proj" if name.endswith("experts.down_proj") else kind]
        return torch.empty(shape, dtype=torch.bfloat16, device=device).normal_(0, spread, generator=generator)

    return get


def hash_name(name: str, seed: int) -> int:
    """A number for a tensor's generator: the same in every process."""
    value = 1469598103934665603 ^ seed
    for byte in name.encode():
        value = (value ^ byte) * 1099511628211 % (1 << 63)
    return value
