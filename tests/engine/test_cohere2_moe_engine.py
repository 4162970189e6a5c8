"""North's two groups of layers on the CPU, through scheduler and pages: what is found again, and the same tokens.

Pages of 4 tokens; sliding layers see 8 keys. Every answer is compared with transformers' in float32, so a hit on pages
that hold something else can't pass.
"""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from north_checkpoint import PAGE, write_checkpoint
from rig import Got, Rig, prompt
from transformers import Cohere2MoeForCausalLM

from northchat.engine.core import LIMITS
from northchat.engine.cpu import CpuExecutor, kv_groups, load
from northchat.engine.kv_cache import peak_pages, plan
from northchat.engine.protocol import Sampling
from northchat.model import cohere2_moe
from northchat.model.checkpoint import open_weights
from northchat.model.cohere2_moe import Cohere2Moe, Cohere2MoeConfig

PROMPTS = [prompt(length, seed) for seed, length in enumerate([5, 64, 33, 16, 48, 9])]
OUTPUTS = 30
# Greedy, but a small random model soon repeats itself otherwise.
VARIED = Sampling(repetition_penalty=5.0)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("north")
    write_checkpoint(path)
    return path


@pytest.fixture(scope="module")
def model(checkpoint: Path) -> Cohere2Moe:
    with torch.inference_mode():
        return cohere2_moe.load(open_weights(checkpoint), torch.float32, lambda share: None)


@pytest.fixture(scope="module")
def reference(checkpoint: Path) -> Callable[[list[int], int], list[int]]:
    torch.set_num_threads(1)
    theirs = Cohere2MoeForCausalLM.from_pretrained(checkpoint, dtype=torch.float32, attn_implementation="eager").eval()
    theirs.generation_config.eos_token_id = None

    def generate(ids: list[int], count: int) -> list[int]:
        given = torch.tensor([ids])
        out = theirs.generate(
            given, attention_mask=torch.ones_like(given), max_new_tokens=count, do_sample=False, repetition_penalty=5.0
        )
        return out[0, len(ids) :].tolist()

    return generate


@pytest.fixture(scope="module")
def expected(reference: Callable[[list[int], int], list[int]]) -> list[list[int]]:
    answers = [reference(ids, OUTPUTS) for ids in PROMPTS]
    assert all(len(set(ids)) > 20 for ids in answers), "too monotonous to show a mistake"
    return answers


@pytest.fixture
def rig(model: Cohere2Moe) -> Callable[..., Rig]:
    torch.set_num_threads(1)

    def make(**more: object) -> Rig:
        options = {"pages": (64, 64), "page": PAGE, "limit": 256} | more
        return Rig(executor=CpuExecutor(model, PAGE), **options)

    return make


@pytest.fixture
def ask(reference: Callable[[list[int], int], list[int]]) -> Callable[[Rig, list[int]], Got]:
    def run(rig: Rig, ids: list[int], max_tokens: int = 4) -> Got:
        got = rig.add(100 + len(rig.got), ids, max_tokens, VARIED)
        rig.run()
        assert got.ids == reference(ids, max_tokens)
        return got

    return run


Ask = Callable[..., Got]
Make = Callable[..., Rig]


# ---- the same tokens as transformers ----


@pytest.mark.parametrize(
    "options",
    [
        {"rows": 1, "chunk": 512, "mixed_chunk": 512},
        {"rows": 8, "chunk": 512, "mixed_chunk": 512, "pages": (128, 64)},
        {"rows": 8, "chunk": 7, "mixed_chunk": 3, "pages": (128, 64)},
    ],
    ids=["alone", "batched", "chunked"],
)
def test_greedy_tokens_are_those_of_transformers(
    rig: Make, expected: list[list[int]], options: dict[str, object]
) -> None:
    got = rig(**options)
    for rid, ids in enumerate(PROMPTS):
        got.add(rid, ids, OUTPUTS, VARIED)
    got.run()
    assert [got.got[rid].ids for rid in range(len(PROMPTS))] == expected


def test_preempted_requests_get_the_same_tokens(rig: Make, expected: list[list[int]]) -> None:
    tight = rig(rows=8, chunk=16, mixed_chunk=8, pages=(40, 24))
    for rid, ids in enumerate(PROMPTS):
        tight.add(rid, ids, OUTPUTS, VARIED)
    tight.run()
    assert tight.scheduler.preemptions
    assert [tight.got[rid].ids for rid in range(len(PROMPTS))] == expected


def test_tokens_after_a_hit_are_the_same(rig: Make, expected: list[list[int]]) -> None:
    warm = rig(rows=8, chunk=512, mixed_chunk=512, pages=(256, 256))
    for rid, ids in enumerate(PROMPTS):
        warm.add(rid, ids, OUTPUTS, VARIED)
    warm.run()
    for rid, (ids, answer) in enumerate(zip(PROMPTS, expected, strict=True), 100):
        got = warm.add(rid, [*ids, *answer[:20]], OUTPUTS - 20, VARIED)
        warm.run()
        assert got.cached == (len(ids) + 19) // PAGE * PAGE
        assert got.ids == answer[20:]


# ---- what is found again, exactly ----


