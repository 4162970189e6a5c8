"""Matrix products of a model's layers on the CPU: dense, or on 4-bit blocks of 32 weights.

A 4-bit product reads a quarter of the bytes, which is what a decode step costs; a dense bfloat16 one runs on the matrix
units, which is what prompts cost. A layer may keep both forms and take the faster for the number of rows at hand.
"""

from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F

from northchat.model.weights import Blocks

GROUP = 32
"""Weights that share a scale in Q4_0 and Q4_1."""
DENSE_ROWS = 8
"""From so many rows on the dense form is the faster one."""


class Dense:
    """y = x W^T + b, W [out, in] of the activations' dtype; bfloat16 is laid out anew for the matrix units."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self._bias = bias
        self._packed = weight.dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported()
        # Otherwise oneDNN reorders the matrix in every call, which costs half of a product with few rows.
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight, None) if self._packed else weight

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [rows, in] -> [rows, out]."""
        if self._packed:
            y: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, self._weight, self._bias, "none", [], "")
            return y
        return F.linear(x, self._weight, self._bias)


def fits_int4(blocks: Sequence[Blocks | None]) -> bool:
    """Whether these matrices, stacked, can take the 4-bit form."""
    return (
        all(b is not None and b.type in ("Q4_0", "Q4_1") and b.shape[1] % GROUP == 0 for b in blocks)
        and sum(b.shape[0] for b in blocks if b is not None) % 64 == 0
    )


def unpack(blocks: Blocks) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Q4_0 or Q4_1 blocks as (q, scale, zero): q int32 [out, in] in 0..15, scale and zero float32 [out, in / 32], so
    that the weight is (q - 8) * scale + zero.

    Layouts, from ggml: Q4_0 is fp16 d, 16 bytes; Q4_1 is fp16 d, fp16 m, 16 bytes. The low nibbles are the block's
    first 16 weights, the high ones its last. Q4_0 means d (q - 8), Q4_1 means d q + m.
    """
    out, width = blocks.shape
    head = 4 if blocks.type == "Q4_1" else 2
    raw = np.ascontiguousarray(blocks.rows).reshape(out, width // GROUP, head + GROUP // 2)
    halves = torch.from_numpy(raw[:, :, :head].copy().view(np.float16)).float()
    scale = halves[..., 0]
    zero = halves[..., 1] + 8 * scale if blocks.type == "Q4_1" else torch.zeros_like(scale)
    nibbles = torch.from_numpy(raw[:, :, head:].copy())
    q = torch.cat([nibbles & 15, nibbles >> 4], dim=-1).reshape(out, width)
    return q.int(), scale, zero


class Int4:
    """y = x W^T + b on 4-bit weights in bfloat16, with a dense bfloat16 copy for many rows where memory allows."""

    def __init__(self, blocks: Sequence[Blocks], bias: torch.Tensor | None, keep_dense: bool) -> None:
        """The matrices of `blocks` (see `fits_int4`) are stacked along their output."""
        parts = [unpack(b) for b in blocks]
        q, scale, zero = (torch.cat(p) for p in zip(*parts, strict=True))
        self._packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(q, 1)
        # The operator wants [in / 32, out, 2].
        self._scales = torch.stack([scale, zero], dim=-1).transpose(0, 1).contiguous().bfloat16()
        self._bias = bias
        self._dense: Dense | None = None
        if keep_dense:
            weight = (q - 8).view(*scale.shape, GROUP) * scale[..., None] + zero[..., None]
            self._dense = Dense(weight.view(q.shape).bfloat16(), bias)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x bfloat16 [rows, in], contiguous -> bfloat16 [rows, out]."""
        if self._dense is not None and x.shape[0] >= DENSE_ROWS:
            return self._dense(x)
        y: torch.Tensor = torch.ops.aten._weight_int4pack_mm_for_cpu(x, self._packed, GROUP, self._scales)
        return y if self._bias is None else y.add_(self._bias)


Linear = Dense | Int4
