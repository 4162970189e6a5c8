"""North Mini Code's family in torch: configuration, weights, and the forward pass over paged keys and values.

The reference for faster implementations: it rounds where Hugging Face's eager implementation rounds, so that in
bfloat16 both give the same bits. A layer is parallel: attention and the feed-forward network read the same norm, and
the residual stream takes the sum. Three layers in four attend to a sliding window, with RoPE on neighbouring pairs.
Every fourth attends to everything and knows no positions, but for layer 0, which does, and which has a dense network in
place of experts.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from northchat.model.paged_kv import PagedKV, Plan, Reach
from northchat.model.weights import ModelError, Weights


@dataclass(frozen=True)
class Cohere2MoeConfig:
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    experts: int
    top_k: int
    ffn: int
    """Of one expert."""
    dense_ffn: int
    """Of the dense layers."""
    vocab: int
    norm_eps: float
    max_context: int
    window: int
    """Keys that a query of a sliding layer sees, itself included."""
    sliding: tuple[bool, ...]
    """Per layer: attends to the window only."""
    dense: tuple[bool, ...]
    """Per layer: one feed-forward network in place of experts."""
    rotate_dense: bool
    """Dense layers have RoPE though they attend to everything."""
    normalise_scores: bool
    """The chosen experts' sigmoids are divided by their sum."""
    logit_scale: float
    rope_theta: float

    @classmethod
    def from_dict(cls, config: dict[str, Any]) -> "Cohere2MoeConfig":
        """From the keys of a config.json. Raises ModelError when one is missing or asks for what isn't supported here.

        norm_topk_prob, rms_norm_eps and logit_scale have defaults elsewhere that are wrong for North Mini Code and that
        load without complaint: they must be given.
        """
        for key, only, default in _ONLY:
            if config.get(key, default) != only:
                raise ModelError(
                    f"the model's configuration has {key} {config.get(key, default)!r}; {only!r} is supported"
                )
        try:
            count = config["num_hidden_layers"]
            found = cls(
                hidden=config["hidden_size"],
                layers=count,
                heads=config["num_attention_heads"],
                kv_heads=config["num_key_value_heads"],
                head_dim=config["head_dim"],
                experts=config["num_experts"],
                top_k=config["num_experts_per_tok"],
                ffn=config["intermediate_size"],
                dense_ffn=config["prefix_dense_intermediate_size"],
                vocab=config["vocab_size"],
                norm_eps=config["rms_norm_eps"],
                max_context=config["max_position_embeddings"],
                window=config["sliding_window"],
                sliding=_sliding(config, count),
                dense=_dense(config, count),
                rotate_dense=config.get("prefix_dense_sliding_window_pattern", 1) == 1,
                normalise_scores=config["norm_topk_prob"],
                logit_scale=config["logit_scale"],
                rope_theta=config.get("rope_theta") or config["rope_parameters"]["rope_theta"],
            )
        except KeyError as error:
            raise ModelError(f"the model's configuration lacks {error.args[0]}; download the model again") from None
        if found.norm_eps is None:
            raise ModelError("the model's configuration has rms_norm_eps null: LayerNorm, where RMSNorm is supported")
        if found.heads % found.kv_heads or found.head_dim % 2 or not 0 < found.top_k <= found.experts:
            raise ModelError(
                f"the model has {found.heads} heads on {found.kv_heads} KV heads of {found.head_dim} dimensions and "
                f"chooses {found.top_k} of {found.experts} experts, which can't be; download the model again"
            )
        return found

    def rotates(self, layer: int) -> bool:
        """Whether the layer has RoPE."""
        return self.sliding[layer] or (self.dense[layer] and self.rotate_dense)

    @property
    def groups(self) -> tuple[tuple[tuple[int, ...], int | None], ...]:
        """Layers that share page tables, with their window: those that see everything, then the sliding ones."""
        every = range(self.layers)
        return (
            (tuple(i for i in every if not self.sliding[i]), None),
            (tuple(i for i in every if self.sliding[i]), self.window),
        )


