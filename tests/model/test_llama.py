"""The forward pass against transformers on the same weights."""

from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from model_files import tensors, write_gguf
from transformers import LlamaConfig as Reference
from transformers import LlamaForCausalLM

from northchat.model import llama
from northchat.model.checkpoint import open_weights
from northchat.model.linear import DENSE_ROWS
from northchat.model.paged_kv import PagedKV, Span
from northchat.model.weights import ModelError

PAGE = 16
LENGTH = 50
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def config(**more: Any) -> Reference:
    return Reference(
        **{
            "vocab_size": 120,
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 512,
            "initializer_range": 0.2,
            "tie_word_embeddings": True,
        }
        | more
    )


def build(path: Path, dtype: torch.dtype = torch.float32, int4: bool = False, keep_dense: bool = False) -> llama.Llama:
    return llama.load(open_weights(path), dtype, int4, keep_dense, lambda share: None)


def logits(model: llama.Llama, ids: torch.Tensor, chunk: int = LENGTH) -> torch.Tensor:
    """Of all positions; pages are out of order on purpose."""
    c = model.config
    count = -(-len(ids) // PAGE)
    kv = PagedKV(c.layers, c.kv_heads, c.head_dim, count, PAGE, model.dtype)
    states = []
    for start in range(0, len(ids), chunk):
        part = ids[start : start + chunk]
        plan = kv.plan([Span(start, len(part), list(range(count))[::-1])])
        states.append(model.hidden(part, [plan], [kv]))
    return model.logits(torch.cat(states))


def ids_of(vocab: int) -> torch.Tensor:
    return torch.randint(vocab, (LENGTH,), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"tie_word_embeddings": False},
        {"attention_bias": True, "mlp_bias": True},
        {"num_key_value_heads": 4, "head_dim": 24},
        {"num_key_value_heads": 1, "rms_norm_eps": 1e-2},
        {"rope_parameters": {"rope_theta": 500.0, "rope_type": "default"}},
        {"rope_parameters": {"rope_theta": 500.0, "rope_type": "linear", "factor": 4.0}},
        {"rope_parameters": {"rope_theta": 500.0} | LLAMA3},
    ],
)
@pytest.mark.parametrize("chunk", [LENGTH, 7, 1])
@torch.inference_mode()
def test_equals_transformers(more: dict[str, Any], chunk: int, tmp_path: Path) -> None:
    torch.manual_seed(0)
    reference = LlamaForCausalLM(config(**more)).eval()
    for name, parameter in reference.named_parameters():
        if "bias" in name or "norm" in name:
            parameter.add_(torch.randn_like(parameter), alpha=0.3)
    reference.save_pretrained(tmp_path)
    ids = ids_of(120)
    expected = reference(ids[None]).logits[0]
    torch.testing.assert_close(logits(build(tmp_path), ids, chunk), expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("kind", [Kind.F32, Kind.F16, Kind.BF16, Kind.Q8_0, Kind.Q4_0, Kind.Q4_1])
@torch.inference_mode()
def test_gguf_equals_transformers_on_what_it_decodes_to(kind: Kind, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf", kind=kind)
    weights = open_weights(path)
    keys = config().to_dict().keys() & weights.config.keys()
    reference = LlamaForCausalLM(config(**{key: weights.config[key] for key in keys})).eval()
    for name, parameter in reference.named_parameters():
        parameter.copy_(weights.load(name, tuple(parameter.shape)))
    ids = ids_of(400)
    expected = reference(ids[None]).logits[0]
    torch.testing.assert_close(logits(build(path), ids), expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("kind", [Kind.Q4_0, Kind.Q4_1, Kind.Q8_0])
@pytest.mark.parametrize("keep_dense", [False, True])
@pytest.mark.parametrize("chunk", [LENGTH, DENSE_ROWS - 1, 1])
@torch.inference_mode()
def test_auto_is_as_near_as_bfloat16_is(kind: Kind, keep_dense: bool, chunk: int, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf", kind=kind)
    ids = ids_of(400)
    expected = logits(build(path), ids)
    model = build(path, torch.bfloat16, True, keep_dense)
    assert model.int4 == (kind != Kind.Q8_0)
    got = logits(model, ids, chunk)
    assert got.dtype == torch.float32
    error = (got - expected).norm() / expected.norm()
    assert error < 0.02


def test_frequency_factors_divide() -> None:
    base = llama.LlamaConfig.from_dict(config().to_dict())
    factors = [1.0, 2.0, 4.0, 8.0, 1.0, 1.0, 1.0, 32.0]
    scaled = llama.LlamaConfig.from_dict(config().to_dict() | {"rope_freq_factors": factors})
    torch.testing.assert_close(scaled.inverse_frequencies() * torch.tensor(factors), base.inverse_frequencies())


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"hidden_size": None}, "hidden_size"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"num_key_value_heads": 3}, "3 KV heads"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 2.0}}, "yarn"),
        ({"rope_parameters": {"rope_type": "linear"}}, "factor"),
    ],
)
def test_a_configuration_that_cannot_be_run_is_named_in_one_line(change: dict[str, Any], named: str) -> None:
    values = {key: value for key, value in (config().to_dict() | change).items() if value is not None}
    with pytest.raises(ModelError, match=named) as error:
        llama.LlamaConfig.from_dict(values)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("fault", ["missing", "shape"])
def test_a_tensor_that_is_missing_or_of_another_shape_is_named(fault: str, tmp_path: Path) -> None:
    values = tensors()
    if fault == "missing":
        del values["blk.1.ffn_down.weight"]
    else:
        values["blk.1.ffn_down.weight"] = values["blk.1.ffn_down.weight"][:-1]
    path = write_gguf(tmp_path / "model.gguf", values=values)
    with pytest.raises(ModelError, match=r"model\.layers\.1\.mlp\.down_proj\.weight") as error:
        build(path)
    assert "\n" not in str(error.value)
