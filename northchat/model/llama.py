"""The llama family on the CPU: configuration, weights, and the forward pass over paged keys and values."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from northchat.model.linear import Dense, Int4, Linear, fits_int4
from northchat.model.paged_kv import PagedKV, Plan
from northchat.model.weights import Blocks, ModelError, Weights


@dataclass(frozen=True)
class LlamaConfig:
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    norm_eps: float
    max_context: int
    tied: bool
    """The output matrix is the embedding."""
    attention_bias: bool
    mlp_bias: bool
    rope_theta: float
    rope_scaling: dict[str, Any] | None
    rope_freq_factors: tuple[float, ...] | None

    @classmethod
    def from_dict(cls, config: dict[str, Any]) -> "LlamaConfig":
        """From the keys of a config.json. Raises ModelError when one is missing or asks for what isn't supported."""
        try:
            heads, hidden = config["num_attention_heads"], config["hidden_size"]
            # Newer files keep all of RoPE under rope_parameters.
            rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
            factors = config.get("rope_freq_factors")
            found = cls(
                hidden=hidden,
                layers=config["num_hidden_layers"],
                heads=heads,
                kv_heads=config.get("num_key_value_heads") or heads,
                head_dim=config.get("head_dim") or hidden // heads,
                ffn=config["intermediate_size"],
                vocab=config["vocab_size"],
                norm_eps=config["rms_norm_eps"],
                max_context=config["max_position_embeddings"],
                tied=config.get("tie_word_embeddings", False),
                attention_bias=config.get("attention_bias", False),
                mlp_bias=config.get("mlp_bias", False),
                rope_theta=config.get("rope_theta") or rope.get("rope_theta") or 10000.0,
                rope_scaling=dict(rope) or None,
                rope_freq_factors=tuple(factors) if factors else None,
            )
        except KeyError as error:
            raise _lacking(error) from None
        if config.get("hidden_act", "silu") != "silu":
            raise ModelError(
                f"the model uses the activation {config['hidden_act']!r}; llama models with silu are supported"
            )
        if found.heads % found.kv_heads or found.head_dim % 2:
            raise ModelError(
                f"the model has {found.heads} heads on {found.kv_heads} KV heads of {found.head_dim} dimensions, "
                "which no llama has; download the model again"
            )
        try:
            found.inverse_frequencies()
        except KeyError as error:
            raise _lacking(error) from None
        return found

    @property
    def groups(self) -> tuple[tuple[tuple[int, ...], int | None], ...]:
        """Layers that share page tables, with their window: all of them, without one."""
        return ((tuple(range(self.layers)), None),)

    def inverse_frequencies(self) -> torch.Tensor:
        """RoPE's angular step of each pair of dimensions, float32 [head_dim / 2]. Raises ModelError for an unknown
        scaling.

        `llama3` as in Llama 3.1's reference code: wavelengths beyond the original context are stretched by `factor`,
        short ones are kept, those between are blended.
        """
        steps: torch.Tensor = 1.0 / self.rope_theta ** (
            torch.arange(0, self.head_dim, 2, dtype=torch.float32) / self.head_dim
        )
        if self.rope_freq_factors is not None:
            return steps / torch.tensor(self.rope_freq_factors)
        scaling: dict[str, Any] = self.rope_scaling or {}
        kind = scaling.get("rope_type", scaling.get("type", "default"))
        if kind == "default":
            return steps
        if kind == "linear":
            return steps / float(scaling["factor"])
        if kind != "llama3":
            raise ModelError(f"the model scales RoPE by {kind!r}; default, linear and llama3 are supported")
        low, high = float(scaling["low_freq_factor"]), float(scaling["high_freq_factor"])
        turns = steps * float(scaling["original_max_position_embeddings"]) / (2 * math.pi)
        kept = ((turns - low) / (high - low)).clamp(0, 1)
        return steps * kept + steps / float(scaling["factor"]) * (1 - kept)


