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
    """Physical page of each logical page up to the last token's; those before the window aren't looked at."""


class Reach(NamedTuple):
    """What the queries of a span see."""

    first: int
    """Index of its first token in the pass."""
    length: int
    total: int
    """Keys: its own and those before it, from the first that is in any query's window."""
    offset: int
    """Of the first key within the first page."""
    run: int
    """First physical page. Where the request's pages follow each other, a view from here will do."""
    pages: torch.Tensor | None
    """Otherwise the pages to gather, int64."""
    mask: torch.Tensor | None
    """bool [length, total]; None where queries see what is causal (a prompt's start) or everything (a single one)."""


class Plan(NamedTuple):
    """Where the tokens of one forward pass stand; the same for all layers."""

    positions: torch.Tensor
    """int64 [tokens]"""
    slots: torch.Tensor
    """int64 [tokens]: where each token's key goes, page * page size + offset."""
    slot: int
    """The same where there is one token."""
    reaches: list[Reach]


class PagedKV:
    """A pool [layer, K or V, head, page, token, head_dim].

    A head's pages follow each other in memory, so a request whose pages do so too is attended without a copy.
    The pool isn't cleared: memory becomes resident as pages are first used, and no slot is read before it is written.
    """

    def __init__(
        self,
        layers: int,
        heads: int,
        head_dim: int,
        pages: int,
        page: int,
        dtype: torch.dtype,
        window: int | None = None,
    ) -> None:
        """pages: how many; page: tokens in one; window: keys that a query sees, itself included (None: all)."""
        self.heads, self.head_dim, self.page, self.window = heads, head_dim, page, window
        pool = torch.empty((layers, 2, heads, pages, page, head_dim), dtype=dtype)
        self._slots: list[torch.Tensor] = [layer.view(2, heads, pages * page, head_dim) for layer in pool]
        self._pages: list[torch.Tensor] = [layer.view(2, heads, pages, page * head_dim) for layer in pool]

    def plan(self, spans: Sequence[Span]) -> Plan:
        positions: list[torch.Tensor] = []
        slots: list[torch.Tensor] = []
        reaches = []
        first, page = 0, self.page
        for start, length, pages in spans:
            end = start + length
            where = torch.arange(start, end)
            count = -(-end // page)
            oldest = max(0, start + 1 - self.window) if self.window else 0
            low = oldest // page
            table = torch.tensor(pages[:count])
            positions.append(where)
            slots.append(table[where // page] * page + where % page)
            table = table[low:]
            contiguous = len(table) == 1 or bool((table.diff() == 1).all())
            mask = None
            if length > 1 and (start or (self.window and length > self.window)):
                mask = torch.ones(length, end - oldest, dtype=torch.bool).tril_(start - oldest)
                if self.window:
                    mask.triu_(start - oldest + 1 - self.window)
            gathered = None if contiguous else table
            reaches.append(Reach(first, length, end - oldest, oldest - low * page, int(table[0]), gathered, mask))
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

    def read(self, layer: int, reach: Reach) -> torch.Tensor:
        """Keys and values that a span sees: [2, heads, reach.total, head_dim]."""
        if reach.pages is not None:
            kv = self._pages[layer].index_select(2, reach.pages).view(2, self.heads, -1, self.head_dim)
            at = reach.offset
        else:
            kv, at = self._slots[layer], reach.run * self.page + reach.offset
        return kv[:, :, at : at + reach.total]

    def attend(self, layer: int, q: torch.Tensor, plan: Plan) -> torch.Tensor:
        """Causal softmax(q K^T / sqrt(head_dim)) V. q [tokens, query heads, head_dim] of the pool's dtype; query head h
        reads KV head h // (query heads / heads). Returns [tokens, query heads * head_dim].
        """
        outputs = [self._attend(layer, q[r.first : r.first + r.length], r) for r in plan.reaches]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    def _attend(self, layer: int, q: torch.Tensor, reach: Reach) -> torch.Tensor:
        heads, dim = self.heads, self.head_dim
        keys, values = self.read(layer, reach).unsqueeze(2).unbind(0)
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
