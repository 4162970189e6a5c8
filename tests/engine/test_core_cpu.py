"""Scheduler, pages and CPU executor together give the tokens that transformers gives, whatever happens on the way."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from rig import Rig, prompt
from transformers import LlamaConfig, LlamaForCausalLM

from northchat.engine.cpu import load
from northchat.engine.executor import Executor

PROMPTS = [prompt(length, seed) for seed, length in enumerate([5, 64, 65, 130, 200, 33])]
OUTPUTS = 70


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[list[int]]]:
    """A small random model's folder, and what transformers generates from each prompt."""
    torch.manual_seed(3)
    torch.set_num_threads(1)
    config = LlamaConfig(
        vocab_size=97,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        initializer_range=0.3,
        eos_token_id=None,
        bos_token_id=None,
        pad_token_id=0,
    )
    model = LlamaForCausalLM(config).eval()
    path = tmp_path_factory.mktemp("llama")
    model.save_pretrained(path)
    expected = []
    for ids in PROMPTS:
        given = torch.tensor([ids])
        out = model.generate(given, attention_mask=torch.ones_like(given), max_new_tokens=OUTPUTS, do_sample=False)
        expected.append(out[0, len(ids) :].tolist())
    assert all(len(set(ids)) > 10 for ids in expected), "too monotonous to show a mistake"
    return path, expected


@pytest.fixture
def rig(reference: tuple[Path, list[list[int]]]) -> Callable[..., Rig]:
    def make(**more: object) -> Rig:
        executor: Executor = load(reference[0], "float32", lambda what, done, total: None)
        torch.set_num_threads(1)
        return Rig(page=64, limit=512, executor=executor, **more)

    return make


def check(rig: Rig, expected: list[list[int]]) -> None:
    for rid, ids in enumerate(PROMPTS):
        rig.add(rid, ids, OUTPUTS)
    rig.run()
    assert [rig.got[rid].ids for rid in range(len(PROMPTS))] == expected


@pytest.mark.parametrize(("rows", "chunk", "overlap"), [(1, 512, False), (8, 512, False), (8, 50, True)])
def test_alone_batched_and_chunked(
    reference: tuple[Path, list[list[int]]], rig: Callable[..., Rig], rows: int, chunk: int, overlap: bool
) -> None:
    check(rig(rows=rows, chunk=chunk, mixed_chunk=chunk // 2, overlap=overlap), reference[1])


def test_after_preemption(reference: tuple[Path, list[list[int]]], rig: Callable[..., Rig]) -> None:
    tight = rig(pages=(8,), rows=8, chunk=100, mixed_chunk=40)
    check(tight, reference[1])
    assert tight.scheduler.preemptions


def test_after_a_cache_hit(reference: tuple[Path, list[list[int]]], rig: Callable[..., Rig]) -> None:
    warm = rig(rows=8, chunk=100, mixed_chunk=40)
    check(warm, reference[1])
    for rid, (ids, expected) in enumerate(zip(PROMPTS, reference[1], strict=True), 100):
        got = warm.add(rid, [*ids, *expected[:40]], OUTPUTS - 40)
        warm.run()
        assert got.cached == (len(ids) + 39) // 64 * 64
        assert got.ids == expected[40:]