def _lacking(error: KeyError) -> ModelError:
    return ModelError(f"the model's configuration lacks {error.args[0]}; download the model again")


@dataclass
class _Layer:
    attention_norm: torch.Tensor
    qkv: Linear
    out: Linear
    mlp_norm: torch.Tensor
    gate_up: Linear
    down: Linear


class Llama:
    """Weights and forward pass. `dtype` is that of matrix products and of keys and values; the residual stream, norms
    and RoPE are float32.
    """

    def __init__(
        self,
        config: LlamaConfig,
        layers: Sequence[_Layer],
        embedding: torch.Tensor,
        norm: torch.Tensor,
        head: Linear,
        dtype: torch.dtype,
    ) -> None:
        self.config, self.dtype = config, dtype
        self._layers, self._embedding, self._norm, self._head = layers, embedding, norm, head
        self.int4 = any(isinstance(layer.down, Int4) for layer in layers)
        """Whether matrices are held in 4 bits."""
        self._steps = config.inverse_frequencies()
        # sqrt(mean(x^2) + eps) = hypot(|x|, sqrt(n eps)) / sqrt(n): two fast operators, sqrt(n) is in the weights.
        self._floor = torch.tensor(math.sqrt(config.hidden * config.norm_eps))

    @property
    def label(self) -> str:
        """Of the weights' precision, for the status bar."""
        return "int4" if self.int4 else str(self.dtype).removeprefix("torch.")

    def hidden(self, ids: torch.Tensor, plans: Sequence[Plan], kvs: Sequence[PagedKV]) -> torch.Tensor:
        """Final normed states of the tokens `ids` [tokens], as the plan places them; their keys and values are written.

        plans and kvs: one for each of `config.groups`. Returns [tokens, hidden] of the model's dtype.
        """
        c = self.config
        (plan,), (kv,) = plans, kvs
        angles = torch.outer(plan.positions.float(), self._steps)
        turns = torch.polar(torch.ones_like(angles), angles).unsqueeze(1)
        rotated, width = c.heads + c.kv_heads, c.heads * c.head_dim
        x = F.embedding(ids, self._embedding).float()
        tokens = x.shape[0]
        for index, layer in enumerate(self._layers):
            qkv = layer.qkv(self._normed(x, layer.attention_norm)).float().view(tokens, -1, c.head_dim)
            # Rows of Q and K stand in pairs, so that a rotation is a complex product, done in place.
            torch.view_as_complex(qkv[:, :rotated].view(tokens, rotated, -1, 2)).mul_(turns)
            kv.write(index, qkv[:, c.heads :].view(tokens, 2, c.kv_heads, c.head_dim), plan)
            seen = kv.attend(index, qkv[:, : c.heads].to(self.dtype), plan)
            x += layer.out(seen.view(tokens, width))
            gate, up = layer.gate_up(self._normed(x, layer.mlp_norm)).chunk(2, dim=1)
            x += layer.down(F.silu(gate).mul_(up))
        return self._normed(x, self._norm)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[rows, hidden] -> float32 [rows, vocab]."""
        return self._head(hidden).float()

    def _normed(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        length = torch.hypot(torch.linalg.vector_norm(x, dim=-1, keepdim=True), self._floor)
        return (x / length).mul_(weight).to(self.dtype)


def load(weights: Weights, dtype: torch.dtype, int4: bool, keep_dense: bool, loaded: Callable[[float], None]) -> Llama:
    """Build the model from a file.

    int4: matrices stored as Q4_0 or Q4_1 stay 4-bit (dtype must be bfloat16); keep_dense: and have a bfloat16 copy too.
    loaded: told the share built so far, 0..1.
    Raises ModelError when a tensor is missing or of another shape than the configuration says.
    """
    config = LlamaConfig.from_dict(weights.config)
    return _Loader(weights, config, dtype, int4, keep_dense, loaded).model()


class _Loader:
    def __init__(
        self,
        weights: Weights,
        config: LlamaConfig,
        dtype: torch.dtype,
        int4: bool,
        keep_dense: bool,
        loaded: Callable[[float], None],
    ) -> None:
        self.weights, self.config, self.dtype = weights, config, dtype
        self.int4, self.keep_dense, self.loaded = int4, keep_dense, loaded

    def model(self) -> Llama:
        c = self.config
        embedding = self.weights.load("model.embed_tokens.weight", (c.vocab, c.hidden)).to(self.dtype)
        head = Dense(embedding) if c.tied else self._linear(["lm_head"], [c.vocab], c.hidden, bias=False)
        layers = []
        for index in range(c.layers):
            self.loaded((index + 1) / (c.layers + 2))
            layers.append(self._layer(f"model.layers.{index}."))
        norm = self._norm("model.norm.weight")
        self.loaded(1.0)
        return Llama(c, layers, embedding, norm, head, self.dtype)

    def _layer(self, at: str) -> _Layer:
        c = self.config
        q, kv = c.heads * c.head_dim, c.kv_heads * c.head_dim
        projections = [f"{at}self_attn.{p}_proj" for p in "qkv"]
        return _Layer(
            attention_norm=self._norm(f"{at}input_layernorm.weight"),
            qkv=self._linear(projections, [q, kv, kv], c.hidden, c.attention_bias, pairs=True),
            out=self._linear([f"{at}self_attn.o_proj"], [c.hidden], q, c.attention_bias),
            mlp_norm=self._norm(f"{at}post_attention_layernorm.weight"),
            gate_up=self._linear([f"{at}mlp.gate_proj", f"{at}mlp.up_proj"], [c.ffn, c.ffn], c.hidden, c.mlp_bias),
            down=self._linear([f"{at}mlp.down_proj"], [c.hidden], c.ffn, c.mlp_bias),
        )

    def _norm(self, name: str) -> torch.Tensor:
        return self.weights.load(name, (self.config.hidden,)).float() * math.sqrt(self.config.hidden)

    def _linear(self, names: Sequence[str], outs: Sequence[int], width: int, bias: bool, pairs: bool = False) -> Linear:
        """The matrices `names` stacked; with `pairs` the rows of the first two (Q, K) are put in RoPE's pairs."""
        shapes = [(out, width) for out in outs]
        stacked_bias = None
        if bias:
            parts = [self.weights.load(f"{n}.bias", (out,)) for n, out in zip(names, outs, strict=True)]
            stacked_bias = torch.cat([self._paired(p) if pairs and i < 2 else p for i, p in enumerate(parts)])
            stacked_bias = stacked_bias.to(self.dtype)
        if self.int4:
            blocks = [self.weights.blocks(f"{n}.weight", s) for n, s in zip(names, shapes, strict=True)]
            if fits_int4(blocks):
                stored = [
                    Blocks(b.type, self._paired(torch.from_numpy(b.rows)).numpy(), b.shape) if pairs and i < 2 else b
                    for i, b in enumerate(blocks)
                    if b is not None
                ]
                return Int4(stored, stacked_bias, self.keep_dense)
        dense = []
        for i, (name, shape) in enumerate(zip(names, shapes, strict=True)):
            weight = self.weights.load(f"{name}.weight", shape).to(self.dtype)
            dense.append(self._paired(weight) if pairs and i < 2 else weight)
        return Dense(dense[0] if len(dense) == 1 else torch.cat(dense), stacked_bias)

    def _paired(self, rows: torch.Tensor) -> torch.Tensor:
        """From order (0, 1, ..., d/2, d/2 + 1, ...) within a head to (0, d/2, 1, d/2 + 1, ...)."""
        halves = rows.reshape(-1, 2, self.config.head_dim // 2, *rows.shape[1:])
        return halves.transpose(1, 2).reshape(rows.shape)