def test_a_conversation_that_grows(rig: Make, ask: Ask) -> None:
    one = rig()
    history = prompt(20)
    # The last token of an answer is never computed: whole pages count of 23, 28, 34 and 39 tokens.
    for turn, cached in enumerate([0, 20, 28, 32, 36]):
        got = ask(one, history)
        assert got.cached == cached
        history = [*history, *got.ids, *prompt(1 + turn % 2, turn)]


def test_two_branches_of_one_prefix(rig: Make, ask: Ask) -> None:
    one = rig()
    stem = prompt(18)
    ask(one, stem)
    assert ask(one, stem + prompt(9, 1)).cached == 16
    assert ask(one, stem + prompt(9, 2)).cached == 16
    assert ask(one, stem + prompt(9, 1) + [1]).cached == 24


def test_a_second_agent_that_shares_system_and_tools_alone(rig: Make, ask: Ask) -> None:
    system = prompt(24)
    one = rig()
    ask(one, system + prompt(30, 1))
    # The first agent let the pages before the branch go long ago; nobody took them.
    assert ask(one, system + prompt(30, 2)).cached == 24

    # Where they were taken, all is computed again, and what that brings at the branch is kept longest.
    tight = rig(pages=(64, 10), chunk=8)
    assert [ask(tight, system + prompt(30, seed)).cached for seed in (1, 2, 3, 4)] == [0, 0, 24, 24]


def test_rewind_after_the_windows_pages_went(rig: Make, ask: Ask) -> None:
    history = prompt(40)
    one = rig(pages=(64, 6), chunk=4)
    ask(one, history)
    assert ask(one, [*history, 1, 2]).cached == 40
    # The full layers still have all of these 20 tokens, the sliding ones nothing of their window [12, 20).
    assert ask(one, [*history[:20], 5, 6]).cached == 0
    roomy = rig(pages=(64, 64), chunk=4)
    ask(roomy, history)
    assert ask(roomy, [*history[:20], 5, 6]).cached == 20


@pytest.mark.parametrize(("again", "cached"), [(1, 8), (2, 16), (3, 16)])
def test_eviction_under_pressure_takes_the_oldest_and_its_tail_first(
    rig: Make, ask: Ask, again: int, cached: int
) -> None:
    # Of 12 pages two prompts leave 10 cached; a third takes the 2 blank ones and the first prompt's last three.
    tight = rig(pages=(12, 64), chunk=16)
    for seed in (1, 2, 3):
        ask(tight, prompt(20, seed), 1)
    assert ask(tight, prompt(20, again), 1).cached == cached


# ---- loading, and memory ----


def test_precision_is_bfloat16_unless_float32_is_asked_for(checkpoint: Path, expected: list[list[int]]) -> None:
    auto = load(checkpoint, "auto", lambda what, done, total: None)
    assert auto.dtype == "bfloat16"
    exact = load(checkpoint, "float32", lambda what, done, total: None)
    torch.set_num_threads(1)
    assert exact.dtype == "float32"
    assert [g.page_bytes for g in exact.groups] == [2 * g.page_bytes for g in auto.groups]
    whole = Rig(page=64, limit=256, chunk=64, executor=exact, pages=(8, 8))
    whole.add(1, PROMPTS[1], OUTPUTS, VARIED)
    whole.run()
    assert whole.got[1].ids == expected[1]


NORTH_MINI_CODE = {
    "num_hidden_layers": 49,
    "hidden_size": 2048,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "intermediate_size": 768,
    "prefix_dense_intermediate_size": 3072,
    "vocab_size": 262144,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 500000,
    "sliding_window": 4096,
    "layer_types": ["sliding_attention" if i % 4 else "full_attention" for i in range(49)],
    "first_k_dense_replace": 1,
    "norm_topk_prob": False,
    "logit_scale": 1.0,
    "rope_theta": 50000.0,
    "expert_selection_fn": "sigmoid",
}


@pytest.mark.parametrize(("context", "full_mib"), [(8192, 208), (32768, 832), (131072, 3328), (262144, 6656)])
def test_memory_of_north_mini_code_is_what_the_formula_says(context: int, full_mib: int) -> None:
    """2,048 bytes per token and layer: 13 layers for every token, 36 for the window's 4096 (288 MiB)."""
    groups = kv_groups(Cohere2MoeConfig.from_dict(NORTH_MINI_CODE), torch.bfloat16)
    assert [(len(g.layers), g.window) for g in groups] == [(13, None), (36, 4096)]
    full, sliding = groups
    assert context // 64 * full.page_bytes == full_mib << 20
    assert 4096 // 64 * sliding.page_bytes == 288 << 20
    # While a prompt is computed the window's first key and a chunk's last lie up to a chunk and a page apart.
    chunk = LIMITS["cuda"].chunk
    peak = peak_pages(4096, chunk)
    assert peak is not None
    assert 0 <= peak - (4096 + chunk) // 64 <= 1
    memory = (full_mib << 20) + peak * sliding.page_bytes
    assert plan(groups, memory, context, 1, chunk) == ([context // 64, peak], context)
    assert plan(groups, memory - full.page_bytes, context, 1, chunk)[1] == context - 64
