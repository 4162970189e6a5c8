"""From logits to the next ids: every parameter of `protocol.Sampling`, exactly, for a batch of rows.

Order, as in transformers: penalties, bias, bans and masks, temperature, top-k, top-p, min-p. A draw is one uniform
number through the inverse of the cumulated distribution; the number depends only on the request's seed and the count of
ids before it, so a request draws the same after preemption, in another chunking, or in another place of the batch.
"""

import random
import struct
from collections import Counter
from collections.abc import Sequence
from hashlib import blake2b

import torch

from northchat.engine.executor import ExecutorError, Row
from northchat.engine.protocol import Logprob, Sampling

CANDIDATES = 256
"""Likeliest ids looked at first; where the kept ones aren't surely among them, all are sorted."""


def sample(logits: torch.Tensor, rows: Sequence[Row]) -> list[tuple[int, Logprob | None]]:
    """One id per row of float32 logits [rows, vocab], and what `Sampling.logprobs` asks for.

    Log-probabilities are the model's own, before penalties, bias and temperature.
    Raises ExecutorError when the logits aren't finite.
    """
    vocab = logits.shape[1]
    scores = logits
    if any(_adjusts(row) for row in rows):
        scores = logits.clone()
        for row, line in zip(rows, scores, strict=True):
            if _adjusts(row):
                _adjust(line, row, vocab)
    best, ids = scores.max(dim=1)
    if not bool(torch.isfinite(best).all()):
        raise ExecutorError("the model computed logits that are not finite; its weights are damaged, download it again")
    drawn = [i for i, row in enumerate(rows) if row.sampling.temperature > 0]
    if drawn:
        params = [rows[i].sampling for i in drawn]
        uniform = [_uniform(rows[i].sampling.seed, len(rows[i].history)) for i in drawn]
        ids[drawn] = _draw(scores[drawn], params, torch.tensor(uniform, dtype=torch.float64))
    chosen: list[int] = ids.tolist()
    reported = [
        None if row.sampling.logprobs is None else logprobs(logits[i : i + 1], [chosen[i]], row.sampling.logprobs)[0]
        for i, row in enumerate(rows)
    ]
    return list(zip(chosen, reported, strict=True))


def logprobs(logits: torch.Tensor, ids: Sequence[int], top: int) -> list[Logprob]:
    """Per row of float32 logits [rows, vocab]: the log-probability of ids[row], and those of the `top` likeliest."""
    normaliser = logits.logsumexp(dim=1, keepdim=True)
    own = (logits.gather(1, torch.tensor(ids).unsqueeze(1)) - normaliser).squeeze(1).tolist()
    values, likeliest = logits.topk(min(top, logits.shape[1]), dim=1)
    lists = zip(likeliest.tolist(), (values - normaliser).tolist(), strict=True)
    return [
        Logprob(token, value, list(zip(*pair, strict=True))) for token, value, pair in zip(ids, own, lists, strict=True)
    ]


def _adjusts(row: Row) -> bool:
    s = row.sampling
    return bool(
        row.banned
        or row.mask is not None
        or s.logit_bias
        or s.presence_penalty
        or s.frequency_penalty
        or (s.repetition_penalty != 1.0 and row.history)
    )


def _adjust(line: torch.Tensor, row: Row, vocab: int) -> None:
    """Penalties, bias, bans and the mask on one row of scores, in place.

    repetition_penalty divides positive scores of all ids seen and multiplies negative ones (Keskar et al. 2019);
    frequency_penalty counts, and presence_penalty notes, the ids of the output alone (OpenAI's definition).
    """
    s = row.sampling
    if s.repetition_penalty != 1.0 and row.history:
        seen = torch.tensor(sorted(set(row.history)))
        values = line[seen]
        line[seen] = torch.where(values > 0, values / s.repetition_penalty, values * s.repetition_penalty)
    if s.presence_penalty or s.frequency_penalty:
        counts = Counter(row.history[row.prompt_len :])
        if counts:
            output = torch.tensor(list(counts))
            line[output] -= s.presence_penalty + s.frequency_penalty * torch.tensor(list(counts.values()))
    bias = {token: value for token, value in s.logit_bias.items() if 0 <= token < vocab}
    if bias:
        line[torch.tensor(list(bias))] += torch.tensor(list(bias.values()))
    banned = [token for token in row.banned if 0 <= token < vocab]
    if banned:
        line[torch.tensor(banned)] = -torch.inf
    if row.mask is not None:
        bits = torch.frombuffer(bytearray(row.mask), dtype=torch.uint8).unsqueeze(1) >> torch.arange(8)
        allowed = (bits & 1).bool().flatten()[:vocab]
        line[: len(allowed)].masked_fill_(~allowed, -torch.inf)
        line[len(allowed) :] = -torch.inf


