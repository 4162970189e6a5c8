"""North Mini Code's family against transformers on tiny random checkpoints that save_pretrained wrote."""

import inspect
import json
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from north_checkpoint import NORTH, PAGE, SIZES, WINDOW, write_checkpoint
from safetensors.torch import load_file, save_file
from torch import Tensor

from northchat.model.checkpoint import open_weights
from northchat.model.cohere2_moe import Cohere2Moe, Cohere2MoeConfig, load
from northchat.model.paged_kv import PagedKV, Span
from northchat.model.weights import ModelError

transformers = pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("north")
    write_checkpoint(path)
    return path


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def ours(path: Path, dtype: torch.dtype = torch.float32, **options: Any) -> Cohere2Moe:
    return load(open_weights(path), dtype, lambda share: None, **options)


def theirs(path: Path, dtype: torch.dtype, experts: str = "grouped_mm") -> Any:
    return transformers.Cohere2MoeForCausalLM.from_pretrained(
        path, dtype=dtype, attn_implementation="eager", experts_implementation=experts
    ).eval()


def prompt(length: int, seed: int = 0) -> Tensor:
    return torch.randint(SIZES["vocab_size"], (length,), generator=torch.Generator().manual_seed(seed))


class Session:
    """Requests in pages that lie anywhere; a sliding page that left the window is taken away."""

    def __init__(self, model: Cohere2Moe, requests: int = 1, pages: int = 64, shuffle: bool = True) -> None:
        self.model = model
        c = model.config
        self.kvs = [
            PagedKV(len(layers), c.kv_heads, c.head_dim, pages, PAGE, model.dtype, window)
            for layers, window in c.groups
        ]
        self.free = [list(range(pages)) for _ in self.kvs]
        if shuffle:
            for pool in self.free:
                random.Random(1).shuffle(pool)
        self.tables: list[list[list[int]]] = [[[] for _ in self.kvs] for _ in range(requests)]
        self.done = [0] * requests

    @torch.inference_mode()
    def run(self, *chunks: tuple[int, Tensor]) -> list[Tensor]:
        """Each chunk: request, ids. Returns the logits of each."""
        spans: list[list[Span]] = [[] for _ in self.kvs]
        for request, ids in chunks:
            start, count = self.done[request], -(-(self.done[request] + len(ids)) // PAGE)
            for group, kv in enumerate(self.kvs):
                table = self.tables[request][group]
                table += [self.free[group].pop() for _ in range(count - len(table))]
                for index in range(max(0, start + 1 - kv.window) // PAGE if kv.window else 0):
                    if table[index] >= 0:
                        self.free[group].append(table[index])
                        kv._pages[0][:, :, table[index]] = torch.nan
                        table[index] = -1
                spans[group].append(Span(start, len(ids), list(table)))
            self.done[request] += len(ids)
        plans = [kv.plan(s) for kv, s in zip(self.kvs, spans, strict=True)]
        hidden = self.model.hidden(torch.cat([ids for _, ids in chunks]), plans, self.kvs)
        return list(self.model.logits(hidden).split([len(ids) for _, ids in chunks]))


def run(model: Cohere2Moe, ids: Tensor, chunks: Sequence[int]) -> Tensor:
    session = Session(model)
    return torch.cat([session.run((0, part))[0] for part in ids.split(list(chunks))])


@torch.inference_mode()
def test_fp32_logits_equal_transformers(checkpoint: Path) -> None:
    ids = prompt(50)
    expected = theirs(checkpoint, torch.float32)(input_ids=ids[None]).logits[0]
    assert expected.std() > 0.5
    assert (run(ours(checkpoint), ids, [50]) - expected).abs().max() < 1e-4


@pytest.mark.parametrize("experts", ["grouped_mm", "batched_mm"])
@torch.inference_mode()
def test_bf16_logits_equal_transformers_bit_for_bit(checkpoint: Path, experts: str) -> None:
    reference, model = theirs(checkpoint, torch.bfloat16, experts), ours(checkpoint, torch.bfloat16)
    for seed in range(3):
        ids = prompt(50, seed)
        assert torch.equal(run(model, ids, [50]), reference(input_ids=ids[None]).logits[0].float())


@torch.inference_mode()
def test_bf16_decoding_past_the_window_equals_transformers_bit_for_bit(checkpoint: Path) -> None:
    reference, session = theirs(checkpoint, torch.bfloat16), Session(ours(checkpoint, torch.bfloat16))
    known = inspect.signature(type(reference).forward).parameters
    name = "cache" if "cache" in known else "past_key_values"
    cache, ids = transformers.DynamicCache(config=reference.config), prompt(46)
    for part in ids.split([6] + [1] * 40):
        expected = reference(input_ids=part[None], **{name: cache}).logits[0]
        assert torch.equal(session.run((0, part))[0], expected.float())


CHUNKS = ([1] * 50, [49, 1], [1, 49], [8] * 6 + [2], [7, 9, 3, 30, 1], [4] * 12 + [2], [16, 17, 17])


@pytest.mark.parametrize("chunks", CHUNKS, ids=str)
def test_any_chunking_gives_the_same(checkpoint: Path, chunks: list[int]) -> None:
    model, ids = ours(checkpoint), prompt(50)
    assert (run(model, ids, chunks) - run(model, ids, [50])).abs().max() < 1e-4


def test_requests_in_one_pass_do_not_meet(checkpoint: Path) -> None:
    model = ours(checkpoint)
    first, second = prompt(40, 1), prompt(40, 2)
    session = Session(model, requests=2)
    session.run((0, first[:13]))
    got = session.run((1, second[:20]), (0, first[13:14]))
    rest = session.run((0, first[14:]), (1, second[20:]))
    expected = run(model, first, [40]), run(model, second, [40])
    assert (torch.cat((got[1], rest[0])) - expected[0][13:]).abs().max() < 1e-4
    assert (torch.cat((got[0], rest[1])) - expected[1]).abs().max() < 1e-4


# ---- what is easily got wrong, and loads all the same ----------------------------------------------------------------


def test_layers_of_north_mini_code() -> None:
    config = Cohere2MoeConfig.from_dict(
        SIZES | NORTH | {"num_hidden_layers": 49, "sliding_window_pattern": 4, "prefix_dense_sliding_window_pattern": 1}
    )
    full = [i for i in range(49) if not config.sliding[i]]
    assert full == list(range(0, 49, 4))
    assert config.dense == (True, *[False] * 48)
    assert [i for i in range(49) if not config.rotates(i)] == full[1:]
    assert [len(layers) for layers, _ in config.groups] == [13, 36]
    assert [window for _, window in config.groups] == [None, WINDOW]


@pytest.mark.parametrize(
    "wrong",
    [
        lambda c: replace(c, dense=(False,) * 9, rotate_dense=False),
        lambda c: replace(c, sliding=tuple((i + 1) % 4 != 0 for i in range(9))),
        lambda c: replace(c, normalise_scores=True),
        lambda c: replace(c, window=WINDOW + 1),
        lambda c: replace(c, window=WINDOW - 1),
        lambda c: replace(c, norm_eps=1e-3),
        lambda c: replace(c, rope_theta=10000.0),
        lambda c: replace(c, logit_scale=0.0625),
    ],
    ids=["no RoPE on layer 0", "full layers", "renormalised", "wide window", "narrow window", "eps", "theta", "scale"],
)
def test_a_wrong_reading_shows(checkpoint: Path, wrong: Callable[[Cohere2MoeConfig], Cohere2MoeConfig]) -> None:
    model, ids = ours(checkpoint), prompt(50)
    expected = run(model, ids, [50])
    # Made anew, for the configuration decides about layers' groups; the weights stay where they are.
    other = Cohere2Moe(wrong(model.config), model._layers, model._embedding, model._norm, torch.float32)
    assert (run(other, ids, [50]) - expected).abs().max() > 1e-2


def test_the_window_is_a_parameter(checkpoint: Path, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, sliding_window=WINDOW + 1)
    ids = prompt(30)
    wider = run(ours(checkpoint, window=WINDOW + 1), ids, [30])
    assert torch.equal(wider, run(ours(tmp_path), ids, [30]))
    difference = (wider - run(ours(checkpoint), ids, [30])).abs().amax(-1)
    assert difference[:WINDOW].max() < 1e-4
    assert difference[WINDOW:].min() > 1e-3


@torch.inference_mode()
def test_renormalised_scores_equal_transformers(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, norm_topk_prob=True)
    ids = prompt(50)
    expected = theirs(tmp_path, torch.bfloat16)(input_ids=ids[None]).logits[0]
    assert torch.equal(run(ours(tmp_path, torch.bfloat16), ids, [50]), expected.float())


# ---- loading ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def rewrite(checkpoint: Path, tmp_path: Path) -> Callable[..., Path]:
    """The checkpoint with other tensors or another configuration."""

    def write(
        change: Callable[[dict[str, Tensor]], dict[str, Tensor]] = lambda tensors: tensors,
        drop: Sequence[str] = (),
        **config: Any,
    ) -> Path:
        known = json.loads((checkpoint / "config.json").read_text())
        kept = {key: value for key, value in (known | config).items() if key not in drop}
        (tmp_path / "config.json").write_text(json.dumps(kept))
        tensors = change(load_file(checkpoint / "model.safetensors"))
        save_file({name: t.contiguous() for name, t in tensors.items()}, tmp_path / "model.safetensors")
        return tmp_path

    return write


def stacked(tensors: dict[str, Tensor], suffix: str, layer: int) -> Tensor:
    at = f"model.layers.{layer}.mlp.experts."
    return torch.stack([tensors[f"{at}{e}.{suffix}_proj.weight"] for e in range(SIZES["num_experts"])])


def without_experts(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: t for name, t in tensors.items() if ".experts." not in name}


def fused(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    out = without_experts(tensors)
    for layer in range(1, 9):
        gate, up, down = (stacked(tensors, x, layer) for x in ("gate", "up", "down"))
        out[f"model.layers.{layer}.mlp.experts.gate_up_proj"] = torch.cat((gate, up), 1)
        out[f"model.layers.{layer}.mlp.experts.down_proj"] = down
    return out


def switched(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    out = without_experts(tensors)
    for layer in range(1, 9):
        for x in ("gate", "up", "down"):
            out[f"model.layers.{layer}.mlp.switch_mlp.{x}_proj.weight"] = stacked(tensors, x, layer)
    return out


def prefixed(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {f"language_model.{name}": t for name, t in fused(tensors).items()}


def with_the_needless(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return tensors | {
        "lm_head.weight": tensors["model.embed_tokens.weight"].clone(),
        "model.layers.1.self_attn.q_proj.bias": torch.zeros(128),
        "model.layers.1.self_attn.rotary_emb.inv_freq": torch.zeros(8),
    }


@pytest.mark.parametrize("change", [fused, switched, prefixed, with_the_needless])
def test_other_names_load_alike(checkpoint: Path, rewrite: Callable[..., Path], change: Callable[..., Any]) -> None:
    ids = prompt(20)
    assert torch.equal(run(ours(rewrite(change)), ids, [20]), run(ours(checkpoint), ids, [20]))


def test_shards_and_hub_configuration_load_alike(checkpoint: Path, tmp_path: Path) -> None:
    model = transformers.Cohere2MoeForCausalLM.from_pretrained(checkpoint, dtype=torch.bfloat16)
    model.save_pretrained(tmp_path, max_shard_size="100KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 3
    # As on the hub: first_k_dense_replace in place of mlp_layer_types, rope_theta at the top.
    config = json.loads((tmp_path / "config.json").read_text())
    assert config.pop("mlp_layer_types")
    assert config.pop("rope_parameters")["rope_theta"] == 50000.0
    config.pop("tie_word_embeddings", None)
    (tmp_path / "config.json").write_text(json.dumps(config | {"first_k_dense_replace": 1, "rope_theta": 50000.0}))
    ids = prompt(20)
    assert torch.equal(run(ours(tmp_path), ids, [20]), run(ours(checkpoint), ids, [20]))


@pytest.mark.parametrize(
    ("config", "drop", "message"),
    [
        ({}, ["norm_topk_prob"], "lacks norm_topk_prob"),
        ({}, ["logit_scale"], "lacks logit_scale"),
        ({}, ["rms_norm_eps"], "rms_norm_eps"),
        ({"rms_norm_eps": None}, [], "rms_norm_eps"),
        ({}, ["mlp_layer_types"], "lacks first_k_dense_replace"),
        ({}, ["expert_selection_fn"], "expert_selection_fn 'softmax'"),
        ({"mlp_layer_types": ["sparse"] * 9}, [], r"no tensor model\.layers\.0\.mlp\.gate\.weight of shape \[8, 64\]"),
        ({"mlp_layer_types": ["dense"] * 9}, [], r"no tensor model\.layers\.1\.mlp\.gate_proj\.weight"),
        ({"layer_types": ["full_attention"] * 8}, [], "each of 9 layers"),
        ({"num_shared_experts": 1}, [], "num_shared_experts 1"),
        ({"use_qk_norm": True}, [], "use_qk_norm"),
        ({"attention_bias": True}, [], "attention_bias"),
        ({"use_parallel_block": False}, [], "use_parallel_block"),
        ({"tie_word_embeddings": False}, [], "tie_word_embeddings"),
        ({"num_experts_per_tok": 9}, [], "chooses 9 of 8 experts"),
    ],
)
def test_a_configuration_that_does_not_fit_is_refused(
    rewrite: Callable[..., Path], config: dict[str, Any], drop: list[str], message: str
) -> None:
    with pytest.raises(ModelError, match=message):
        ours(rewrite(drop=drop, **config))


def replaced(name: str, tensor: Tensor | None) -> Callable[[dict[str, Tensor]], dict[str, Tensor]]:
    def change(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        kept = {n: t for n, t in tensors.items() if n != name}
        return kept if tensor is None else kept | {name: tensor}

    return change


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        ("model.norm.weight", None, r"no tensor model\.norm\.weight of shape \[64\]"),
        ("model.layers.3.mlp.experts.7.up_proj.weight", None, r"experts\.7\.up_proj\.weight of shape \[32, 64\]"),
        (
            "model.layers.3.mlp.experts.7.up_proj.weight",
            torch.zeros(64, 32),
            r"experts\.7\.up_proj\.weight in .*model\.safetensors has shape \[64, 32\].* \[32, 64\]",
        ),
        ("model.layers.2.input_layernorm.weight", torch.zeros(32), r"input_layernorm\.weight in .* \[32\].* \[64\]"),
        ("model.layers.2.input_layernorm.bias", torch.zeros(64), r"input_layernorm\.bias, .* no place"),
        ("model.layers.2.post_attention_layernorm.weight", torch.zeros(64), "no place"),
        ("model.layers.2.self_attn.q_norm.weight", torch.zeros(8, 16), "no place"),
        ("model.layers.9.input_layernorm.weight", torch.zeros(64), "no place"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(
    rewrite: Callable[..., Path], name: str, tensor: Tensor | None, message: str
) -> None:
    path = rewrite(replaced(name, tensor))
    with pytest.raises(ModelError, match=message) as raised:
        ours(path)
    assert str(path) in str(raised.value)
    assert "\n" not in str(raised.value)
