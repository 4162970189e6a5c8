"""The executor by hand-made batches: lanes, chunks, log-probabilities, and what it can't load."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from northchat.engine.cpu import CpuExecutor, available_memory, load, threads
from northchat.engine.executor import PAGE, Batch, ExecutorError, Row, Sampled
from northchat.engine.protocol import Sampling
from northchat.model.weights import ModelError

VOCAB = 97
IDS = torch.randint(VOCAB, (2, 150), generator=torch.Generator().manual_seed(2)).tolist()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        initializer_range=0.3,
    )
    path = tmp_path_factory.mktemp("llama")
    LlamaForCausalLM(config).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def expected(folder: Path) -> torch.Tensor:
    """Log-probabilities at each position of both prompts."""
    with torch.inference_mode():
        return LlamaForCausalLM.from_pretrained(folder)(torch.tensor(IDS)).logits.log_softmax(-1)


@pytest.fixture
def executor(folder: Path) -> Iterator[CpuExecutor]:
    before = torch.get_num_threads()
    made = load(folder, "float32", lambda what, done, total: None)
    made.allocate([10])
    yield made
    torch.set_num_threads(before)


def row(rid: int, start: int, end: int, sample: bool = True, **more: object) -> Row:
    pages = ([7, 2, 5], [1, 3, 0])[rid]
    history = IDS[rid][:end]
    return Row(rid, history[start:], start, (pages,), sample, Sampling(logprobs=3), history=history, **more)  # type: ignore[arg-type]


def step(executor: CpuExecutor, decode: list[Row] | None = None, prefill: list[Row] | None = None) -> list[Sampled]:
    return executor.poll(executor.submit(Batch(decode or [], prefill or [])))


def check(sampled: Sampled, expected: torch.Tensor) -> None:
    assert sampled.token == int(expected.argmax())
    assert sampled.logprob is not None
    assert sampled.logprob.logprob == pytest.approx(float(expected.max()), abs=1e-3)
    assert [token for token, _ in sampled.logprob.top] == expected.topk(3).indices.tolist()


def test_lanes_and_chunks_give_the_models_own_distribution(executor: CpuExecutor, expected: torch.Tensor) -> None:
    silent = step(executor, prefill=[row(0, 0, 70, sample=False), row(1, 0, 10, sample=False)])
    assert [(s.rid, s.token, s.logprob) for s in silent] == [(0, None, None), (1, None, None)]
    mixed = step(executor, decode=[row(0, 70, 71)], prefill=[row(1, 10, 139)])
    check(mixed[0], expected[0, 70])
    check(mixed[1], expected[1, 138])
    both = step(executor, decode=[row(1, 139, 140), row(0, 71, 72)])
    check(both[0], expected[1, 139])
    check(both[1], expected[0, 71])


def test_a_token_still_on_the_device(executor: CpuExecutor) -> None:
    first = step(executor, prefill=[row(0, 0, 20)])[0].token
    assert first is not None
    pages = ([7, 2, 5],)
    told = step(executor, decode=[Row(0, [first], 20, pages, True, Sampling())])[0].token
    executor.release(1)
    step(executor, prefill=[row(0, 0, 20)])
    assert step(executor, decode=[Row(0, [-1], 20, pages, True, Sampling())])[0].token == told


def test_prompt_logprobs_over_chunks(executor: CpuExecutor, expected: torch.Tensor) -> None:
    found = []
    for start, end in ((0, 60), (60, 61), (61, 150)):
        chunk = row(0, start, end, sample=end == 150, prompt_len=150, prompt_logprobs=2)
        chunk.history = IDS[0]
        found += step(executor, prefill=[chunk])[0].prompt_logprobs
    assert [f.token for f in found] == IDS[0][1:]
    wanted = expected[0, :-1].gather(1, torch.tensor(IDS[0][1:])[:, None])[:, 0].tolist()
    assert [f.logprob for f in found] == pytest.approx(wanted, abs=1e-3)
    assert [f.top[0][0] for f in found] == expected[0, :-1].argmax(-1).tolist()


def test_results_can_be_polled_in_any_order(executor: CpuExecutor) -> None:
    handles = [executor.submit(Batch(prefill=[row(rid, 0, 5)])) for rid in (0, 1)]
    assert [executor.poll(handle)[0].rid for handle in reversed(handles)] == [1, 0]


def test_says_what_it_is(executor: CpuExecutor, folder: Path) -> None:
    assert (executor.dtype, executor.vocab_size, executor.max_context) == ("float32", VOCAB, 512)
    assert executor.groups[0].page_bytes == 2 * 2 * 2 * PAGE * 16 * 4
    assert executor.device == f"CPU, {threads()} threads"
    assert 0 < executor.free_memory() <= available_memory() * 2
    told: list[tuple[int, int]] = []
    assert load(folder, "auto", lambda what, done, total: told.append((done, total))).dtype == "bfloat16"
    assert told == sorted(told)
    assert told[-1][0] == told[-1][1] == sum(f.stat().st_size for f in folder.glob("*.safetensors"))


def test_without_pools_or_memory_for_them(folder: Path) -> None:
    bare = load(folder, "float32", lambda what, done, total: None)
    with pytest.raises(ExecutorError, match="not allocated"):
        bare.submit(Batch(prefill=[row(0, 0, 5)]))
    with pytest.raises(ExecutorError, match=r"no memory .*; close other programs"):
        bare.allocate([1 << 50])


def test_a_damaged_file_is_named_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"GGUF" + bytes(20))
    with pytest.raises(ModelError, match=r"model\.gguf") as error:
        load(tmp_path / "model.gguf", "auto", lambda what, done, total: None)
    assert "\n" not in str(error.value)