_ONLY = (
    # key, the value supported, its meaning when absent
    ("expert_selection_fn", "sigmoid", "softmax"),
    ("hidden_act", "silu", "silu"),
    ("num_shared_experts", 0, 0),
    ("attention_bias", False, False),
    ("use_qk_norm", False, False),
    ("use_parallel_block", True, True),
    ("tie_word_embeddings", True, True),
    ("rope_scaling", None, None),
)


def _sliding(config: dict[str, Any], count: int) -> tuple[bool, ...]:
    kinds = config.get("layer_types")
    if kinds is None:
        # Every so many-th layer is full, counted from 1, and counted anew after the dense ones.
        prefix = config["first_k_dense_replace"]
        of_prefix, of_rest = config.get("prefix_dense_sliding_window_pattern", 1), config["sliding_window_pattern"]
        return tuple((i + 1) % of_prefix != 0 if i < prefix else (i - prefix + 1) % of_rest != 0 for i in range(count))
    return _kinds("layer_types", kinds, ("full_attention", "sliding_attention"), count)


def _dense(config: dict[str, Any], count: int) -> tuple[bool, ...]:
    kinds = config.get("mlp_layer_types")
    if kinds is None:
        prefix = config["first_k_dense_replace"]
        return tuple(i < prefix for i in range(count))
    return _kinds("mlp_layer_types", kinds, ("sparse", "dense"), count)


def _kinds(key: str, kinds: Sequence[str], names: tuple[str, str], count: int) -> tuple[bool, ...]:
    """Whether each layer is of the second kind."""
    if len(kinds) != count or not set(kinds) <= set(names):
        raise ModelError(f"the model's configuration must name for each of {count} layers one of {names} in {key}")
    return tuple(kind == names[1] for kind in kinds)


@dataclass
class _Layer:
    norm: torch.Tensor
    """[hidden]"""
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    out: torch.Tensor
    router: torch.Tensor | None
    """[experts, hidden]; None in a dense layer, which has one expert that every token takes."""
    gate_up: torch.Tensor
    """[experts, 2 * ffn, hidden]: the gate's rows, then the other factor's."""
    down: torch.Tensor
    """[experts, hidden, ffn]"""


