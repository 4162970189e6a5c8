import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

from northchat.model.checkpoint import open_weights
from northchat.model.weights import ModelError

CONFIG = LlamaConfig(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    rope_parameters={"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0,
                     "high_freq_factor": 4.0, "original_max_position_embeddings": 64},
)  # fmt: skip


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    torch.manual_seed(3)
    return LlamaForCausalLM(CONFIG).to(torch.bfloat16)


@pytest.fixture(scope="module")
def saved(model: LlamaForCausalLM, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("hf")
    model.save_pretrained(path, max_shard_size="20KB")
    return path


@pytest.fixture
def copy(saved: Path, tmp_path: Path) -> Path:
    return shutil.copytree(saved, tmp_path / "model")


def edit(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_shards_give_the_tensors_that_were_saved(model: LlamaForCausalLM, saved: Path) -> None:
    assert len(list(saved.glob("*.safetensors"))) > 1
    weights = open_weights(saved)
    for name, expected in model.state_dict().items():
        loaded = weights.load(name, expected.shape)
        assert loaded.dtype == torch.bfloat16
        assert torch.equal(loaded, expected)
        assert weights.blocks(name, expected.shape) is None
    assert set(weights.names()) == set(model.state_dict())


def test_config_is_filled_in(saved: Path) -> None:
    config = open_weights(saved).config
    assert config["head_dim"] == 8
    assert config["rope_theta"] == 5e5
    assert config["rope_scaling"]["rope_type"] == "llama3"
    assert config["rope_scaling"]["factor"] == 8.0


def test_older_configs_with_rope_theta_and_scaling_beside_each_other_are_read(copy: Path) -> None:
    file = copy / "config.json"
    edit(file, rope_parameters=None, rope_theta=7.0, rope_scaling={"type": "linear", "factor": 2.0})
    config = open_weights(copy).config
    assert (config["rope_theta"], config["rope_scaling"]) == (7.0, {"rope_type": "linear", "factor": 2.0})
    edit(file, rope_scaling=None, num_key_value_heads=None)
    config = open_weights(copy).config
    assert (config["rope_scaling"], config["num_key_value_heads"]) == (None, 4)


def test_one_unsharded_file_is_found(model: LlamaForCausalLM, tmp_path: Path) -> None:
    model.save_pretrained(tmp_path)
    norm = open_weights(tmp_path).load("model.norm.weight", (32,))
    assert torch.equal(norm, model.state_dict()["model.norm.weight"])


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_type": "mamba"}, "'mamba'.* llama"),
        ({"hidden_size": None}, "senseless hidden_size"),
        ({"num_key_value_heads": 3}, "4 heads and 3 KV heads"),
        ({"hidden_act": "gelu"}, "'gelu'"),
        ({"quantization_config": {}}, "quantised"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "'yarn'"),
    ],
)
def test_configs_that_we_cannot_run_are_refused(changes: dict[str, Any], words: str, copy: Path) -> None:
    edit(copy / "config.json", **changes)
    with pytest.raises(ModelError, match=words) as refused:
        open_weights(copy)
    assert str(copy / "config.json") in str(refused.value)


def test_missing_files_are_named(copy: Path) -> None:
    shard = sorted(copy.glob("*.safetensors"))[0]
    shard.rename(copy / "elsewhere")
    with pytest.raises(ModelError, match=rf"can't read .*{shard.name}: No such file"):
        open_weights(copy)
    (copy / "model.safetensors.index.json").unlink()
    for file in copy.glob("*.safetensors"):
        file.unlink()
    with pytest.raises(ModelError, match=r"has no \*\.safetensors file"):
        open_weights(copy)
    (copy / "config.json").write_text("{")
    with pytest.raises(ModelError, match=r"config\.json is not valid JSON"):
        open_weights(copy)
    (copy / "config.json").unlink()
    with pytest.raises(ModelError, match=r"can't read .*config\.json: No such file"):
        open_weights(copy)


def test_truncated_and_damaged_files_are_named_before_anything_is_loaded(copy: Path) -> None:
    shard = sorted(copy.glob("*.safetensors"))[0]
    content = shard.read_bytes()
    for damaged, words in (
        (content[:-1], r"cut off: it has [\d,]+ of [\d,]+ bytes"),
        (content[:50], "cut off"),
        (b"", "cut off"),
        (content[:8] + b"x" * (len(content) - 8), "damaged header"),
    ):
        shard.write_bytes(damaged)
        with pytest.raises(ModelError, match=rf"{shard.name} .*{words}") as refused:
            open_weights(copy)
        assert "\n" not in str(refused.value)


def test_missing_misshapen_and_mistyped_tensors_are_named_with_their_file(copy: Path, tmp_path: Path) -> None:
    weights = open_weights(copy)
    with pytest.raises(ModelError, match=r"no tensor model\.layers\.2\.mlp\.up_proj\.weight"):
        weights.load("model.layers.2.mlp.up_proj.weight", (48, 32))
    with pytest.raises(ModelError, match=r"model\.norm\.weight in .*\.safetensors has shape \[32\].* \[33\]"):
        weights.load("model.norm.weight", (33,))
    (tmp_path / "typed").mkdir()
    shutil.copy(copy / "config.json", tmp_path / "typed")
    save_file({"model.norm.weight": torch.zeros(32, dtype=torch.int8)}, tmp_path / "typed" / "model.safetensors")
    with pytest.raises(ModelError, match=r"model\.norm\.weight .* stored as I8"):
        open_weights(tmp_path / "typed").load("model.norm.weight", (32,))


def test_an_index_that_promises_too_much_or_points_elsewhere_is_refused(copy: Path) -> None:
    index = copy / "model.safetensors.index.json"
    shards = json.loads(index.read_text())["weight_map"]
    edit(index, weight_map=shards | {"model.extra.weight": next(iter(shards.values()))})
    with pytest.raises(ModelError, match=r"lacks tensor model\.extra\.weight"):
        open_weights(copy)
    edit(index, weight_map={"a": "../../secret.safetensors"})
    with pytest.raises(ModelError, match="outside its directory"):
        open_weights(copy)
