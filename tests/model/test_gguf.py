from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from gguf import quants
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from model_files import HEAD_DIM, HEADS, HIDDEN, KV_HEADS, LAYERS, WIDTH, header, tensors, write_gguf
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from northchat.model.checkpoint import open_weights
from northchat.model.gguf import GGUFFile
from northchat.model.weights import ModelError

SHAPES = {
    "self_attn.q_proj": (HEADS * HEAD_DIM, HIDDEN),
    "self_attn.k_proj": (KV_HEADS * HEAD_DIM, HIDDEN),
    "self_attn.v_proj": (KV_HEADS * HEAD_DIM, HIDDEN),
    "self_attn.o_proj": (HIDDEN, HEADS * HEAD_DIM),
    "mlp.gate_proj": (WIDTH, HIDDEN),
    "mlp.up_proj": (WIDTH, HIDDEN),
    "mlp.down_proj": (HIDDEN, WIDTH),
    "input_layernorm": (HIDDEN,),
    "post_attention_layernorm": (HIDDEN,),
}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf")


def test_tensors_and_config_are_what_transformers_reads(tiny: Path) -> None:
    ours = open_weights(tiny)
    config = LlamaConfig(**load_gguf_checkpoint(tiny)["config"])
    expected = load_gguf_checkpoint(tiny, return_tensors=True, model_to_load=LlamaForCausalLM(config))["tensors"]
    for layer in range(LAYERS):
        for part, shape in SHAPES.items():
            name = f"model.layers.{layer}.{part}.weight"
            assert torch.equal(ours.load(name, shape).float(), expected[name]), name
    for name in ("model.embed_tokens.weight", "model.norm.weight"):
        assert torch.equal(ours.load(name, expected[name].shape).float(), expected[name])
    for key in (
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "vocab_size",
        "max_position_embeddings",
        "tie_word_embeddings",
        "bos_token_id",
        "eos_token_id",
    ):
        assert ours.config[key] == getattr(config, key), key
    assert ours.config["rms_norm_eps"] == 1e-5
    assert ours.config["rope_theta"] == 10000.0


