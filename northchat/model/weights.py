"""What every kind of model file offers: a configuration in Hugging Face's terms and tensors by Hugging Face's names."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

if TYPE_CHECKING:
    import numpy as np
    import torch


class ModelError(Exception):
    """A model can't be had or used; the message is one line that names cause and remedy."""


class Blocks(NamedTuple):
    """A matrix as its file stores it, quantised."""

    type: str
    """ggml's name of the block format: Q4_0, Q4_1, Q8_0, ..."""
    rows: "np.ndarray[Any, np.dtype[np.uint8]]"
    """uint8 [out, bytes of a row's blocks]. May be a view of the file's private mapping."""
    shape: tuple[int, int]
    """(out, in) of the matrix that the blocks encode."""


class Weights(Protocol):
    """Tensors by Hugging Face's names (`model.layers.0.self_attn.q_proj.weight`), matrices [out, in], in Hugging Face's
    layout: rows of q_proj and k_proj are ordered for rotary embedding by halves (i, i + head_dim / 2).
    """

    path: Path
    config: dict[str, Any]
    """Keys of config.json: model_type, vocab_size, hidden_size, intermediate_size, num_hidden_layers,
    num_attention_heads, num_key_value_heads, head_dim, max_position_embeddings, rms_norm_eps, rope_theta, rope_scaling,
    tie_word_embeddings, attention_bias, mlp_bias, bos_token_id, eos_token_id (an id or a list). One key of our own,
    `rope_freq_factors`: None, or head_dim / 2 numbers that the inverse frequencies are divided by."""

    def names(self) -> list[str]: ...

    def blocks(self, name: str, shape: Sequence[int]) -> Blocks | None:
        """The matrix as stored if its type is quantised, else None. Raises ModelError as `load` does."""

    def load(self, name: str, shape: Sequence[int]) -> "torch.Tensor":
        """The tensor in the file's floating-point type; quantised ones as float32. The caller owns the memory.

        Raises ModelError when the tensor is missing, unreadable, or not of the given shape.
        """


def missing(name: str, path: Path) -> ModelError:
    return ModelError(f"{path} has no tensor {name}; the file is incomplete or of another architecture")


def check_shape(name: str, path: Path, expected: Sequence[int], found: Sequence[int]) -> None:
    """Raises ModelError when the shapes differ."""
    if tuple(expected) != tuple(found):
        raise ModelError(
            f"tensor {name} in {path} has shape {list(found)}, but its configuration asks for {list(expected)}"
        )
