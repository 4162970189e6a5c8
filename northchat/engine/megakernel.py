"""The decode megakernel: repacked weights, argument checks, launches.

Importing needs no GPU and no compiled extension; making a `Megakernel` needs both.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType

import torch

from northchat.engine.schedule import HEAD_DIM, NORTH_MINI_CODE, PAGE, SMALL, UNIT, WARPS, Dims, Schedule, build

__all__ = ["NORTH_MINI_CODE", "SMALL", "Dims", "Megakernel", "MegakernelError", "Weights", "kv_pool", "rope_table"]

Get = Callable[[str], torch.Tensor]

PHASES = (
    "",
    "weights",
    "slot free",
    "residual (H1)",
    "QKV (H2a)",
    "attention (H3a)",
    "activations",
    "results",
    "token",
    "drain",
)


class MegakernelError(RuntimeError):
    """A step failed on the device: a wait ran out, or a check did. Carries layer (`layers` = head), phase and SM."""

    def __init__(self, layer: int, phase: str, sm: int) -> None:
        super().__init__(
            f"the decode kernel gave up waiting for {phase!r} in layer {layer} on SM {sm}; "
            "another program may hold SMs of this GPU: free it, then call reset() and repeat the step"
        )
        self.layer, self.phase, self.sm = layer, phase, sm


# ---- layouts -----------------------------------------------------------------------------------------------


def pack_rows(weight: torch.Tensor) -> torch.Tensor:
    """[rows, hidden] bf16 -> [rows/8, 8*hidden] in the order of tensor-core fragments.

    A chunk is an m16 tile that holds the first half of the hidden vector in its rows 0-7 and the second in its rows
    8-15, so 8 rows are complete in one SM. Order: unit, warp (a 16th of the hidden vector in each half), k-step of 16,
    lane (row*4 + t), then the lane's 8 elements as (k-octet, half, pair element).
    """
    rows, hidden = weight.shape
    steps = hidden // 2 // WARPS // 16
    view = weight.reshape(rows // UNIT, UNIT, 2, WARPS, steps, 2, 4, 2)
    return view.permute(0, 3, 4, 1, 6, 5, 2, 7).reshape(rows // UNIT, UNIT * hidden)


def unpack_rows(packed: torch.Tensor, hidden: int) -> torch.Tensor:
    """The inverse of `pack_rows`."""
    units, steps = packed.shape[0], hidden // 2 // WARPS // 16
    view = packed.reshape(units, WARPS, steps, UNIT, 4, 2, 2, 2)
    return view.permute(0, 3, 6, 1, 2, 5, 4, 7).reshape(units * UNIT, hidden)


def pack_columns(weight: torch.Tensor, router: torch.Tensor) -> torch.Tensor:
    """[..., hidden, channels] and the folded router [..., experts, channels] -> [..., channels/8, (hidden+experts)*8]:
    8 columns a unit.
    """
    both = torch.cat([weight, router], dim=-2)
    *lead, rows, channels = both.shape
    return (
        both.reshape(*lead, rows, channels // UNIT, UNIT)
        .transpose(-3, -2)
        .reshape(*lead, channels // UNIT, rows * UNIT)
    )


def unpack_columns(packed: torch.Tensor, hidden: int) -> tuple[torch.Tensor, torch.Tensor]:
    """[units, (hidden+experts)*8] -> ([hidden, channels], [experts, channels]); the inverse of `pack_columns`."""
    both = packed.reshape(packed.shape[0], -1, UNIT).transpose(0, 1).flatten(1)
    return both[:hidden], both[hidden:]


def qkv_rows(dims: Dims, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """The fused projection, one KV head after the other: its 8 query heads, its key, its value."""
    h, g = dims.hidden, dims.kv_heads
    return torch.cat([q.view(g, -1, h), k.view(g, HEAD_DIM, h), v.view(g, HEAD_DIM, h)], dim=1).reshape(-1, h)


@dataclass
class LayerWeights:
    """One layer, repacked: flat bf16 tensors on the device and the norm's weight [hidden]."""

    qkv: torch.Tensor
    experts: torch.Tensor
    oproj: torch.Tensor
    norm: torch.Tensor