def test_blocks_are_the_loaded_tensor_in_the_same_order_of_rows(tiny: Path) -> None:
    weights = open_weights(tiny)
    for part in ("self_attn.q_proj", "self_attn.k_proj", "mlp.down_proj"):
        name = f"model.layers.1.{part}.weight"
        blocks = weights.blocks(name, SHAPES[part])
        assert blocks is not None
        assert (blocks.type, blocks.shape) == ("Q4_1", SHAPES[part])
        assert blocks.rows.shape == (SHAPES[part][0], SHAPES[part][1] // 32 * 20)
        decoded = quants.dequantize(blocks.rows, Kind.Q4_1)
        assert np.array_equal(decoded, weights.load(name, SHAPES[part]).numpy())
    assert weights.blocks("model.norm.weight", (HIDDEN,)) is None


QUANTISED = [kind for kind in Kind if kind in quants._type_traits]


@pytest.mark.parametrize("kind", [Kind.F32, Kind.F16, *QUANTISED], ids=lambda kind: kind.name)
def test_every_type_that_gguf_decodes_loads(kind: Kind, tmp_path: Path) -> None:
    block, size = gguf.GGML_QUANT_SIZES[kind]
    columns = max(block, 64)
    # Random bytes are valid blocks of any type; scales may decode to NaN, which must compare equal too.
    raw = np.random.default_rng(1).integers(0, 255, (4, columns // block * size), dtype=np.uint8)
    writer = gguf.GGUFWriter(tmp_path / "one.gguf", "llama")
    for key, value in header().items():
        writer.add_float32(key, value) if isinstance(value, float) else writer.add_uint32(key, value)
    writer.add_tensor("token_embd.weight", raw, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    weights = open_weights(tmp_path / "one.gguf")
    with np.errstate(all="ignore"):
        expected = quants.dequantize(raw, kind)
        loaded = weights.load("model.embed_tokens.weight", (4, columns)).float().numpy()
    assert np.array_equal(loaded, expected.reshape(4, columns), equal_nan=True)


def test_the_file_does_not_change_when_its_loaded_tensors_do(tiny: Path) -> None:
    before = tiny.read_bytes()
    weights = open_weights(tiny)
    weights.load("model.norm.weight", (HIDDEN,)).zero_()
    blocks = weights.blocks("model.layers.0.mlp.up_proj.weight", (WIDTH, HIDDEN))
    assert blocks is not None
    blocks.rows[:] = 0
    assert tiny.read_bytes() == before


def test_frequency_factors_of_llama_3_are_told(tmp_path: Path) -> None:
    factors = np.linspace(1, 8, HEAD_DIM // 2, dtype=np.float32)
    path = write_gguf(tmp_path / "a.gguf", values=tensors() | {"rope_freqs.weight": factors})
    assert open_weights(path).config["rope_freq_factors"] == factors.tolist()


def test_a_separate_output_matrix_and_several_ends_are_told(tmp_path: Path) -> None:
    values = tensors() | {"output.weight": tensors()["token_embd.weight"] * 2}
    config = open_weights(write_gguf(tmp_path / "a.gguf", {"tokenizer.ggml.eot_token_id": 0}, values=values)).config
    assert config["tie_word_embeddings"] is False
    assert config["eos_token_id"] == [2, 0]


@pytest.mark.parametrize(
    ("fields", "architecture", "words"),
    [
        ({}, "mamba", ["mamba", "supported: llama"]),
        ({"llama.expert_count": 8}, "llama", ["mixture of experts"]),
        ({"llama.block_count": None}, "llama", ["no llama.block_count"]),
        ({"llama.block_count": "two"}, "llama", ["senseless llama.block_count"]),
        ({"llama.attention.head_count": 0}, "llama", ["0 heads"]),
        ({"llama.attention.head_count_kv": [2, 1]}, "llama", ["layers that differ in attention.head_count_kv"]),
        ({"llama.rope.dimension_count": 32}, "llama", ["rotates a part"]),
        ({"llama.rope.scaling.type": "yarn"}, "llama", ["yarn"]),
    ],
)
def test_models_that_we_cannot_run_are_refused_by_name(
    fields: dict[str, object], architecture: str, words: list[str], tmp_path: Path
) -> None:
    path = write_gguf(tmp_path / "a.gguf", fields, architecture=architecture, values=tensors())
    with pytest.raises(ModelError) as refused:
        open_weights(path)
    assert str(path) in str(refused.value)
    assert all(word in str(refused.value) for word in words)


def test_missing_and_misshapen_tensors_are_named(tiny: Path) -> None:
    weights = open_weights(tiny)
    with pytest.raises(ModelError, match=r"no tensor model\.layers\.9\.mlp\.up_proj\.weight"):
        weights.load("model.layers.9.mlp.up_proj.weight", (WIDTH, HIDDEN))
    with pytest.raises(ModelError, match=rf"model\.norm\.weight in .*{tiny.name} has shape \[256\].*\[257\]"):
        weights.load("model.norm.weight", (257,))


def test_files_that_are_no_gguf_are_refused(tmp_path: Path) -> None:
    for content, word in ((b"", "empty"), (b"GGU", "cut off"), (b"PK\3\4" * 99, "not a GGUF file")):
        (tmp_path / "x.gguf").write_bytes(content)
        with pytest.raises(ModelError, match=word):
            open_weights(tmp_path / "x.gguf")
    with pytest.raises(ModelError, match="No such file"):
        open_weights(tmp_path / "nowhere.gguf")
    (tmp_path / "x.gguf").write_bytes(b"GGUF\1\0\0\0" + bytes(64))
    with pytest.raises(ModelError, match="GGUF version 1;"):
        open_weights(tmp_path / "x.gguf")


def refused(path: Path) -> bool:
    """Whether opening and loading ends in a ModelError; any other exception goes through."""
    try:
        weights = GGUFFile(path)
        for part, shape in SHAPES.items():
            weights.load(f"model.layers.0.{part}.weight", shape)
    except ModelError:
        return True
    return False


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(cut=st.floats(0, 1, exclude_max=True))
def test_a_truncated_file_is_refused_wherever_it_is_cut(cut: float, tiny: Path, tmp_path: Path) -> None:
    content = tiny.read_bytes()
    path = tmp_path / "cut.gguf"
    path.write_bytes(content[: int(cut * len(content))])
    assert refused(path)


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_damaged_header_is_refused_or_harmless(data: st.DataObject, tiny: Path, tmp_path: Path) -> None:
    content = bytearray(tiny.read_bytes())
    size = len(content) - sum(tensor.nbytes for tensor in tensors().values()) // 8
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, min(size, 1200) - 1))] = data.draw(st.integers(0, 255))
    path = tmp_path / "damaged.gguf"
    path.write_bytes(content)
    refused(path)
