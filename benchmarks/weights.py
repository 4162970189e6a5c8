"""Random weights of North Mini Code's shape and statistics, each tensor remade from its name alone.

The model has 61 GB of weights and one GPU holds them once. So nothing is stored: whoever needs a tensor (a kernel's
packer, a reference that runs layer by layer) asks for it by its checkpoint name and always gets the same numbers, on
the same device type and torch version.
"""

import hashlib
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Shape:
    """Dimensions of a cohere2_moe model; the defaults are North Mini Code's."""

    layers: int = 49
    hidden: int = 2048
    heads: int = 32
    kv_heads: int = 4
    head_dim: int = 128
    experts: int = 128
    top_k: int = 8
    intermediate: int = 768
    """Channels of one expert."""
    dense_intermediate: int = 3072
    """Channels of layer 0's feed-forward network."""
    vocab: int = 262144
    window: int = 4096
    """Keys that a query of a sliding layer sees, itself included."""
    rope_theta: float = 50000.0
    norm_eps: float = 1e-6

    def is_full(self, layer: int) -> bool:
        """Whether the layer attends to the whole context (else to the window)."""
        return layer % 4 == 0

    def has_rope(self, layer: int) -> bool:
        """Full layers have no positions, but for layer 0."""
        return layer == 0 or not self.is_full(layer)

    def is_dense(self, layer: int) -> bool:
        return layer == 0

    def config(self) -> dict[str, Any]:
        """The checkpoint's config.json, as far as transformers' Cohere2MoeConfig needs it."""
        return {
            "model_type": "cohere2_moe",
            "num_hidden_layers": self.layers,
            "first_k_dense_replace": 1,
            "prefix_dense_sliding_window_pattern": 1,
            "sliding_window_pattern": 4,
            "sliding_window": self.window,
            "hidden_size": self.hidden,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "num_experts": self.experts,
            "num_experts_per_tok": self.top_k,
            "num_shared_experts": 0,
            "expert_selection_fn": "sigmoid",
            "norm_topk_prob": False,
            "intermediate_size": self.intermediate,
            "prefix_dense_intermediate_size": self.dense_intermediate,
            "vocab_size": self.vocab,
            "max_position_embeddings": 500000,
            "rope_theta": self.rope_theta,
            "rms_norm_eps": self.norm_eps,
            "logit_scale": 1.0,
            "tie_word_embeddings": True,
            "hidden_act": "silu",
            "pad_token_id": 0,
            "bos_token_id": 2,
            "eos_token_id": min(255001, self.vocab - 1),
        }


# Standard deviation of each matrix in the real layer 1, and the inputs it sums over there. With other dimensions the
# deviation is scaled so that the activations keep their size.
_STD = {
    "q_proj": (0.03074, 2048),
    "k_proj": (0.05046, 2048),
    "v_proj": (0.01320, 2048),
    "o_proj": (0.02061, 4096),
    "gate": (0.08388, 2048),
    "gate_proj": (0.02188, 2048),
    "up_proj": (0.02144, 2048),
    "down_proj": (0.0268, 768),
    # Not known. Small beside what 49 layers add to it, else the tied head would only repeat the input token.
    "embed_tokens": (0.02, 2048),
}
_NORM = (0.2410, 0.0469)
"""Mean and standard deviation of layer 1's norm weights."""
_LOGIT_STD = 3.0
"""Deviation of the logits, which sets the last norm's weights: a peaked but not one-sided distribution over 262,144."""

_EXPERT = re.compile(r"(model\.layers\.\d+\.mlp\.experts)\.(\d+)\.(?:gate|up|down)_proj\.weight")
_FUSED = re.compile(r"(model\.layers\.\d+\.mlp\.experts)\.(gate_up_proj|down_proj)")


