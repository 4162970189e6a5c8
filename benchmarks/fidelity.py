"""How exactly a decoder computes North Mini Code, with random weights: its error beside transformers' in bf16.

    python -m benchmarks.fidelity --out results.json            # the megakernel, about three minutes of an H200
    python -m benchmarks.fidelity --quick --decoder torch       # a subset; plain torch, to try the harness itself

An fp32 reference runs once over a random prompt, layer by layer, since 122 GB of fp32 weights fit nowhere. Against it:

(a) Routing forced to the reference's choice. At each context length one decode step is taken from the same bf16 KV
    cache, for several tokens. The error of the logits must be at most 1.1 times that of transformers in bf16.
    Random weights attend to all keys alike, which would hide a lost page or a window off by one. So in this cache the
    first and last keys of the context, of the window and of pages are enlarged until they win the softmax, and the
    key just outside the window too.
(b) Free routing, teacher-forced from an empty cache over thousands of tokens: KL divergence from the reference and
    top-1 agreement. A paired bootstrap over the tokens must not find the decoder worse than transformers.
"""

import argparse
import importlib
import inspect
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.weights import RandomWeights, Shape
from northchat.engine.megakernel import Megakernel, Weights, kv_pool
from northchat.engine.schedule import HEAD_DIM, NORTH_MINI_CODE, PAGE, SMALL, Dims

CONTEXTS = (1, 63, 64, 65, 1024, 4095, 4096, 4097, 8192, 32768)
QUICK_CONTEXTS = (1, 64, 65, 4096, 4097)
SMALL_CONTEXTS = (1, 63, 64, 65, 128, 255, 256, 257, 1024, 4096)
MAX_CONTEXT = 32768
NEEDLE = 40.0
"""Factor on the enlarged keys: scores of random queries and keys deviate by 0.18, theirs by 7."""
LIMIT = 1.1
"""Most that a decoder's error may be, in errors of transformers."""
SCRATCH = 1 << 28
"""Elements of the largest intermediate of the fp32 reference (scores, logits): 1 GiB."""


