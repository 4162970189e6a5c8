"""A tiny random checkpoint of North Mini Code's family, as transformers writes it."""

from pathlib import Path
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")

PAGE = 4
WINDOW = 8
SIZES = {
    "num_hidden_layers": 9,
    "hidden_size": 64,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "intermediate_size": 32,
    "prefix_dense_intermediate_size": 48,
    "vocab_size": 160,
    "max_position_embeddings": 4096,
    "sliding_window": WINDOW,
}
NORTH = {
    "first_k_dense_replace": 1,
    "num_shared_experts": 0,
    "expert_selection_fn": "sigmoid",
    "norm_topk_prob": False,
    "rms_norm_eps": 1e-6,
    "rope_theta": 50000.0,
    "logit_scale": 1.0,
    "bos_token_id": 2,
    "eos_token_id": 3,
}
# Deviations that give every part of a layer a say in the result; the norms are far from one, as the real ones are.
STD = {"q_proj": 0.4, "k_proj": 0.4, "v_proj": 0.3, "o_proj": 0.2, "gate": 0.5, "embed_tokens": 0.1}


def write_checkpoint(path: Path, **changes: Any) -> None:
    config = transformers.Cohere2MoeConfig(**(SIZES | NORTH | changes))
    model = transformers.Cohere2MoeForCausalLM(config)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("norm.weight"):
                weight.normal_(2.0 if name == "model.norm.weight" else 0.24, 0.05, generator=generator)
            else:
                weight.normal_(0.0, STD.get(name.split(".")[-2], 0.3), generator=generator)
    model.bfloat16().save_pretrained(path)
