"""Hugging Face directories: config.json and *.safetensors, sharded or not, as `Weights`."""

import json
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from northchat.model.weights import Blocks, ModelError, check_shape, missing

if TYPE_CHECKING:
    import torch

MODEL_TYPES = ("cohere2_moe", "llama")
_REQUIRED: dict[str, type | tuple[type, ...]] = {
    "vocab_size": int,
    "hidden_size": int,
    "intermediate_size": int,
    "num_hidden_layers": int,
    "num_attention_heads": int,
    "rms_norm_eps": (int, float),
}
_DTYPES = ("F64", "F32", "F16", "BF16")


class SafetensorsWeights:
    """A model directory as `Weights`; files are mapped and read tensor by tensor.

    Raises ModelError when a file is missing, damaged or truncated, or the model is of a type that we can't run.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = _normalise(read_config(path), path / "config.json")
        self._files = _tensor_files(path)
        self._open: dict[Path, Any] = {}

    def names(self) -> list[str]:
        return list(self._files)

    def blocks(self, name: str, shape: Sequence[int]) -> Blocks | None:
        return None

    def load(self, name: str, shape: Sequence[int]) -> "torch.Tensor":
        from safetensors import SafetensorError, safe_open

        file = self._files.get(name)
        if file is None:
            raise missing(name, self.path)
        try:
            if file not in self._open:
                self._open[file] = safe_open(file, framework="pt")
            view = self._open[file].get_slice(name)
            check_shape(name, file, shape, view.get_shape())
            if view.get_dtype() not in _DTYPES:
                raise ModelError(
                    f"tensor {name} in {file} is stored as {view.get_dtype()}; {', '.join(_DTYPES)} are supported"
                )
            tensor: torch.Tensor = self._open[file].get_tensor(name)
        except (OSError, SafetensorError) as error:
            raise ModelError(
                f"can't read tensor {name} from {file}: {_line(error)}; download the file again"
            ) from error
        return tensor


def read_config(directory: Path) -> dict[str, Any]:
    """config.json as it is. Raises ModelError when it is missing or not a JSON object."""
    return read_json(directory / "config.json")


def read_json(path: Path) -> dict[str, Any]:
    """Raises ModelError when the file is missing, unreadable or not a JSON object."""
    try:
        value = json.loads(path.read_text("utf-8"))
    except OSError as error:
        raise ModelError(f"can't read {path}: {error.strerror}") from error
    except ValueError as error:
        raise ModelError(f"{path} is not valid JSON ({_line(error)}); download it again") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path} is not a JSON object; download it again")
    return value


def _normalise(config: dict[str, Any], path: Path) -> dict[str, Any]:
    """Fill in what Hugging Face leaves out, under the keys that `Weights` names."""
    model_type = config.get("model_type")
    if model_type not in MODEL_TYPES:
        raise ModelError(
            f"{path} is of model type {model_type!r}; of directories these are supported: {', '.join(MODEL_TYPES)}"
        )
    for key, number in _REQUIRED.items():
        if not isinstance(config.get(key), number):
            raise ModelError(f"{path} has {'a senseless' if key in config else 'no'} {key}")
    if "quantization_config" in config:
        raise ModelError(f"{path} is quantised; unquantised safetensors or a GGUF file are supported")
    if config.get("hidden_act", "silu") != "silu":
        raise ModelError(f"{path} has activation {config['hidden_act']!r}; silu is supported")
    heads = config["num_attention_heads"]
    kv_heads = config.get("num_key_value_heads") or heads
    if heads < 1 or heads % kv_heads:
        raise ModelError(f"{path} has {heads} heads and {kv_heads} KV heads, which don't divide")
    # transformers 5 writes rope_parameters, older ones rope_theta and rope_scaling.
    rope = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    theta = rope.pop("rope_theta", None) or config.get("rope_theta") or 10000.0
    kind = rope.setdefault("rope_type", rope.pop("type", "default"))
    if kind not in ("default", "linear", "llama3"):
        raise ModelError(f"{path} scales its rotary embedding by {kind!r}; default, linear and llama3 are supported")
    return config | {
        "num_key_value_heads": kv_heads,
        "head_dim": config.get("head_dim") or config["hidden_size"] // heads,
        "max_position_embeddings": config.get("max_position_embeddings") or 2048,
        "rope_theta": float(theta),
        "rope_scaling": None if kind == "default" else rope,
        "rope_freq_factors": None,
        "tie_word_embeddings": bool(config.get("tie_word_embeddings", model_type == "cohere2_moe")),
        "attention_bias": bool(config.get("attention_bias", False)),
        "mlp_bias": bool(config.get("mlp_bias", False)),
        "bos_token_id": config.get("bos_token_id"),
        "eos_token_id": config.get("eos_token_id"),
    }


def _tensor_files(directory: Path) -> dict[str, Path]:
    """The file of each tensor, from the headers of all files that belong to the model."""
    index = directory / "model.safetensors.index.json"
    if index.exists():
        shards = read_json(index).get("weight_map")
        if not isinstance(shards, dict):
            raise ModelError(f"{index} has no weight_map; download it again")
        names = sorted({str(name) for name in shards.values()})
        if bad := next((name for name in names if Path(name).name != name), None):
            raise ModelError(f"{index} names the file {bad!r} outside its directory")
        files = [directory / name for name in names]
    else:
        files = sorted(directory.glob("*.safetensors"))
        shards = {}
    if not files:
        raise ModelError(f"{directory} has no *.safetensors file; it is no complete model directory")
    found = {name: file for file in files for name in _header(file)}
    if absent := next((name for name in shards if name not in found), None):
        raise ModelError(f"{directory / shards[absent]} lacks tensor {absent}, which {index.name} promises")
    return found


def _header(file: Path) -> list[str]:
    """Names of the tensors in one file; checks that the file has all bytes its header speaks of.

    Read by hand, for a truncated file must be told from a damaged one. Format: 8 bytes of header size, JSON, data.
    """
    try:
        with file.open("rb") as stream:
            size = file.stat().st_size
            start = stream.read(8)
            length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
            if not 0 < length <= size - 8:
                raise ModelError(f"{file} is cut off or not a safetensors file; download it again")
            header = json.loads(stream.read(length))
        header.pop("__metadata__", None)
        need = 8 + length + max((entry["data_offsets"][1] for entry in header.values()), default=0)
    except OSError as error:
        raise ModelError(f"can't read {file}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise ModelError(f"{file} has a damaged header ({_line(error)}); download it again") from error
    if need > size:
        raise ModelError(f"{file} is cut off: it has {size:,} of {need:,} bytes; download it again")
    return list(header)


def _line(error: Exception) -> str:
    return " ".join(str(error).split())
