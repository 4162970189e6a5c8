"""What is drawn, against the definition of each parameter as transformers implements it."""

import math
from typing import Any

import pytest
import torch
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from northchat.engine.executor import ExecutorError, Row
from northchat.engine.protocol import Sampling
from northchat.engine.sampler import CANDIDATES, sample

DRAWS = 4000


def row(history: list[int] | None = None, prompt_len: int = 0, banned: list[int] | None = None, **sampling: Any) -> Row:
    return Row(
        0, [0], 0, ([0],), True, Sampling(**sampling), history=history or [], prompt_len=prompt_len, banned=banned or []
    )


def logits(vocab: int, seed: int = 0) -> torch.Tensor:
    return 3 * torch.randn(1, vocab, generator=torch.Generator().manual_seed(seed))


def frequencies(line: torch.Tensor, **sampling: Any) -> torch.Tensor:
    """How often each id comes, over many seeds."""
    rows = [row(seed=seed, **sampling) for seed in range(DRAWS)]
    ids = [token for token, _ in sample(line.expand(DRAWS, -1), rows)]
    return torch.bincount(torch.tensor(ids), minlength=line.shape[1]) / DRAWS


@pytest.mark.parametrize(
    ("sampling", "warpers"),
    [
        ({"temperature": 0.7}, [TemperatureLogitsWarper(0.7)]),
        ({"temperature": 1.0, "top_k": 5}, [TopKLogitsWarper(5)]),
        ({"temperature": 1.0, "top_p": 0.8}, [TopPLogitsWarper(0.8)]),
        ({"temperature": 1.3, "min_p": 0.1}, [TemperatureLogitsWarper(1.3), MinPLogitsWarper(0.1)]),
        (
            {"temperature": 2.0, "top_k": 20, "top_p": 0.7, "min_p": 0.05},
            [TemperatureLogitsWarper(2.0), TopKLogitsWarper(20), TopPLogitsWarper(0.7), MinPLogitsWarper(0.05)],
        ),
    ],
)
@pytest.mark.parametrize("vocab", [50, 3 * CANDIDATES])
def test_draws_follow_the_warped_distribution(sampling: dict[str, Any], warpers: list[Any], vocab: int) -> None:
    line = logits(vocab)
    expected = LogitsProcessorList(warpers)(torch.zeros(1, 1, dtype=torch.int64), line.clone()).softmax(-1)[0]
    got = frequencies(line, **sampling)
    assert not got[expected == 0].any()
    # Five standard deviations of a share.
    bound = 5 * (expected * (1 - expected) / DRAWS).sqrt() + 1 / DRAWS
    assert bool(((got - expected).abs() <= bound).all())


def test_a_nucleus_wider_than_the_first_candidates_is_drawn_from_whole() -> None:
    flat = torch.zeros(1, 4 * CANDIDATES)
    flat[0, 0] = 1e-3
    kept = int((frequencies(flat, temperature=1.0, top_p=0.9) > 0).sum())
    assert kept > 3 * CANDIDATES
    assert kept <= math.ceil(0.9 * 4 * CANDIDATES)


def test_greedy_takes_the_likeliest_and_mixes_with_draws() -> None:
    lines = torch.cat([logits(100, seed) for seed in range(3)])
    rows = [row(), row(temperature=1.0, top_k=1), row(temperature=1e-3, seed=4)]
    assert [token for token, _ in sample(lines, rows)] == lines.argmax(1).tolist()


def test_repetition_penalty_covers_prompt_and_output() -> None:
    line, history = logits(30), [3, 9, 9, 20, 4]
    expected = RepetitionPenaltyLogitsProcessor(1.8)(torch.tensor([history]), line.clone())
    for _ in range(10):
        assert sample(line, [row(history, 2, repetition_penalty=1.8)])[0][0] == int(expected.argmax())
        line[0, expected.argmax()] = expected[0, expected.argmax()] = -5.0


def test_presence_and_frequency_penalties_cover_the_output_alone() -> None:
    line = torch.tensor([[5.0, 4.9, 4.0, 0.0]])
    assert sample(line, [row([0, 0], 2, presence_penalty=1.0)])[0][0] == 0
    assert sample(line, [row([0, 0], 1, presence_penalty=0.5)])[0][0] == 1
    # 5 - 2 * 0.45 < 4.9 - 0.45 < 5 - 0.45
    assert sample(line, [row([3, 0, 1], 1, frequency_penalty=0.45)])[0][0] == 0
    assert sample(line, [row([3, 0, 0, 1], 1, frequency_penalty=0.45)])[0][0] == 1


def test_bias_and_bans_apply_and_ignore_foreign_ids() -> None:
    line = torch.tensor([[1.0, 2.0, 3.0]])
    assert sample(line, [row(logit_bias={0: 5.0, 99: 100.0})])[0][0] == 0
    assert sample(line, [row(banned=[2, 99])])[0][0] == 1
    assert set(frequencies(line, temperature=5.0, banned=[1]).nonzero().flatten().tolist()) == {0, 2}
    assert line.tolist() == [[1.0, 2.0, 3.0]]


def test_a_seed_decides_whatever_stands_beside_it() -> None:
    line = logits(200)
    seeded = row([1, 2, 3], 3, temperature=1.5, seed=11)
    alone = sample(line, [seeded])
    others = [row(temperature=1.0), row(temperature=1.2, top_p=0.5)]
    crowd = sample(line.expand(3, -1), [*others, seeded])
    assert crowd[2] == alone[0]
    continued = {sample(line, [row([1] * n, 3, temperature=1.5, seed=11)])[0][0] for n in range(3, 40)}
    assert len(continued) > 5


def test_without_a_seed_draws_differ() -> None:
    line = torch.zeros(1, 1000)
    assert len({sample(line, [row(temperature=1.0)])[0][0] for _ in range(20)}) > 5


def test_logprobs_are_the_models_own() -> None:
    line = logits(40)
    (token, report), (_, none) = sample(line.expand(2, -1), [row(logprobs=3, logit_bias={7: 50.0}), row()])
    assert none is None
    assert report is not None
    expected = line.log_softmax(-1)[0]
    assert token == report.token == 7
    assert report.logprob == pytest.approx(float(expected[7]), abs=1e-5)
    values, ids = expected.topk(3)
    assert [i for i, _ in report.top] == ids.tolist()
    assert [v for _, v in report.top] == pytest.approx(values.tolist(), abs=1e-5)
    assert sample(line, [row(logprobs=0)])[0][1].top == []  # type: ignore[union-attr]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_logits_that_are_not_finite_are_an_error_of_one_line(bad: float) -> None:
    line = logits(10)
    line[0, 3] = bad
    with pytest.raises(ExecutorError, match="not finite"):
        sample(line, [row(temperature=1.0)])