@dataclass
class Weights:
    """A model in the order in which the kernel's ring streams it.

    Besides the checkpoint's own weights it holds the router of layer l+1 multiplied into layer l's output projection
    and down projections (2 % more bytes): the router's logits are linear in the residual, so they are ready as soon as
    the residual is.
    """

    dims: Dims
    layers: list[LayerWeights]
    head: torch.Tensor
    norm: torch.Tensor

    @classmethod
    def pack(cls, dims: Dims, get: Get, *, device: str | torch.device = "cuda") -> Weights:
        """Repacks tensor by tensor, in the order of layers: each name is asked for once, and may be dropped by `get`
        after the next call.

        get(name): a bf16 tensor by its name in transformers: model.embed_tokens.weight, model.norm.weight, and under
        model.layers.{l}.: input_layernorm.weight, self_attn.{q,k,v,o}_proj.weight, mlp.gate.weight (router, layers >=
        1), mlp.{gate,up,down}_proj.weight (layer 0). Experts are asked for as mlp.experts.gate_up_proj [experts,
        2*intermediate, hidden] and mlp.experts.down_proj [experts, hidden, intermediate]; where `get` raises KeyError,
        as mlp.experts.{e}.{gate,up,down}_proj.weight. The norm and the router of layer l+1 are asked for with layer l.
        Raises ValueError on a wrong shape.
        """

        def load(name: str, *shape: int) -> torch.Tensor:
            tensor = get(name)
            if tuple(tensor.shape) != shape:
                raise ValueError(f"{name} has shape {tuple(tensor.shape)}, the model needs {shape}")
            return tensor.to(device=device, dtype=torch.bfloat16)

        d, layers = dims, []
        q_width, kv_width = d.heads * HEAD_DIM, d.kv_heads * HEAD_DIM
        norm = load("model.layers.0.input_layernorm.weight", d.hidden)
        for layer in range(d.layers):
            name = f"model.layers.{layer}."
            if layer + 1 < d.layers:
                next_norm = load(f"model.layers.{layer + 1}.input_layernorm.weight", d.hidden)
                gate = load(f"model.layers.{layer + 1}.mlp.gate.weight", d.experts, d.hidden)
                router = gate.float() * next_norm.float()
            else:
                next_norm = load("model.norm.weight", d.hidden)
                router = torch.zeros(d.experts, d.hidden, device=device)
            qkv = pack_rows(
                qkv_rows(
                    d,
                    load(name + "self_attn.q_proj.weight", q_width, d.hidden),
                    load(name + "self_attn.k_proj.weight", kv_width, d.hidden),
                    load(name + "self_attn.v_proj.weight", kv_width, d.hidden),
                )
            )
            oproj = load(name + "self_attn.o_proj.weight", d.hidden, q_width)
            layers.append(
                LayerWeights(
                    qkv=interleave_router(d, qkv, router),
                    experts=cls._experts(d, name + "mlp.", layer == 0, router, get, load),
                    oproj=pack_columns(oproj, (router @ oproj.float()).bfloat16()).reshape(-1),
                    norm=norm,
                )
            )
            norm = next_norm
        head = pack_rows(load("model.embed_tokens.weight", d.vocab, d.hidden)).reshape(-1)
        return cls(d, layers, head, norm)

    @staticmethod
    def _experts(
        d: Dims, name: str, dense: bool, router: torch.Tensor, get: Get, load: Callable[..., torch.Tensor]
    ) -> torch.Tensor:
        h, i = d.hidden, d.dense_intermediate if dense else d.intermediate
        if dense:
            gate = load(name + "gate_proj.weight", i, h)
            up = load(name + "up_proj.weight", i, h)
            down = load(name + "down_proj.weight", h, i)
            return pack_expert(gate, up, down, router).reshape(-1)
        units = d.expert_units
        out = torch.empty(d.experts, units, d.expert_unit // 2, dtype=torch.bfloat16, device=router.device)
        try:
            fused = load(name + "experts.gate_up_proj", d.experts, 2 * i, h)
        except KeyError:
            fused = None
        if fused is not None:
            down = load(name + "experts.down_proj", d.experts, h, i)
            for e in range(d.experts):
                out[e] = pack_expert(fused[e, :i], fused[e, i:], down[e], router)
        else:
            for e in range(d.experts):
                one = f"{name}experts.{e}."
                out[e] = pack_expert(
                    load(one + "gate_proj.weight", i, h),
                    load(one + "up_proj.weight", i, h),
                    load(one + "down_proj.weight", h, i),
                    router,
                )
        return out.reshape(-1)


def pack_expert(gate: torch.Tensor, up: torch.Tensor, down: torch.Tensor, router: torch.Tensor) -> torch.Tensor:
    """[units, elements]: per 8 channels the gate rows, the up rows, the columns of down with the router in them."""
    folded = (router @ down.float()).bfloat16()
    return torch.cat([pack_rows(gate), pack_rows(up), pack_columns(down, folded)], dim=1)


def interleave_router(dims: Dims, qkv: torch.Tensor, router: torch.Tensor) -> torch.Tensor:
    """QKV chunks with 8 channels of the next layer's router [experts, 8] behind each chunk that carries a piece."""
    pieces = router.bfloat16().view(dims.experts, -1, UNIT).transpose(0, 1).reshape(dims.hidden // UNIT, -1)
    parts, piece = [], 0
    for unit in range(dims.qkv_units):
        parts.append(qkv[unit])
        if dims.router_pieces_before(unit + 1) > piece:
            parts.append(pieces[piece])
            piece += 1
    return torch.cat(parts)


def rope_table(dims: Dims, positions: int, device: str | torch.device = "cpu") -> torch.Tensor:
    """[positions, 64, 2] bf16: cosine and sine of position * theta^(-2i/128), angle in fp32, rounded to bf16 as the
    reference rounds them.
    """
    inverse = 1.0 / dims.rope_theta ** (torch.arange(0, HEAD_DIM, 2, dtype=torch.int64).float() / HEAD_DIM)
    angle = torch.arange(positions, device=device).float()[:, None] * inverse.to(device)[None]
    return torch.stack([angle.cos(), angle.sin()], dim=-1).bfloat16().contiguous()


def kv_pool(layers: int, pages: int, kv_heads: int, device: str | torch.device = "cuda") -> torch.Tensor:
    """Zeros [layers of the group, pages, kv_heads, 2 (K, V), 64 tokens, 128] bf16; keys are stored after rotation."""
    return torch.zeros(layers, pages, kv_heads, 2, PAGE, HEAD_DIM, dtype=torch.bfloat16, device=device)


def extension() -> ModuleType:
    """The compiled module; raises RuntimeError where it was not built."""
    try:
        import northchat._megakernel as native
    except ImportError as error:
        raise RuntimeError(
            "northchat was installed without its CUDA extension; install it again where nvcc >= 12.4 is on PATH"
        ) from error
    found: ModuleType = native
    return found


# ---- the kernel --------------------------------------------------------------------------------------------


class Megakernel:
    """One sequence's decode steps on one GPU.

    kv_full, kv_sliding: pools as `kv_pool` makes them, of the full and of the sliding layers (pages of each group are
    numbered separately; a page id holds for all layers of its group). max_context: tokens up to which positions may go.
    num_sms: blocks to launch, at most the device's SMs (all of them if None); they must be free, or a step times out.
    in_flight: chunks (32 KB) that an SM keeps in flight at most. early_pages: KV pages of a layer loaded before its
    first expert. Raises ValueError on arguments that don't fit each other, RuntimeError without a Hopper GPU or the
    extension.
    """

    def __init__(
        self,
        dims: Dims,
        weights: Weights,
        kv_full: torch.Tensor,
        kv_sliding: torch.Tensor,
        *,
        max_context: int = 32768,
        num_sms: int | None = None,
        schedule: Schedule | None = None,
        timeout_s: float = 1.0,
        in_flight: int = 2,
        early_pages: int = 0,
        native: ModuleType | None = None,
    ) -> None:
        self._native = native or extension()
        device = kv_full.device
        if device.type != "cuda" or torch.cuda.get_device_capability(device) != (9, 0):
            raise RuntimeError(f"the decode kernel needs a Hopper GPU (compute capability 9.0), got {device}")
        available = torch.cuda.get_device_properties(device).multi_processor_count
        if schedule is None:
            schedule = build(dims, num_sms or available)
        if schedule.dims != dims or not 0 < schedule.num_sms <= available:
            raise ValueError(
                f"the schedule is for {schedule.dims.name} on {schedule.num_sms} SMs; the device has {available}"
            )
        if not 1 <= in_flight <= 6:
            raise ValueError(f"in_flight must be 1 to 6, got {in_flight}")
        if not 0 <= early_pages <= 4:
            raise ValueError(f"early_pages must be 0 to 4, got {early_pages}")
        self._native.check_dims(dims.name, [
            dims.layers, dims.hidden, dims.heads, dims.kv_heads, dims.experts, dims.top_k, dims.intermediate,
            dims.dense_intermediate, dims.vocab, dims.window, dims.full_every,
        ])  # fmt: skip
        for name, pool, layers in (
            ("kv_full", kv_full, dims.full_layers),
            ("kv_sliding", kv_sliding, dims.sliding_layers),
        ):
            if pool.shape != (layers, pool.shape[1], dims.kv_heads, 2, PAGE, HEAD_DIM):
                raise ValueError(f"{name} has shape {tuple(pool.shape)}, see kv_pool(); the group has {layers} layers")
            if (
                pool.dtype != torch.bfloat16
                or not pool.is_contiguous()
                or pool.device != device
                or pool.data_ptr() % 128
            ):
                raise ValueError(f"{name} must be contiguous bf16 on {device}, aligned to 128 bytes")
        self.dims, self.weights, self.schedule, self.max_context = dims, weights, schedule, max_context
        self.device, self.in_flight, self.early_pages, self.timeout_s = device, in_flight, early_pages, timeout_s
        self._pools = (kv_full, kv_sliding)
        pages = -(-max_context // PAGE)

        def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        def ones(*shape: int) -> torch.Tensor:
            return torch.full(shape, -1, dtype=torch.int32, device=device)

        self._tables = (zeros(pages), zeros(pages))
        self._known: list[tuple[int, torch.Tensor, tuple[torch.Tensor, int] | None]] = [
            (0, torch.empty(0, dtype=torch.int32), None)
        ] * 2
        """Of each table on the device: first checked entry, entries, and the tensor and version they came from."""
        self._tasks = torch.tensor(schedule.table(), dtype=torch.int32, device=device)
        self._rope = rope_table(dims, max_context, device)
        self._layers = torch.tensor(
            [[w.qkv.data_ptr(), w.experts.data_ptr(), w.oproj.data_ptr(), 0] for w in weights.layers]
            + [[weights.head.data_ptr(), 0, 0, 0]],
            dtype=torch.int64,
            device=device,
        )
        if bool((self._layers % 16).any()):
            raise ValueError("weights must be aligned to 16 bytes")
        self._norms = torch.stack([*(w.norm for w in weights.layers), weights.norm]).contiguous()
        self._sums = zeros(3, dims.hidden + dims.experts, dtype=torch.int64)
        # Words are tagged with their layer's number, whose first is 0: all ones is an older one.
        self._qkv = ones(dims.qkv_units * UNIT)
        self._partials = ones(schedule.splits, dims.heads, HEAD_DIM)
        self._softmax = ones(schedule.splits, dims.heads, 2)
        self._counters = zeros(32, 32)
        self._best = zeros(schedule.num_sms, 2)
        self._out = zeros(8)
        """token, -, error word (2 x 32 bits)"""
        self.routing = zeros(dims.layers, dims.top_k)
        """Experts of the last step in order of rank, on the device; layer 0 is unused."""
        self.logits = zeros(dims.vocab, dtype=torch.float32)
        self._epoch = 0
        self._mailbox = torch.zeros(1, dtype=torch.int64, pin_memory=True)
        self._launcher = self._native.Launcher(
            dims.name,
            {
                "layers": self._layers.data_ptr(),
                "norms": self._norms.data_ptr(),
                "rope": self._rope.data_ptr(),
                "kv_full": self._pools[0].data_ptr(),
                "kv_sliding": self._pools[1].data_ptr(),
                "table_full": self._tables[0].data_ptr(),
                "table_sliding": self._tables[1].data_ptr(),
                "tasks": self._tasks.data_ptr(),
                "sums": self._sums.data_ptr(),
                "qkv": self._qkv.data_ptr(),
                "partials": self._partials.data_ptr(),
                "softmax": self._softmax.data_ptr(),
                "counters": self._counters.data_ptr(),
                "best": self._best.data_ptr(),
                "out": self._out.data_ptr(),
                "routing": self.routing.data_ptr(),
                "mailbox": self._mailbox.data_ptr(),
            },
            {
                "pages_full": kv_full.shape[1],
                "pages_sliding": kv_sliding.shape[1],
                "in_flight": in_flight,
                "early_pages": early_pages,
                "num_sms": schedule.num_sms,
            },
        )

    def step(
        self,
        token: int | None,
        position: int,
        page_table_full: Sequence[int] | torch.Tensor,
        page_table_sliding: Sequence[int] | torch.Tensor,
        *,
        temperature: float = 0.0,
        seed: int = 0,
        force_routing: torch.Tensor | None = None,
        want_logits: bool = False,
    ) -> int:
        """Computes `token` at `position` (0-based) and returns the token that follows; see `launch` and `result`.

        With want_logits the fp32 logits are in `self.logits` [vocab] afterwards.
        """
        self.launch(
            token,
            position,
            page_table_full,
            page_table_sliding,
            temperature=temperature,
            seed=seed,
            force_routing=force_routing,
            want_logits=want_logits,
        )
        return self.result()

    def launch(
        self,
        token: int | None,
        position: int,
        page_table_full: Sequence[int] | torch.Tensor,
        page_table_sliding: Sequence[int] | torch.Tensor,
        *,
        temperature: float = 0.0,
        seed: int = 0,
        force_routing: torch.Tensor | None = None,
        want_logits: bool = False,
        hidden: torch.Tensor | None = None,
        ticks: torch.Tensor | None = None,
        stall_sm: int = -1,
    ) -> None:
        """Queues a step on the current stream and returns at once.

        token: None takes the token of the step before, which never leaves the device. Page tables (host): physical page
        of each logical page 0..position // 64; on sliding layers entries before the window are ignored (-1 will do).
        Key and value of the new token are written into both groups' pages. temperature 0 is greedy, else the token is
        drawn by Gumbel-max from (seed, position). force_routing: int32 [layers, top_k] on the device, experts to take
        instead of the best (row 0 unused). hidden: fp32 [layers + 1, hidden], receives the residual before each layer
        and after the last. ticks: int64 [num_sms, layers + 1, 24], receives times in ns (docs/megakernel.md). stall_sm:
        an SM that stops signalling, to test time-outs. Raises ValueError on any argument out of range, before anything
        is queued.
        """
        d = self.dims
        if token is not None and not 0 <= token < d.vocab:
            raise ValueError(f"token {token} is not in 0..{d.vocab - 1}")
        if not 0 <= position < self.max_context:
            raise ValueError(f"position {position} is not in 0..{self.max_context - 1} (max_context)")
        if not (math.isfinite(temperature) and temperature >= 0):
            raise ValueError(f"temperature must be finite and >= 0, got {temperature}")
        if self._epoch >= 1 << 26:
            raise RuntimeError("2^26 steps done: the counters must start again, call reset()")
        self._upload(0, page_table_full, position, 0)
        self._upload(1, page_table_sliding, position, max(0, position - d.window + 1) // PAGE)
        for name, tensor, dtype, shape in (
            ("force_routing", force_routing, torch.int32, (d.layers, d.top_k)),
            ("hidden", hidden, torch.float32, (d.layers + 1, d.hidden)),
            ("ticks", ticks, torch.int64, (self.schedule.num_sms, d.layers + 1, 24)),
        ):
            if tensor is not None and (
                tensor.dtype != dtype
                or tensor.shape != shape
                or tensor.device != self.device
                or not tensor.is_contiguous()
            ):
                raise ValueError(f"{name} must be contiguous {dtype} {shape} on {self.device}")
        self._launcher.step(
            -1 if token is None else token,
            position,
            self._epoch,
            0.0 if temperature == 0 else 1.0 / temperature,
            seed & 0xFFFFFFFFFFFFFFFF,
            int(self.timeout_s * 1e9),
            self.logits.data_ptr() if want_logits else 0,
            force_routing.data_ptr() if force_routing is not None else 0,
            hidden.data_ptr() if hidden is not None else 0,
            ticks.data_ptr() if ticks is not None else 0,
            stall_sm,
            torch.cuda.current_stream(self.device).cuda_stream,
        )
        self._epoch += 1

    def result(self) -> int:
        """Waits for the last step and returns its token; raises MegakernelError if a step since the last reset failed.

        Call it on the stream of the launch. It spins, with the GIL released.
        """
        if self._epoch == 0:
            raise RuntimeError("no step was launched since the start or the last reset()")
        token = int(self._launcher.wait(self._epoch - 1, torch.cuda.current_stream(self.device).cuda_stream))
        if token < 0:
            low, high = self._out[2:4].tolist()
            raise MegakernelError((high >> 16) & 0x7FFF, PHASES[high & 0xFFFF], low)
        return token

    def reset(self) -> None:
        """After a MegakernelError, or after 2^26 steps (launch asks for it): clears counters, sums and the error word.
        The KV pools are kept.
        """
        torch.cuda.synchronize(self.device)
        for tensor in (self._sums, self._counters, self._out):
            tensor.zero_()
        for tensor in (self._qkv, self._partials, self._softmax):
            tensor.fill_(-1)
        self._epoch = 0
        self._mailbox.zero_()

    def _upload(self, group: int, table: Sequence[int] | torch.Tensor, position: int, first: int) -> None:
        name, pages = ("page_table_full", "page_table_sliding")[group], self._pools[group].shape[1]
        need = position // PAGE + 1
        since, known, source = self._known[group]
        seen = None
        if isinstance(table, torch.Tensor) and not table.is_inference():
            # The same tensor (kept, so that no other takes its place) that nobody has written to needs no second look.
            seen = table, table._version
            if source and source[0] is table and source[1] == seen[1] and since <= first and need <= known.numel():
                return
        host = torch.as_tensor(table, dtype=torch.int32, device="cpu")
        if (
            since <= first
            and need <= min(known.numel(), host.numel())
            and torch.equal(known[first:need], host[first:need])
        ):
            self._known[group] = (since, known, seen)
            return
        if host.dim() != 1 or host.numel() < need:
            raise ValueError(f"{name} needs {need} entries for position {position}, has {host.numel()}")
        used = host[first:need]
        if int(used.min()) < 0 or int(used.max()) >= pages:
            raise ValueError(f"{name} names a page outside 0..{pages - 1}: {int(used.min())}..{int(used.max())}")
        if need > self._tables[group].numel():
            raise ValueError(f"{name} is longer than max_context {self.max_context} allows")
        self._known[group] = (first, host[:need].clone(), seen)
        self._tables[group][:need].copy_(host[:need])