class RandomWeights:
    """`weights(name)` gives the bf16 tensor of that name, freshly made.

    Names are those of the checkpoint (`model.layers.3.mlp.experts.7.up_proj.weight`) and, for all experts of a layer
    at once, those of transformers' modules: `….mlp.experts.gate_up_proj` [experts, 2 * intermediate, hidden] (gate
    rows first) and `….mlp.experts.down_proj` [experts, hidden, intermediate]. All are row-major [out, in].
    Raises KeyError for a name that the model does not have.
    """

    def __init__(self, shape: Shape, seed: int = 0, device: torch.device | str = "cpu") -> None:
        self.shape = shape
        self.seed = seed
        self.device = torch.device(device)
        self._generator = torch.Generator(self.device)
        self._sizes = dict(self._tensors())

    def names(self) -> Iterator[str]:
        """Every tensor of the checkpoint, each expert's on its own, layer after layer."""
        return iter(self._sizes)

    def __call__(self, name: str) -> Tensor:
        if fused := _FUSED.fullmatch(name):
            return self._stack(fused[1], fused[2])
        if name not in self._sizes:
            raise KeyError(f"North Mini Code has no tensor {name!r}")
        out = torch.empty(self._sizes[name], dtype=torch.bfloat16, device=self.device)
        self._fill(out, name)
        return out

    def _stack(self, prefix: str, which: str) -> Tensor:
        s = self.shape
        if f"{prefix}.0.up_proj.weight" not in self._sizes:
            raise KeyError(f"North Mini Code has no tensor {prefix}.{which!r}")
        size = (
            (s.experts, 2 * s.intermediate, s.hidden)
            if which == "gate_up_proj"
            else (s.experts, s.hidden, s.intermediate)
        )
        out = torch.empty(size, dtype=torch.bfloat16, device=self.device)
        for expert in range(s.experts):
            if which == "gate_up_proj":
                self._fill(out[expert, : s.intermediate], f"{prefix}.{expert}.gate_proj.weight")
                self._fill(out[expert, s.intermediate :], f"{prefix}.{expert}.up_proj.weight")
            else:
                self._fill(out[expert], f"{prefix}.{expert}.down_proj.weight")
        return out

    def _fill(self, out: Tensor, name: str) -> None:
        mean, std = self._statistics(name)
        digest = hashlib.sha256(f"{self.seed}:{name}".encode()).digest()
        self._generator.manual_seed(int.from_bytes(digest[:7], "little"))
        out.normal_(mean, std, generator=self._generator)

    def _statistics(self, name: str) -> tuple[float, float]:
        if name == "model.norm.weight":
            embedding, fan_in = _STD["embed_tokens"]
            mean = _LOGIT_STD / (embedding * math.sqrt(fan_in))
            return mean, 0.1 * mean
        kind = name.split(".")[-2]
        if kind == "input_layernorm":
            return _NORM
        std, fan_in = _STD[kind]
        if kind == "down_proj" and (expert := _EXPERT.fullmatch(name)):
            # The real ones lie between 0.0215 and 0.0285, most of them near the upper end, 0.0268 on average.
            std = 0.0285 - 0.007 * (int(expert[2]) / max(1, self.shape.experts - 1)) ** 3
        return 0.0, std * math.sqrt(fan_in / self._sizes[name][-1])

    def _tensors(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        s = self.shape
        queries, keys = s.heads * s.head_dim, s.kv_heads * s.head_dim
        yield "model.embed_tokens.weight", (s.vocab, s.hidden)
        for layer in range(s.layers):
            prefix = f"model.layers.{layer}"
            yield f"{prefix}.input_layernorm.weight", (s.hidden,)
            yield f"{prefix}.self_attn.q_proj.weight", (queries, s.hidden)
            yield f"{prefix}.self_attn.k_proj.weight", (keys, s.hidden)
            yield f"{prefix}.self_attn.v_proj.weight", (keys, s.hidden)
            yield f"{prefix}.self_attn.o_proj.weight", (s.hidden, queries)
            if s.is_dense(layer):
                networks = {f"{prefix}.mlp": s.dense_intermediate}
            else:
                yield f"{prefix}.mlp.gate.weight", (s.experts, s.hidden)
                networks = {f"{prefix}.mlp.experts.{e}": s.intermediate for e in range(s.experts)}
            for network, width in networks.items():
                yield f"{network}.gate_proj.weight", (width, s.hidden)
                yield f"{network}.up_proj.weight", (width, s.hidden)
                yield f"{network}.down_proj.weight", (s.hidden, width)
        yield "model.norm.weight", (s.hidden,)