def _uniform(seed: int | None, count: int) -> float:
    """In [0, 1)."""
    if seed is None:
        return random.random()
    digest = blake2b(struct.pack("<QQ", seed & (1 << 64) - 1, count), digest_size=8).digest()
    return float((int.from_bytes(digest, "little") >> 11) / (1 << 53))


def _draw(scores: torch.Tensor, params: Sequence[Sampling], uniform: torch.Tensor) -> torch.Tensor:
    """Ids [rows] from float32 scores [rows, vocab] by uniform numbers [rows]."""
    temperature = torch.tensor([p.temperature for p in params], dtype=torch.float64).unsqueeze(1)
    top = scores.max(dim=1, keepdim=True).values
    ids = torch.empty(len(params), dtype=torch.int64)
    cut = torch.tensor([p.top_k > 0 or p.top_p < 1 or p.min_p > 0 for p in params])
    if not bool(cut.all()):
        whole = ~cut
        weights = ((scores[whole].double() - top[whole].double()) / temperature[whole]).exp_()
        ids[whole] = _invert(weights, uniform[whole])
    if bool(cut.any()):
        ids[cut] = _draw_cut(
            scores[cut],
            top[cut],
            temperature[cut],
            [p for p, c in zip(params, cut.tolist(), strict=True) if c],
            uniform[cut],
        )
    return ids


def _draw_cut(
    scores: torch.Tensor,
    top: torch.Tensor,
    temperature: torch.Tensor,
    params: Sequence[Sampling],
    uniform: torch.Tensor,
) -> torch.Tensor:
    vocab = scores.shape[1]
    top_k = torch.tensor([p.top_k or vocab for p in params]).unsqueeze(1)
    top_p = torch.tensor([p.top_p for p in params], dtype=torch.float64).unsqueeze(1)
    min_p = torch.tensor([p.min_p for p in params], dtype=torch.float64).unsqueeze(1)
    count = min(vocab, max([CANDIDATES, *(p.top_k for p in params)]))
    while True:
        values, order = scores.topk(count, dim=1)
        weights = ((values.double() - top.double()) / temperature).exp_()
        weights *= torch.arange(count) < top_k
        total = weights.sum(dim=1, keepdim=True)
        if count < vocab:
            # Without top-k the nucleus is a share of the whole vocabulary's mass.
            everything = ((scores.double() - top.double()) / temperature).exp_().sum(dim=1, keepdim=True)
            total = torch.where(top_k < vocab, total, everything)
        reached = weights.cumsum(dim=1)
        # Kept: while the mass before an id is short of top_p, and always the first.
        keep = (reached - weights < top_p * total) & (weights >= min_p)
        keep[:, 0] = True
        if count == vocab or not bool((keep[:, -1] & (top_k.squeeze(1) > count)).any()):
            break
        count = vocab
    weights *= keep
    return order.gather(1, _invert(weights, uniform).unsqueeze(1)).squeeze(1)


def _invert(weights: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """First index at which the cumulated weights, float64 [rows, n], exceed the uniform share of their sum."""
    reached = weights.cumsum(dim=1)
    index = torch.searchsorted(reached, uniform.unsqueeze(1) * reached[:, -1:], right=True).squeeze(1)
    # Rounding may reach the very end: the last index that has any weight.
    last = weights.shape[1] - 1 - (weights.flip(1) > 0).int().argmax(dim=1)
    return torch.minimum(index, last)