class Cohere2Moe:
    """Weights and forward pass. `dtype` is that of weights, activations, keys and values."""

    def __init__(
        self,
        config: Cohere2MoeConfig,
        layers: Sequence[_Layer],
        embedding: torch.Tensor,
        norm: torch.Tensor,
        dtype: torch.dtype,
    ) -> None:
        self.config, self.dtype = config, dtype
        self._layers, self._embedding, self._norm = layers, embedding, norm
        even = torch.arange(0, config.head_dim, 2, dtype=torch.float32)
        self._steps = 1.0 / config.rope_theta ** (even / config.head_dim)
        self._place = {
            layer: (group, index)
            for group, (layers_, _) in enumerate(config.groups)
            for index, layer in enumerate(layers_)
        }

    @property
    def label(self) -> str:
        """Of the weights' precision, for the status bar."""
        return str(self.dtype).removeprefix("torch.")

    def hidden(self, ids: torch.Tensor, plans: Sequence[Plan], kvs: Sequence[PagedKV]) -> torch.Tensor:
        """Final normed states of the tokens `ids` [tokens], as the plans place them; their keys and values are written.

        plans and kvs: one for each of `config.groups`; the pool of the sliding layers has their window.
        Returns [tokens, hidden] of the model's dtype.
        """
        c = self.config
        angles = plans[0].positions[:, None].float() * self._steps
        # Rounded, as what they turn is.
        cos, sin = (x.to(self.dtype).float().unsqueeze(1) for x in (angles.cos(), angles.sin()))
        x = F.embedding(ids, self._embedding)
        for index, layer in enumerate(self._layers):
            normed = self._normed(x, layer.norm)
            q, k, v = (F.linear(normed, w).view(len(ids), -1, c.head_dim) for w in (layer.q, layer.k, layer.v))
            if c.rotates(index):
                q, k = _rotated(q, cos, sin), _rotated(k, cos, sin)
            group, place = self._place[index]
            kvs[group].write(place, torch.stack((k, v), 1), plans[group])
            seen = torch.cat(
                [_attend(q[r.first : r.first + r.length], kvs[group].read(place, r), r) for r in plans[group].reaches]
            )
            x = x + F.linear(seen, layer.out) + self._feed_forward(layer, normed)
        return self._normed(x, self._norm)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[rows, hidden] -> float32 [rows, vocab]."""
        return (F.linear(hidden, self._embedding) * self.config.logit_scale).float()

    def _normed(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        scaled = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.config.norm_eps)
        return weight * scaled.to(x.dtype)

    def _feed_forward(self, layer: _Layer, x: torch.Tensor) -> torch.Tensor:
        if layer.router is None:
            return _swiglu(x, layer.gate_up[0], layer.down[0])
        top_k = self.config.top_k
        # Chosen by logit: the sigmoid keeps their order, but rounded it would make more ties.
        logits, chosen = F.linear(x, layer.router).topk(top_k)
        scores = logits.sigmoid()
        if self.config.normalise_scores:
            scores = scores / scores.sum(-1, keepdim=True)
        picked, scores = chosen.flatten(), scores.flatten()
        parts = torch.empty(len(picked), x.shape[1], dtype=x.dtype)
        for expert in set(picked.tolist()):
            mine = (picked == expert).nonzero().squeeze(1)
            y = _swiglu(x[mine // top_k], layer.gate_up[expert], layer.down[expert])
            parts[mine] = y * scores[mine, None]
        # In the order of choice, in float32 with one rounding at the end.
        return parts.view(len(x), top_k, -1).sum(1)


def _swiglu(x: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    gate, up = F.linear(x, gate_up).chunk(2, dim=-1)
    return F.linear(F.silu(gate) * up, down)


def _rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """RoPE on neighbouring pairs, in float32. x [tokens, heads, head_dim]; cos, sin [tokens, 1, head_dim / 2]."""
    even, odd = x.float().view(*x.shape[:-1], -1, 2).unbind(-1)
    return torch.stack((even * cos - odd * sin, odd * cos + even * sin), -1).flatten(-2).to(x.dtype)


def _attend(q: torch.Tensor, kv: torch.Tensor, reach: Reach) -> torch.Tensor:
    """Attention with scores and probabilities in q's dtype, the softmax between them in float32.

    q [tokens, heads, head_dim]; kv [2, kv heads, keys, head_dim]; query head h reads KV head h // (heads / kv heads).
    Returns [tokens, heads * head_dim].
    """
    keys, values = kv.repeat_interleave(q.shape[1] // kv.shape[1], dim=1)
    scores = (q.transpose(0, 1) @ keys.transpose(1, 2)) * q.shape[-1] ** -0.5
    if reach.length > 1:
        mask = torch.ones(scores.shape[1:], dtype=torch.bool).tril() if reach.mask is None else reach.mask
        scores = scores.masked_fill(~mask, -torch.inf)
    probabilities = scores.softmax(-1, dtype=torch.float32).to(q.dtype)
    out: torch.Tensor = probabilities @ values
    return out.transpose(0, 1).flatten(1)


def load(
    weights: Weights, dtype: torch.dtype, loaded: Callable[[float], None], window: int | None = None
) -> Cohere2Moe:
    """Build the model from a file.

    loaded: told the share built so far, 0..1. window: keys that sliding layers see, in place of the configuration's.
    Experts may be stored one by one, stacked as in Hugging Face's module, or stacked by projection as MLX does; names
    may start with `language_model.`. Raises ModelError when a tensor is missing, or of another shape than the
    configuration says, or left over, which would mean another architecture.
    """
    config = Cohere2MoeConfig.from_dict(weights.config | ({"sliding_window": window} if window else {}))
    return _Loader(weights, config, dtype, loaded).model()


class _Loader:
    def __init__(
        self, weights: Weights, config: Cohere2MoeConfig, dtype: torch.dtype, loaded: Callable[[float], None]
    ) -> None:
        self.weights, self.config, self.dtype, self.loaded = weights, config, dtype, loaded
        self.names = set(weights.names())
        self.prefix = "language_model." if "language_model.model.embed_tokens.weight" in self.names else ""
        self.used: set[str] = set()

    def model(self) -> Cohere2Moe:
        c = self.config
        embedding = self._load("model.embed_tokens.weight", c.vocab, c.hidden)
        layers = []
        for index in range(c.layers):
            self.loaded((index + 1) / (c.layers + 2))
            layers.append(self._layer(index, f"model.layers.{index}."))
        norm = self._load("model.norm.weight", c.hidden)
        if left := next(self._left_over(), None):
            raise ModelError(
                f"{self.weights.path} has a tensor {left}, for which this architecture has no place; "
                "its configuration and its weights are of different models"
            )
        self.loaded(1.0)
        return Cohere2Moe(c, layers, embedding, norm, self.dtype)

    def _layer(self, index: int, at: str) -> _Layer:
        c = self.config
        queries, keys = c.heads * c.head_dim, c.kv_heads * c.head_dim
        if c.dense[index]:
            router, experts = None, self._networks([f"{at}mlp."], c.dense_ffn)
        else:
            router, experts = self._load(f"{at}mlp.gate.weight", c.experts, c.hidden), self._experts(f"{at}mlp.")
        return _Layer(
            norm=self._load(f"{at}input_layernorm.weight", c.hidden),
            q=self._load(f"{at}self_attn.q_proj.weight", queries, c.hidden),
            k=self._load(f"{at}self_attn.k_proj.weight", keys, c.hidden),
            v=self._load(f"{at}self_attn.v_proj.weight", keys, c.hidden),
            out=self._load(f"{at}self_attn.o_proj.weight", c.hidden, queries),
            router=router,
            gate_up=experts[0],
            down=experts[1],
        )

    def _experts(self, at: str) -> tuple[torch.Tensor, torch.Tensor]:
        c = self.config
        if f"{self.prefix}{at}experts.gate_up_proj" in self.names:
            return (
                self._load(f"{at}experts.gate_up_proj", c.experts, 2 * c.ffn, c.hidden),
                self._load(f"{at}experts.down_proj", c.experts, c.hidden, c.ffn),
            )
        if f"{self.prefix}{at}switch_mlp.gate_proj.weight" in self.names:
            gate = self._load(f"{at}switch_mlp.gate_proj.weight", c.experts, c.ffn, c.hidden)
            up = self._load(f"{at}switch_mlp.up_proj.weight", c.experts, c.ffn, c.hidden)
            down = self._load(f"{at}switch_mlp.down_proj.weight", c.experts, c.hidden, c.ffn)
            return torch.cat((gate, up), 1), down
        return self._networks([f"{at}experts.{expert}." for expert in range(c.experts)], c.ffn)

    def _networks(self, names: Sequence[str], ffn: int) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = self.config.hidden
        gate_up = torch.empty(len(names), 2 * ffn, hidden, dtype=self.dtype)
        down = torch.empty(len(names), hidden, ffn, dtype=self.dtype)
        for i, at in enumerate(names):
            gate_up[i, :ffn] = self._load(f"{at}gate_proj.weight", ffn, hidden)
            gate_up[i, ffn:] = self._load(f"{at}up_proj.weight", ffn, hidden)
            down[i] = self._load(f"{at}down_proj.weight", hidden, ffn)
        return gate_up, down

    def _load(self, name: str, *shape: int) -> torch.Tensor:
        name = self.prefix + name
        if name not in self.names:
            raise ModelError(
                f"{self.weights.path} has no tensor {name} of shape {list(shape)}; "
                "the file is incomplete or of another architecture"
            )
        self.used.add(name)
        return self.weights.load(name, shape).to(self.dtype)

    def _left_over(self) -> Iterator[str]:
        """Tensors that nothing asked for, but those that some files carry without need: the head, which is the
        embedding, RoPE's frequencies, and biases of linear layers. A norm's bias does matter: it tells of LayerNorm.
        """
        for name in sorted(self.names - self.used):
            harmless = name.endswith(("lm_head.weight", ".inv_freq")) or (
                name.endswith(".bias") and not name.endswith("norm.bias")
            )
            if not harmless:
                yield name
