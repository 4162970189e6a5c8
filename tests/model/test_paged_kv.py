"""Attention over pages against attention over the whole sequence."""

import random

import pytest
import torch
import torch.nn.functional as F

from northchat.model.paged_kv import PagedKV, Span

PAGE = 4
PAGES = 40


@pytest.mark.parametrize("scattered", [False, True], ids=["pages in a row", "pages anywhere"])
@pytest.mark.parametrize("window", [None, 1, 3, 4, 8, 100])
def test_chunks_attend_as_the_whole_does(window: int | None, scattered: bool) -> None:
    for trial in range(20):
        chance = random.Random(trial)
        generator = torch.Generator().manual_seed(trial)
        length = chance.randint(1, 50)
        q, k, v = (torch.randn(length, heads, 8, generator=generator) for heads in (4, 2, 2))
        distance = torch.arange(length)[:, None] - torch.arange(length)
        seen = (distance >= 0) & (distance < (window or length))
        whole = F.scaled_dot_product_attention(
            q.transpose(0, 1),
            k.transpose(0, 1).repeat_interleave(2, 0),
            v.transpose(0, 1).repeat_interleave(2, 0),
            attn_mask=seen,
        ).transpose(0, 1)

        kv = PagedKV(1, 2, 8, PAGES, PAGE, torch.float32, window)
        count = -(-length // PAGE)
        pages = chance.sample(range(PAGES), count) if scattered else list(range(3, 3 + count))
        start = 0
        while start < length:
            size = min(length - start, chance.randint(1, 12))
            gone = max(0, start + 1 - window) // PAGE if window else 0
            held = pages[: -(-(start + size) // PAGE)]
            plan = kv.plan([Span(start, size, [-1] * gone + held[gone:])])
            kv.write(0, torch.stack((k, v), 1)[start : start + size], plan)
            attended = kv.attend(0, q[start : start + size], plan)
            torch.testing.assert_close(attended, whole[start : start + size].flatten(1), atol=1e-5, rtol=1e-5)
            start += size