class Decoder(Protocol):
    """One sequence, batch 1, with its KV cache. What `benchmarks.fidelity` needs of an implementation."""

    experts: Tensor
    """The last step's choice, integers [layers, top_k] in any order; rows of dense layers mean nothing."""

    def reset(self) -> None:
        """Forget the sequence."""

    def load_kv(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Set the cache of positions 0..n-1 of a layer. keys (after RoPE) and values: bf16 [n, kv_heads, head_dim]."""

    def step(self, token: int, position: int, experts: Tensor | None = None) -> Tensor:
        """Compute one token from the cache of the positions before it, and write its own K and V there.

        A position may be computed again, with another token. experts: None, or int64 [layers, top_k], which experts
        to take in place of the router's top-k (its logits still weigh them; the rows of dense layers are ignored).
        Returns logits [vocab], bf16 or fp32, valid until the next step.
        """


DecoderFactory = Callable[[Shape, RandomWeights, torch.device], Decoder]


# ---- the fp32 reference --------------------------------------------------------------------------------------


@dataclass
class Prompt:
    """Random tokens, and the tokens tried at each context length."""

    tokens: Tensor
    """int64 [T]: the sequence whose KV the cache holds; its first `free` tokens are those of measure (b)."""
    free: int
    contexts: tuple[int, ...]
    branches: Tensor
    """int64 [contexts, branches]: at context C these stand at position C-1, each after tokens[:C-1]."""

    @classmethod
    def random(cls, shape: Shape, contexts: Sequence[int], branches: int, free: int, seed: int) -> "Prompt":
        generator = torch.Generator().manual_seed(seed)
        tokens = torch.randint(shape.vocab, (max(*contexts, free),), generator=generator)
        tried = torch.randint(shape.vocab, (len(contexts), branches), generator=generator)
        return cls(tokens, free, tuple(contexts), tried)


@dataclass
class Trace:
    """What the reference computed. Rows: the prompt's first `free` tokens, then the branches, context by context."""

    keys: list[Tensor]
    """Per layer bf16 [T, kv_heads, head_dim], after RoPE, needles enlarged."""
    values: list[Tensor]
    experts: Tensor
    """int64 [rows, layers, top_k], largest logit first; zeros for dense layers."""
    router_logits: Tensor
    """fp32 [rows, layers, experts]"""
    hidden: Tensor
    """fp32 [rows, hidden], after the last norm"""


def needles(contexts: Sequence[int], window: int) -> list[int]:
    """Positions whose keys are enlarged."""
    found = set()
    for context in contexts:
        edge = (context - 1) // PAGE * PAGE
        oldest = context - window
        found |= {0, oldest - 1, oldest, edge - 1, edge, context - 2} & set(range(context - 1))
    return sorted(found)


class Reference:
    """North Mini Code in fp32 without TF32, one layer's weights at a time."""

    def __init__(self, shape: Shape, weights: RandomWeights) -> None:
        self.shape = shape
        self.weights = weights
        self.device = weights.device

    def run(self, prompt: Prompt) -> Trace:
        s, rows = self.shape, len(prompt.tokens)
        tried = prompt.branches.flatten()
        self._positions = torch.cat(
            [torch.arange(rows), torch.tensor(prompt.contexts).repeat_interleave(prompt.branches.shape[1]) - 1]
        ).to(self.device)
        kept = torch.cat([torch.arange(prompt.free), rows + torch.arange(len(tried))]).to(self.device)
        enlarged = torch.tensor(needles(prompt.contexts, s.window), dtype=torch.long, device=self.device)
        trace = Trace(
            [],
            [],
            torch.zeros(len(kept), s.layers, s.top_k, dtype=torch.long, device=self.device),
            torch.zeros(len(kept), s.layers, s.experts, device=self.device),
            torch.empty(0),
        )
        ids = torch.cat([prompt.tokens, tried]).to(self.device)
        h = F.embedding(ids, self.weights("model.embed_tokens.weight")).float()
        for layer in range(s.layers):
            n = self._norm(h, f"model.layers.{layer}.input_layernorm.weight")
            h += self._attention(layer, n, prompt, enlarged, trace)
            if s.is_dense(layer):
                prefix = f"model.layers.{layer}.mlp"
                gate, up, down = (self.weights(f"{prefix}.{x}_proj.weight").float() for x in ("gate", "up", "down"))
                h += _swiglu(n, gate, up, down)
            else:
                chosen, logits = self._experts(layer, n, h)
                trace.experts[:, layer], trace.router_logits[:, layer] = chosen[kept], logits[kept]
        trace.hidden = self._norm(h[kept], "model.norm.weight")
        return trace

    def _norm(self, x: Tensor, name: str) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.shape.norm_eps) * self.weights(name).float()

    def _attention(self, layer: int, n: Tensor, prompt: Prompt, enlarged: Tensor, trace: Trace) -> Tensor:
        s = self.shape
        prefix = f"model.layers.{layer}.self_attn"
        q, k, v = (
            (n @ self.weights(f"{prefix}.{x}_proj.weight").float().T).unflatten(-1, (-1, s.head_dim)) for x in "qkv"
        )
        if s.has_rope(layer):
            cos, sin = rope_tables(s, self._positions)
            q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        window = None if s.is_full(layer) else s.window
        rows = len(prompt.tokens)
        out = torch.empty_like(q)
        _attend_prompt(q[:rows], k[:rows], v[:rows], window, out[:rows])

        keys, values = k[:rows].bfloat16(), v[:rows].bfloat16()
        keys[enlarged] *= NEEDLE
        trace.keys.append(keys)
        trace.values.append(values)
        # A branch reads the rounded cache as the decoders do: rounding it is no error of theirs.
        count = prompt.branches.shape[1]
        for i, context in enumerate(prompt.contexts):
            at = slice(rows + i * count, rows + (i + 1) * count)
            past = slice(max(0, context - window) if window else 0, context - 1)
            out[at] = _attend_one(q[at], k[at], v[at], keys[past].float(), values[past].float())
        return out.flatten(1) @ self.weights(f"{prefix}.o_proj.weight").float().T

    def _experts(self, layer: int, n: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        """Add the experts' output to h in place. Returns the choice [rows, top_k] and the router's logits."""
        s = self.shape
        prefix = f"model.layers.{layer}.mlp"
        logits = n @ self.weights(f"{prefix}.gate.weight").float().T
        top, chosen = logits.topk(s.top_k)
        scores = top.sigmoid().flatten()
        gate_up = self.weights(f"{prefix}.experts.gate_up_proj")
        down = self.weights(f"{prefix}.experts.down_proj")
        order = chosen.flatten().argsort(stable=True)
        begin = 0
        for expert, count in enumerate(chosen.flatten().bincount(minlength=s.experts).tolist()):
            mine = order[begin : begin + count]
            begin += count
            rows = mine // s.top_k
            gate, up = gate_up[expert].float().chunk(2)
            h.index_add_(0, rows, _swiglu(n[rows], gate, up, down[expert].float()) * scores[mine, None])
        return chosen, logits


def _swiglu(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return (F.silu(x @ gate.T) * (x @ up.T)) @ down.T


def rope_tables(shape: Shape, positions: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin, fp32 [n, 1, head_dim / 2], of fp32 angles."""
    # The frequencies are made on the CPU, as transformers does: a last bit of one is 0.002 rad at position 32768.
    even = torch.arange(0, shape.head_dim, 2, dtype=torch.float)
    frequencies = 1.0 / shape.rope_theta ** (even / shape.head_dim)
    angles = positions[:, None].float() * frequencies.to(positions.device)
    return angles.cos()[:, None], angles.sin()[:, None]


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """RoPE in fp32 on neighbouring pairs. x: [n, heads, head_dim], any dtype, which the result has too."""
    even, odd = x.float().unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack((even * cos - odd * sin, odd * cos + even * sin), -1).flatten(-2).to(x.dtype)


def _attend_prompt(q: Tensor, k: Tensor, v: Tensor, window: int | None, out: Tensor) -> None:
    """Causal attention of a prompt to itself, in chunks of queries. q, out: [T, heads, d]; k, v: [T, kv_heads, d]."""
    length, kv_heads = len(q), k.shape[1]
    grouped = q.unflatten(1, (kv_heads, -1)).permute(1, 2, 0, 3) * q.shape[-1] ** -0.5  # [kv_heads, group, T, d]
    k, v = k.transpose(0, 1), v.transpose(0, 1)
    step = max(16, min(1024, SCRATCH // (q.shape[1] * length)))
    for begin in range(0, length, step):
        end = min(length, begin + step)
        first = max(0, begin - window + 1) if window else 0
        scores = grouped[:, :, begin:end].flatten(1, 2) @ k[:, first:end].transpose(-1, -2)
        distance = torch.arange(begin, end, device=q.device)[:, None] - torch.arange(first, end, device=q.device)
        unseen = distance < 0
        if window:
            unseen |= distance >= window
        scores = scores.unflatten(1, (-1, end - begin)).masked_fill_(unseen, -torch.inf).softmax(-1)
        attended = scores.flatten(1, 2) @ v[:, first:end]
        out[begin:end] = attended.view(q.shape[1], end - begin, -1).transpose(0, 1)


def _attend_one(q: Tensor, k: Tensor, v: Tensor, past_k: Tensor, past_v: Tensor) -> Tensor:
    """Each of B sequences attends to a common past and to itself.

    q: [B, heads, d]; k, v: [B, kv_heads, d]; past: [n, kv_heads, d]. Returns [B, heads, d].
    """
    grouped = q.unflatten(1, (k.shape[1], -1)) * q.shape[-1] ** -0.5
    scores = torch.cat(
        (torch.einsum("bkgd,nkd->bkgn", grouped, past_k), torch.einsum("bkgd,bkd->bkg", grouped, k)[..., None]), -1
    )
    p = scores.softmax(-1)
    out = torch.einsum("bkgn,nkd->bkgd", p[..., :-1], past_v) + p[..., -1:] * v[:, :, None]
    return out.flatten(1, 2)


# ---- transformers in bf16 ------------------------------------------------------------------------------------


class Transformers:
    """transformers' own model, whose layers get their weights when they run and give them back after.

    Default attention (SDPA) and experts implementations unless named. Works with transformers 5.17 and later.
    """

    def __init__(
        self, shape: Shape, weights: Callable[[str], Tensor], device: torch.device, attention: str = "sdpa"
    ) -> None:
        from transformers import Cohere2MoeConfig, Cohere2MoeForCausalLM

        config = Cohere2MoeConfig(**shape.config())
        config._attn_implementation = attention
        self.config = config
        with torch.device("meta"):
            whole = Cohere2MoeForCausalLM(config).eval().bfloat16()
        self.model = whole.model
        # Made on the meta device it has no values, and in bf16 its frequencies would be rounded.
        self.model.rotary_emb = type(self.model.rotary_emb)(config).to(device)
        self.embedding = weights("model.embed_tokens.weight")
        self._set(self.model.embed_tokens, "weight", self.embedding)
        self._set(self.model.norm, "weight", weights("model.norm.weight"))
        self._routers: dict[int, _Router] = {}
        for i, layer in enumerate(self.model.layers):
            if not shape.is_dense(i):
                self._routers[i] = _Router()
                layer.mlp.gate.register_forward_hook(self._routers[i])
            self.model.layers[i] = _Streamed(layer, f"model.layers.{i}", weights)
        # Renamed from past_key_values in 5.2x.
        self.cache_name = next(
            n for n in ("cache", "past_key_values") if n in inspect.signature(type(self.model).forward).parameters
        )

    @staticmethod
    def _set(module: torch.nn.Module, name: str, value: Tensor) -> None:
        setattr(module, name, torch.nn.Parameter(value, requires_grad=False))

    def prefill(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Run [T] tokens with free routing.

        Returns hidden, bf16 [T, hidden] after the last norm, and the experts, int64 [T, layers, top_k].
        """
        hidden = self.model(input_ids=tokens[None], use_cache=False).last_hidden_state[0]
        chosen = [r.chosen for r in self._routers.values()]
        dense = [torch.zeros_like(chosen[0])] * (self.config.num_hidden_layers - len(chosen))
        return hidden, torch.stack(dense + chosen, 1)

    def decode(self, tokens: Tensor, context: int, trace: Trace, experts: Tensor) -> Tensor:
        """One step of each of B tokens at position context-1 after the trace's cache, with those experts.

        experts: int64 [B, layers, top_k]. Returns hidden, bf16 [B, hidden], after the last norm.
        """
        for i, router in self._routers.items():
            router.forced = experts[:, i]
        position = torch.full((len(tokens), 1), context - 1, device=tokens.device)
        cache = _shared_cache(self.config, trace, context - 1)
        output = self.model(input_ids=tokens[:, None], position_ids=position, **{self.cache_name: cache})
        for router in self._routers.values():
            router.forced = None
        return output.last_hidden_state[:, 0]


class _Streamed(torch.nn.Module):
    """A decoder layer without weights, filled from a source of tensors for each call."""

    def __init__(self, layer: torch.nn.Module, prefix: str, weights: Callable[[str], Tensor]) -> None:
        super().__init__()
        self.layer, self.prefix, self.weights = layer, prefix, weights

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        tensors = {name: self.weights(f"{self.prefix}.{name}") for name, _ in self.layer.named_parameters()}
        return torch.func.functional_call(self.layer, tensors, args, kwargs)


class _Router:
    """Hook on a router: notes its choice, or replaces it."""

    def __init__(self) -> None:
        self.forced: Tensor | None = None
        self.chosen = torch.empty(0)

    def __call__(self, module: torch.nn.Module, args: Any, output: tuple[Tensor, Tensor, Tensor]) -> Any:
        logits, _, self.chosen = output
        if self.forced is None:
            return output
        return logits, logits.gather(-1, self.forced).sigmoid(), self.forced


def _shared_cache(config: Any, trace: Trace, length: int) -> Any:
    """A cache whose sequences share the trace's first keys and values; a step's own are used but not kept."""
    from transformers import DynamicCache

    class SharedCache(DynamicCache):
        def update(self, k: Tensor, v: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
            past = self.layers[layer_idx]
            if not past.is_initialized:
                return k, v
            whole = [
                torch.cat((old.expand(len(k), -1, -1, -1), new), -2) for old, new in ((past.keys, k), (past.values, v))
            ]
            return whole[0], whole[1]

    cache = SharedCache(config=config)
    if length:
        for layer, pair in enumerate(zip(trace.keys, trace.values, strict=True)):
            DynamicCache.update(cache, *(x[:length].transpose(0, 1)[None] for x in pair), layer)
    return cache


# ---- a plain decoder, to try the harness with ----------------------------------------------------------------


class TorchDecoder:
    """The model in plain torch, bf16, all weights resident: slow, and small enough to be right."""

    def __init__(self, shape: Shape, weights: RandomWeights, device: torch.device) -> None:
        self.shape, self.device = shape, device
        self.embedding = weights("model.embed_tokens.weight")
        self.last_norm = weights("model.norm.weight")
        self.layers: list[dict[str, Tensor]] = []
        for i in range(shape.layers):
            names = ["input_layernorm.weight", *(f"self_attn.{x}_proj.weight" for x in "qkvo")]
            if shape.is_dense(i):
                names += [f"mlp.{x}_proj.weight" for x in ("gate", "up", "down")]
            else:
                names += ["mlp.gate.weight", "mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
            self.layers.append({name: weights(f"model.layers.{i}.{name}") for name in names})
        self.reset()

    def reset(self) -> None:
        s = self.shape
        self._cache = [torch.empty(2, 0, s.kv_heads, s.head_dim, dtype=torch.bfloat16, device=self.device)] * s.layers

    def load_kv(self, layer: int, keys: Tensor, values: Tensor) -> None:
        self._cache[layer] = torch.stack((keys, values))

    def step(self, token: int, position: int, experts: Tensor | None = None) -> Tensor:
        s = self.shape
        self.experts = torch.zeros(s.layers, s.top_k, dtype=torch.long, device=self.device)
        h = self.embedding[token]
        cos, sin = (x.bfloat16().float() for x in rope_tables(s, torch.tensor([position], device=self.device)))
        for i, w in enumerate(self.layers):
            n = self._norm(h, w["input_layernorm.weight"])
            q, k, v = ((w[f"self_attn.{x}_proj.weight"] @ n).view(1, -1, s.head_dim) for x in "qkv")
            if s.has_rope(i):
                q, k = rotate(q, cos, sin), rotate(k, cos, sin)
            self._cache[i] = torch.cat((self._cache[i][:, :position], torch.stack((k, v))), 1)
            keys, values = self._cache[i][:, 0 if s.is_full(i) else max(0, position + 1 - s.window) :].float()
            attended = _attend_one(q.float(), keys[-1:], values[-1:], keys[:-1], values[:-1])
            a = w["self_attn.o_proj.weight"] @ attended.bfloat16().flatten()
            h = h + a + (self._dense(w, n) if s.is_dense(i) else self._experts(w, n, experts, i))
        return self.embedding @ self._norm(h, self.last_norm)

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        wide = x.float()
        return weight * (wide * torch.rsqrt(wide.pow(2).mean() + self.shape.norm_eps)).bfloat16()

    def _dense(self, w: dict[str, Tensor], n: Tensor) -> Tensor:
        gate, up = w["mlp.gate_proj.weight"] @ n, w["mlp.up_proj.weight"] @ n
        return w["mlp.down_proj.weight"] @ (F.silu(gate) * up)

    def _experts(self, w: dict[str, Tensor], n: Tensor, experts: Tensor | None, layer: int) -> Tensor:
        logits = w["mlp.gate.weight"] @ n
        chosen = logits.topk(self.shape.top_k).indices if experts is None else experts[layer]
        self.experts[layer] = chosen
        gate, up = (w["mlp.experts.gate_up_proj"][chosen] @ n).chunk(2, -1)
        y = torch.bmm(w["mlp.experts.down_proj"][chosen], (F.silu(gate) * up)[..., None])[..., 0]
        return (y * logits[chosen].sigmoid()[:, None]).sum(0)


# ---- the megakernel ------------------------------------------------------------------------------------------


class MegakernelDecoder:
    """northchat's decode megakernel over pages in random order, those before the sliding window unmapped."""

    def __init__(self, shape: Shape, weights: RandomWeights, device: torch.device) -> None:
        dims = next((d for d in (NORTH_MINI_CODE, SMALL) if shape_of(d) == shape), None)
        if dims is None:
            raise SystemExit(f"the megakernel is not built for {shape}")
        self.dims = dims
        pages = MAX_CONTEXT // PAGE
        generator = torch.Generator().manual_seed(0)
        self._tables = [torch.randperm(pages, generator=generator, dtype=torch.int32) for _ in range(2)]
        self._pools = [
            kv_pool(layers, pages, dims.kv_heads, device) for layers in (dims.full_layers, dims.sliding_layers)
        ]
        packed = Weights.pack(dims, weights, device=device)
        self._kernel = Megakernel(dims, packed, *self._pools, max_context=MAX_CONTEXT)
        self.experts = self._kernel.routing

    def reset(self) -> None:
        for pool in self._pools:
            pool.zero_()

    def load_kv(self, layer: int, keys: Tensor, values: Tensor) -> None:
        group = 0 if self.dims.full(layer) else 1
        pool = self._pools[group][self.dims.index_in_group(layer)]  # [pages, kv_heads, 2, PAGE, head_dim]
        length = len(keys)
        table = self._tables[group][: -(-length // PAGE)].long().to(keys.device)
        for i, x in enumerate((keys, values)):
            padded = F.pad(x, (0, 0, 0, 0, 0, -length % PAGE))
            pool[table, :, i] = padded.unflatten(0, (-1, PAGE)).transpose(1, 2)

    def step(self, token: int, position: int, experts: Tensor | None = None) -> Tensor:
        full, sliding = self._tables[0], self._tables[1].clone()
        sliding[: max(0, position - self.dims.window + 1) // PAGE] = -1
        forced = None if experts is None else experts.int().contiguous()
        self._kernel.step(token, position, full, sliding, force_routing=forced, want_logits=True)
        return self._kernel.logits


def shape_of(dims: Dims) -> Shape:
    """The megakernel's dimensions in the terms of the random weights."""
    return Shape(
        dims.layers, dims.hidden, dims.heads, dims.kv_heads, HEAD_DIM, dims.experts, dims.top_k, dims.intermediate,
        dims.dense_intermediate, dims.vocab, dims.window, dims.rope_theta, dims.eps,
    )  # fmt: skip


DECODERS: dict[str, DecoderFactory] = {"megakernel": MegakernelDecoder, "torch": TorchDecoder}


# ---- measures ------------------------------------------------------------------------------------------------


@dataclass
class ContextError:
    """Errors of the logits at one context length, routing forced, over all branches."""

    context: int
    ours: float
    """Relative L2: |x - reference| / |reference|."""
    transformers: float
    transformers_fp32_head: float
    """The same with the head computed in fp32, so that the rounding of the logits to bf16 hides nothing."""
    ours_max: float
    """Largest absolute error, the mean over the branches."""
    transformers_max: float

    @property
    def ratio(self) -> float:
        return self.ours / self.transformers

    @property
    def ratio_max(self) -> float:
        return self.ours_max / self.transformers_max

    @property
    def passed(self) -> bool:
        return self.ratio <= LIMIT and self.ratio_max <= LIMIT


@dataclass
class Agreement:
    """Free routing: means over the tokens."""

    kl: float
    """KL(reference || model), nats."""
    top1: float
    """Share of tokens with the reference's largest logit."""
    other_experts: float
    """Share of tokens and layers with another set of experts than the reference's."""


@dataclass
class Report:
    forced: list[ContextError] = field(default_factory=list)
    ours: Agreement | None = None
    transformers: Agreement | None = None
    kl_difference: tuple[float, float] = (0.0, 0.0)
    """95 % confidence interval of ours minus transformers'."""
    top1_difference: tuple[float, float] = (0.0, 0.0)
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def passed(self) -> bool:
        # Parity is excluded on the bad side only: better is no failure.
        return all(e.passed for e in self.forced) and self.kl_difference[0] <= 0.0 <= self.top1_difference[1]


def bootstrap(difference: Tensor, resamples: int = 2000, seed: int = 0) -> tuple[float, float]:
    """95 % confidence interval of the mean of paired differences [n], by the percentiles of resampled means."""
    generator = torch.Generator().manual_seed(seed)
    difference = difference.double().cpu()
    picks = torch.randint(len(difference), (resamples, len(difference)), generator=generator)
    low, high = difference[picks].mean(1).quantile(torch.tensor([0.025, 0.975], dtype=torch.double)).tolist()
    return low, high


def compare(reference: Tensor, logits: Tensor) -> tuple[Tensor, Tensor]:
    """KL(reference || logits) in nats and whether the largest agree, both [n] on the CPU. Logits: [n, vocab]."""
    p, q = reference.double().log_softmax(-1), logits.double().log_softmax(-1)
    return ((p - q) * p.exp()).sum(-1).cpu(), (reference.argmax(-1) == logits.argmax(-1)).cpu()


def exact(device: torch.device) -> None:
    """Have fp32 products computed in fp32. Raises RuntimeError where an environment variable, say, prevents it."""
    torch.set_float32_matmul_precision("highest")
    a = torch.randn(256, 256, generator=torch.Generator().manual_seed(0)).to(device)
    error = ((a @ a).double() - a.double() @ a.double()).abs().max().item()
    if error > 1e-3:  # TF32's would be 0.05
        raise RuntimeError(f"fp32 products on {device} are off by {error:.1g}: is TF32 forced on?")


@torch.inference_mode()
def measure(shape: Shape, weights: RandomWeights, prompt: Prompt, make: DecoderFactory) -> Report:
    """Run both measures."""
    device, report = weights.device, Report()
    exact(device)
    timed = _clock(device, report.seconds)
    count, contexts = prompt.branches.shape[1], prompt.contexts
    branches = prompt.branches.to(device)

    with timed("decoder: load"):
        decoder = make(shape, weights, device)
    with timed("reference"):
        trace = Reference(shape, weights).run(prompt)
    forced = trace.experts[prompt.free :].unflatten(0, (len(contexts), count))
    with timed("transformers"):
        theirs = Transformers(shape, weights, device)
        if prompt.free:
            free_hidden, free_experts = theirs.prefill(prompt.tokens[: prompt.free].to(device))
        hidden = [theirs.decode(branches[i], c, trace, forced[i]) for i, c in enumerate(contexts)]
    head, head32 = theirs.embedding, theirs.embedding.float()

    with timed("decoder: forced routing"):
        for layer, (keys, values) in enumerate(zip(trace.keys, trace.values, strict=True)):
            decoder.load_kv(layer, keys, values)
        # Longest first: a step overwrites the cache at its position, which only longer contexts would read.
        for i in sorted(range(len(contexts)), key=lambda i: -contexts[i]):
            logits = torch.empty(count, shape.vocab, device=device)
            for b in range(count):
                logits[b] = decoder.step(int(prompt.branches[i, b]), contexts[i] - 1, forced[i, b])
            at = prompt.free + i * count
            true = trace.hidden[at : at + count] @ head32.T
            bf16, fp32 = F.linear(hidden[i], head), hidden[i].float() @ head32.T
            report.forced.insert(
                0,
                ContextError(
                    contexts[i],
                    _l2(logits, true),
                    _l2(bf16, true),
                    _l2(fp32, true),
                    _max(logits, true),
                    _max(bf16, true),
                ),
            )

    if prompt.free:
        with timed("decoder: free routing"):
            _measure_free(report, shape, prompt, trace, decoder, (head, head32), (free_hidden, free_experts))
    return report


def _measure_free(
    report: Report,
    shape: Shape,
    prompt: Prompt,
    trace: Trace,
    decoder: Decoder,
    head: tuple[Tensor, Tensor],
    theirs: tuple[Tensor, Tensor],
) -> None:
    """Measure (b). head: in bf16 and in fp32. theirs: transformers' hidden states and experts."""
    decoder.reset()
    found, own_experts = [], torch.zeros_like(theirs[1])
    for begin in range(0, prompt.free, 64):  # as many logits as compare() may widen to fp64 at once
        rows = range(begin, min(begin + 64, prompt.free))
        ours = torch.empty(len(rows), shape.vocab, device=own_experts.device)
        for row, i in enumerate(rows):
            ours[row] = decoder.step(int(prompt.tokens[i]), i)
            own_experts[i] = decoder.experts
        at = slice(rows.start, rows.stop)
        true = trace.hidden[at] @ head[1].T
        found.append((*compare(true, ours), *compare(true, F.linear(theirs[0][at], head[0]))))
    kl, top1, their_kl, their_top1 = (torch.cat(x).double() for x in zip(*found, strict=True))
    routed = [i for i in range(shape.layers) if not shape.is_dense(i)]
    true_experts = trace.experts[: prompt.free, routed].sort().values
    other, their_other = (
        1.0 - (x[:, routed].sort().values == true_experts).all(-1).double().mean().item()
        for x in (own_experts, theirs[1])
    )
    report.ours = Agreement(kl.mean().item(), top1.mean().item(), other)
    report.transformers = Agreement(their_kl.mean().item(), their_top1.mean().item(), their_other)
    report.kl_difference = bootstrap(kl - their_kl)
    report.top1_difference = bootstrap(top1 - their_top1)


def _l2(x: Tensor, true: Tensor) -> float:
    return ((x.float() - true).norm() / true.norm()).item()


def _max(x: Tensor, true: Tensor) -> float:
    return (x.float() - true).abs().amax(-1).mean().item()


def _clock(device: torch.device, seconds: dict[str, float]) -> Callable[[str], Any]:
    @contextmanager
    def timed(name: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds[name] = round(time.perf_counter() - start, 2)
        print(f"{name}: {seconds[name]:.1f} s", file=sys.stderr, flush=True)

    return timed


# ---- command line --------------------------------------------------------------------------------------------


def table(report: Report) -> str:
    wide = "{:>12} {:>9} {:>9} {:>6} {:>10} {:>9} {:>6} {:>10}"
    lines = [
        "(a) routing forced: error of the logits against fp32, relative L2 and largest",
        wide.format("context", "ours", "transf.", "ratio", "max: ours", "transf.", "ratio", "fp32 head"),
    ]
    for e in report.forced:
        figures = (e.ours, e.transformers, e.ratio, e.ours_max, e.transformers_max, e.ratio_max)
        line = wide.format(e.context, *(f"{x:.3g}" for x in figures), f"{e.transformers_fp32_head:.3g}")
        lines.append(line if e.passed else f"{line}  FAILED")
    if report.ours and report.transformers:
        lines.append("(b) routing free: divergence from fp32 in nats, same largest logit, other experts chosen")
        for name, x in (("ours", report.ours), ("transformers", report.transformers)):
            lines.append(f"{name:>12} {x.kl:10.3g} {x.top1:9.2%} {x.other_experts:10.2%}")
        (low, high), (low1, high1) = report.kl_difference, report.top1_difference
        lines.append(f"  difference {low:10.2g} .. {high:.2g}, {low1:.2%} .. {high1:.2%} (95 %)")
    lines.append("passed" if report.passed else "FAILED")
    return "\n".join(lines)


def _output_of(*command: str) -> str | None:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def _environment(device: torch.device) -> dict[str, object]:
    import transformers

    found: dict[str, object] = {
        "commit": _output_of("git", "rev-parse", "HEAD"),
        "changed": _output_of("git", "status", "--porcelain", "--untracked-files=no"),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "device": str(device),
    }
    if device.type == "cuda":
        found["gpu"] = torch.cuda.get_device_name(device)
        found["driver"] = _output_of("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    return found


def find_decoder(name: str) -> DecoderFactory:
    """A name in DECODERS, or `module:callable`. Raises SystemExit for neither."""
    if name in DECODERS:
        return DECODERS[name]
    module, colon, attribute = name.partition(":")
    if not colon:
        raise SystemExit(f"unknown decoder {name!r}: one of {', '.join(DECODERS)}, or module:callable")
    found: DecoderFactory = getattr(importlib.import_module(module), attribute)
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Accuracy of a decoder beside transformers in bf16, against fp32.")
    parser.add_argument("--decoder", default="megakernel", help="name, or module:callable (default: %(default)s)")
    parser.add_argument("--quick", action="store_true", help="fewer contexts, branches and tokens")
    parser.add_argument("--contexts", type=int, nargs="+", help="context lengths, tokens")
    parser.add_argument("--branches", type=int, help="tokens tried at each context (default: 32; quick: 8)")
    parser.add_argument("--tokens", type=int, help="tokens with free routing, 0 for none (default: 4608; quick: 1024)")
    parser.add_argument("--small", action="store_true", help="the small model of the kernel's quick tests")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path, help="write every figure there as JSON")
    args = parser.parse_args(arguments)

    contexts = args.contexts or (SMALL_CONTEXTS if args.small else QUICK_CONTEXTS if args.quick else CONTEXTS)
    branches = args.branches or (8 if args.quick else 32)
    tokens = args.tokens if args.tokens is not None else (1024 if args.quick else 4608)
    shape, device = shape_of(SMALL if args.small else NORTH_MINI_CODE), torch.device(args.device)
    make = find_decoder(args.decoder)
    weights = RandomWeights(shape, args.seed, device)
    report = measure(shape, weights, Prompt.random(shape, contexts, branches, tokens, args.seed), make)
    print(table(report))
    if args.out:
        forced = [asdict(e) | {"ratio": e.ratio, "ratio_max": e.ratio_max, "passed": e.passed} for e in report.forced]
        settings = {"decoder": args.decoder, "small": args.small, "seed": args.seed, "branches": branches}
        figures = asdict(report) | {"forced": forced, "passed": report.passed}
        result = {"environment": _environment(device), "settings": settings | {"tokens": tokens}} | figures
        args.out.write_text(json.dumps(result, indent=1) + "\n")
    return 0 if report.passed else 1


if __name__ == "__main__":
    sys.exit(main())
