"""GGUF files of the llama family: header, tensors and what the tokenizer needs, from one private mapping of the file.

The header is read by hand, for `gguf.GGUFReader` takes seconds and an array per string of the vocabulary; block formats
and their decoding are the `gguf` package's. The format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

import math
import mmap
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from northchat.model.weights import Blocks, ModelError, check_shape, missing

if TYPE_CHECKING:
    import numpy as np
    import torch

MAGIC = b"GGUF"
ARCHITECTURES = ("llama",)
_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_STRING, _ARRAY = 8, 9
_FLOATS = {0: "float32", 1: "float16", 30: "bfloat16", 28: "float64"}

_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


class _Tensor(NamedTuple):
    type: int
    shape: tuple[int, ...]
    """Rows first, as torch has it; the file has it the other way round."""
    offset: int
    """From the start of the file, bytes."""
    size: int
    """Bytes."""


class _Damaged(Exception):
    pass


class _Header:
    """A cursor over the mapped file that never reads past its end."""

    def __init__(self, data: mmap.mmap) -> None:
        self.data = data
        self.at = 0

    def take(self, size: int) -> int:
        """Skip that many bytes; returns where they start."""
        start, self.at = self.at, self.at + size
        if self.at > len(self.data):
            raise _Damaged(f"is cut off within its header (at {len(self.data)} bytes)")
        return start

    def scalar(self, code: str) -> Any:
        return struct.unpack_from(code, self.data, self.take(struct.calcsize(code)))[0]

    def string(self) -> str:
        size = self.scalar("<Q")
        start = self.take(size)
        return self.data[start : start + size].decode("utf-8", "replace")

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            item, count = self.scalar("<I"), self.scalar("<Q")
            if count > len(self.data):
                raise _Damaged(f"claims an array of {count} items in its header")
            if item in _SCALARS:
                code = f"<{count}{_SCALARS[item][1]}"
                return list(struct.unpack_from(code, self.data, self.take(count * struct.calcsize(_SCALARS[item]))))
            return [self.value(item) for _ in range(count)]
        if kind not in _SCALARS:
            raise _Damaged(f"has a header field of unknown type {kind}")
        return self.scalar(_SCALARS[kind])


class GGUFFile:
    """A GGUF file as `Weights`.

    Rows of q_proj and k_proj, which GGUF's llama permutes for rotary embedding by neighbours, come back in Hugging
    Face's order, as blocks too.

    Raises ModelError when the file is missing, damaged, truncated, or of an architecture that we can't run.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                # Private and writable: torch wants writable memory, the file stays as it is.
                self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else "the file is empty"
            raise ModelError(f"can't read {path}: {reason}") from error
        try:
            self.header, infos = self._read()
            self._tensors = self._locate(infos)
        except _Damaged as error:
            raise ModelError(f"{path} {error}; download it again") from None
        self.config = self._config()

    def _read(self) -> tuple[dict[str, Any], list[tuple[str, int, tuple[int, ...], int]]]:
        cursor = _Header(self._data)
        if self._data[cursor.take(4) : 4] != MAGIC:
            raise ModelError(f"{self.path} is not a GGUF file (it doesn't start with {MAGIC.decode()})")
        version = cursor.scalar("<I")
        if version not in (2, 3):
            raise ModelError(
                f"{self.path} is GGUF version {version if version < 1 << 16 else 'big-endian'}; "
                "versions 2 and 3, little-endian, are supported: convert the model anew"
            )
        tensors, fields = cursor.scalar("<Q"), cursor.scalar("<Q")
        header = {}
        for _ in range(fields):
            key = cursor.string()
            header[key] = cursor.value(cursor.scalar("<I"))
        infos = []
        for _ in range(tensors):
            name, dims = cursor.string(), cursor.scalar("<I")
            if dims > 4:
                raise _Damaged(f"has a tensor of {dims} dimensions")
            shape = tuple(reversed([cursor.scalar("<Q") for _ in range(dims)]))
            infos.append((name, cursor.scalar("<I"), shape, cursor.scalar("<Q")))
        alignment = header.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment <= 0:
            raise _Damaged(f"has alignment {alignment}")
        self._start = -(-cursor.at // alignment) * alignment
        return header, infos

    def _locate(self, infos: list[tuple[str, int, tuple[int, ...], int]]) -> dict[str, _Tensor]:
        from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

        found: dict[str, _Tensor] = {}
        need = self._start
        for name, kind, shape, offset in infos:
            try:
                block, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(kind)]
            except (ValueError, KeyError):
                raise _Damaged(f"stores tensor {name} in a format that is unknown here (number {kind})") from None
            if not shape or shape[-1] % block:
                raise _Damaged(f"has tensor {name} of shape {list(shape)}, not whole blocks of {block}")
            size = math.prod(shape) // block * block_bytes
            found[_name(name)] = _Tensor(kind, shape, self._start + offset, size)
            need = max(need, self._start + offset + size)
        if need > len(self._data):
            raise _Damaged(f"is cut off: it has {len(self._data):,} of {need:,} bytes")
        return found

    def _config(self) -> dict[str, Any]:
        header, path = self.header, self.path
        architecture = header.get("general.architecture")
        if architecture not in ARCHITECTURES:
            raise ModelError(
                f"{path} holds a model of architecture {architecture!r}; "
                f"of GGUF files these architectures are supported: {', '.join(ARCHITECTURES)}"
            )

        def get(key: str, kind: type, default: Any = None) -> Any:
            value = header.get(f"{architecture}.{key}", default)
            if isinstance(value, list):  # one number per layer
                if len(set(value)) != 1:
                    raise ModelError(f"{path} has layers that differ in {key}; such models are not supported")
                value = value[0]
            if not isinstance(value, kind):
                what = "no" if value is None else "a senseless"
                raise ModelError(f"{path} has {what} {architecture}.{key} in its header; convert the model anew")
            return value

        if get("expert_count", int, 0):
            raise ModelError(f"{path} is a mixture of experts; GGUF files of dense llama models are supported")
        embedding = self._tensors.get("model.embed_tokens.weight")
        if embedding is None:
            raise missing("token_embd.weight", path)
        heads = get("attention.head_count", int)
        kv_heads = get("attention.head_count_kv", int, heads)
        hidden = get("embedding_length", int)
        if min(heads, kv_heads, hidden) < 1 or heads % kv_heads:
            raise ModelError(f"{path} has {heads} heads and {kv_heads} KV heads on {hidden} dimensions; it is damaged")
        head_dim = get("attention.key_length", int, hidden // heads)
        if head_dim % 2 or get("rope.dimension_count", int, head_dim) != head_dim:
            raise ModelError(f"{path} rotates a part of its {head_dim}-wide heads; such models are not supported")
        scaling, factors = get("rope.scaling.type", str, "none"), self._tensors.get("rope_freqs.weight")
        if scaling not in ("none", "linear"):
            raise ModelError(f"{path} scales its rotary embedding by {scaling!r}; none and linear are supported")
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_act": "silu",
            "vocab_size": embedding.shape[0],
            "hidden_size": hidden,
            "intermediate_size": get("feed_forward_length", int),
            "num_hidden_layers": get("block_count", int),
            "num_attention_heads": heads,
            "num_key_value_heads": kv_heads,
            "head_dim": head_dim,
            "max_position_embeddings": get("context_length", int),
            "rms_norm_eps": _shortest(get("attention.layer_norm_rms_epsilon", float)),
            "rope_theta": _shortest(get("rope.freq_base", float, 10000.0)),
            "rope_scaling": {"rope_type": "linear", "factor": get("rope.scaling.factor", float)}
            if scaling == "linear"
            else None,
            "rope_freq_factors": self._array(factors).tolist() if factors else None,
            "tie_word_embeddings": "lm_head.weight" not in self._tensors,
            "attention_bias": "model.layers.0.self_attn.q_proj.bias" in self._tensors,
            "mlp_bias": "model.layers.0.mlp.gate_proj.bias" in self._tensors,
            "bos_token_id": header.get("tokenizer.ggml.bos_token_id"),
            "eos_token_id": self._ends(),
            "add_bos_token": header.get("tokenizer.ggml.add_bos_token", header.get("tokenizer.ggml.model") == "llama"),
        }

    def _ends(self) -> int | list[int] | None:
        keys = ("eos_token_id", "eot_token_id", "eom_token_id")
        ids = dict.fromkeys(self.header[key] for k in keys if (key := f"tokenizer.ggml.{k}") in self.header)
        return next(iter(ids)) if len(ids) == 1 else list(ids) or None

    @property
    def chat_template(self) -> str | None:
        value = self.header.get("tokenizer.chat_template")
        return value if isinstance(value, str) else None

    def names(self) -> list[str]:
        return list(self._tensors)

    def blocks(self, name: str, shape: Sequence[int]) -> Blocks | None:
        tensor = self._find(name, shape)
        if tensor.type in _FLOATS or len(tensor.shape) != 2:
            return None
        from gguf.constants import GGMLQuantizationType

        return Blocks(GGMLQuantizationType(tensor.type).name, self._rows(name, tensor), (shape[0], shape[1]))

    def load(self, name: str, shape: Sequence[int]) -> "torch.Tensor":
        import torch

        tensor = self._find(name, shape)
        if tensor.type in _FLOATS:
            raw = torch.from_numpy(self._rows(name, tensor)).view(getattr(torch, _FLOATS[tensor.type]))
            return raw.reshape(tensor.shape).clone()
        return torch.from_numpy(self._decode(self._rows(name, tensor), tensor, name)).reshape(tensor.shape)

    def _find(self, name: str, shape: Sequence[int]) -> _Tensor:
        tensor = self._tensors.get(name)
        if tensor is None:
            raise missing(name, self.path)
        check_shape(name, self.path, shape, tensor.shape)
        return tensor

    def _rows(self, name: str, tensor: _Tensor) -> "np.ndarray[Any, np.dtype[np.uint8]]":
        """The stored bytes, uint8 [rows, bytes per row], in Hugging Face's order of rows."""
        import numpy as np

        rows = np.frombuffer(self._data, np.uint8, tensor.size, tensor.offset)
        rows = rows.reshape(tensor.shape[0] if len(tensor.shape) > 1 else 1, -1)
        heads = {"q_proj": self.config["num_attention_heads"], "k_proj": self.config["num_key_value_heads"]}
        count = heads.get(name.split(".")[-2]) if name.count(".") > 1 else None
        if count is None:
            return rows
        if len(tensor.shape) == 1:  # a bias
            rows = rows.reshape(tensor.shape[0], -1)
        # Within a head the file has pairs (0, d/2), (1, d/2 + 1), ... side by side.
        return np.ascontiguousarray(rows.reshape(count, -1, 2, rows.shape[1]).swapaxes(1, 2)).reshape(rows.shape)

    def _array(self, tensor: _Tensor) -> "np.ndarray[Any, Any]":
        import numpy as np

        raw = np.frombuffer(self._data, np.uint8, tensor.size, tensor.offset)
        return self._decode(raw, tensor, "rope_freqs.weight")

    def _decode(self, raw: "np.ndarray[Any, Any]", tensor: _Tensor, name: str) -> "np.ndarray[Any, Any]":
        from gguf import quants
        from gguf.constants import GGMLQuantizationType

        kind = GGMLQuantizationType(tensor.type)
        try:
            decoded: np.ndarray[Any, Any] = quants.dequantize(raw, kind)
        except NotImplementedError:
            raise ModelError(f"tensor {name} in {self.path} is stored as {kind.name}, which can't be decoded") from None
        return decoded


def _name(name: str) -> str:
    """Hugging Face's name of a GGUF tensor; unknown ones keep their own."""
    stem, _, suffix = name.rpartition(".")
    if stem in _NAMES:
        return f"{_NAMES[stem]}.{suffix}"
    block, _, rest = stem.partition(".")
    layer, _, part = rest.partition(".")
    if block == "blk" and part in _LAYER_NAMES:
        return f"model.layers.{layer}.{_LAYER_NAMES[part]}.{suffix}"
    return name


def _shortest(value: float) -> float:
    """The decimal that a float32 was written as: 1e-05, not 9.999999747378752e-06."""
    return float(f"{value:.7g}")
