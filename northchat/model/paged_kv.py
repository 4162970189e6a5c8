"""Keys and values of a group of layers in pages, on the CPU, and attention over them."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F


class Span(NamedTuple):
    """Consecutive tokens of one request within a forward pass."""

    start: int
    """Position of the first."""
    length: int
    pages: Sequence[int]
    """Physical page of each logical page up to the last token's."""


class _Reach(NamedTuple):
    """What the queries of a span see."""

    first: int
    """Index of its first token in the pass."""
    length: int
    total: int
    """Keys: all before the span and its own."""
    run: int | None
    """First physical page where the request's pages follow each other, so that a view will do."""
    pages: torch.Tensor | None
    """Otherwise the pages to gather, int64."""
    mask: torch.Tensor | None
    """bool [length, total] for a chunk that doesn't start its request."""


class Plan(NamedTuple):
    """Where the tokens of one forward pass stand; the same for all layers."""

    positions: torch.Tensor
    """int64 [tokens]"""
    slots: torch.Tensor
    """int64 [tokens]: where each token's key goes, page * page size + offset."""
    slot: int
    """The same where there is one token."""
    reaches: list[_Reach]


class PagedKV:
    """A pool [layer, K or V, head, page, token, head_dim].

    A head's pages follow each other in memory, so a request whose pages do so too is attended without a copy.
    The pool isn't cleared: memory becomes resident as pages are first used, and nothing reads a slot that wasn't written.
    """

    def __init__(self, layers: int, heads: int, head_dim: int, pages: int, page: int, dtype: torch.dtype) -> None:
        """pages: how many; page: tokens in one."""
        self.heads, self.head_dim, self.page = heads, head_dim, page
        pool = torch.empty((layers, 2, heads, pages, page, head_dim), dtype=dtype)
        self._slots = [layer.view(2, heads, pages * page, head_dim) for layer in pool]
        self._pages = [layer.view(2, heads, pages, page * head_dim) for layer in pool]

    def plan(self, spans: Sequence[Span]) -> Plan:
        positions: list[torch.Tensor] = []
        slots: list[torch.Tensor] = []
        reaches = []
        first, page = 0, self.page
        for start, length, pages in spans:
            total = start + length
            where = torch.arange(start, total)
            count = -(-total // page)
            table = torch.tensor(pages[:count])
            positions.append(where)
            slots.append(table[where // page] * page + where % page)
            contiguous = count == 1 or bool((table.diff() == 1).all())
            mask = None
            if length > 1 and start:
                mask = torch.ones(length, total, dtype=torch.bool).tril_(start)
            reaches.append(
                _Reach(first, length, total, int(table[0]) if contiguous else None, None if contiguous else table, mask)
            )
            first += length
        slot = torch.cat(slots)
        return Plan(torch.cat(positions), slot, int(slot[0]), reaches)

    def write(self, layer: int, kv: torch.Tensor, plan: Plan) -> None:
        """kv [tokens, 2, heads, head_dim], cast to the pool's dtype."""
        slots = self._slots[layer]
        if kv.shape[0] == 1:
            slots[:, :, plan.slot].copy_(kv[0])
        else:
            slots.index_copy_(2, plan.slots, kv.permute(1, 2, 0, 3).to(slots.dtype))

    def attend(self, layer: int, q: torch.Tensor, plan: Plan) -> torch.Tensor:
        """Causal softmax(q K^T / sqrt(head_dim)) V. q [tokens, query heads, head_dim] of the pool's dtype; query head h
        reads KV head h // (query heads / heads). Returns [tokens, query heads * head_dim].
        """
        outputs = [self._attend(layer, q[r.first : r.first + r.length], r) for r in plan.reaches]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    def _attend(self, layer: int, q: torch.Tensor, reach: _Reach) -> torch.Tensor:
        heads, dim = self.heads, self.head_dim
        if reach.run is not None:
            at = reach.run * self.page
            kv = self._slots[layer][:, :, at : at + reach.total]
        else:
            gathered = self._pages[layer].index_select(2, reach.pages)
            kv = gathered.view(2, heads, -1, dim)[:, :, : reach.total]
        keys, values = kv.unsqueeze(2).unbind(0)
        if reach.length == 1:
            # A group's query heads see the same keys: they are the rows of one product.
            grouped = q.view(heads, 1, -1, dim)
            return F.scaled_dot_product_attention(grouped, keys, values).reshape(1, -1)
        grouped = q.reshape(reach.length, heads, -1, dim).permute(1, 2, 0, 3)
        repeated = (-1, grouped.shape[1], -1, -1)
        out = F.scaled_dot_product_attention(
            grouped, keys.expand(repeated), values.expand(repeated), attn_mask=reach.mask, is_causal=reach.mask is None
        )
        return out.permute(2, 0, 1, 3).reshape(reach.length, -1)
