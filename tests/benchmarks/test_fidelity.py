"""The accuracy harness on a tiny model: its references against transformers, and that it catches wrong decoders."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks import fidelity
from benchmarks.fidelity import Prompt, Reference, TorchDecoder, Transformers
from benchmarks.weights import RandomWeights, Shape

transformers = pytest.importorskip("transformers")

TINY = Shape(
    layers=9,
    hidden=64,
    heads=8,
    kv_heads=2,
    head_dim=16,
    experts=8,
    top_k=2,
    intermediate=32,
    dense_intermediate=48,
    vocab=256,
    window=8,
)
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.set_num_threads(1)
    # Pages of 4 and small chunks bring every edge within reach of short prompts.
    monkeypatch.setattr(fidelity, "PAGE", 4)
    monkeypatch.setattr(fidelity, "SCRATCH", 1 << 12)


def whole_model(weights: Callable[[str], Tensor], dtype: torch.dtype, attention: str) -> Any:
    config = transformers.Cohere2MoeConfig(**TINY.config())
    config._attn_implementation = attention
    model = transformers.Cohere2MoeForCausalLM(config).eval()
    state = {name: weights(name).to(dtype) for name in model.state_dict() if name != "lm_head.weight"}
    model.load_state_dict(state | {"lm_head.weight": state["model.embed_tokens.weight"]}, assign=True)
    return model


def in_fp32(weights: RandomWeights) -> Callable[[str], Tensor]:
    return lambda name: weights(name).float()


@torch.inference_mode()
def test_reference_equals_transformers_in_fp32() -> None:
    weights = RandomWeights(TINY, 1)
    prompt = Prompt.random(TINY, (1, 2, 8, 9, 30), 3, 64, 0)
    trace = Reference(TINY, weights).run(prompt)
    head = weights("model.embed_tokens.weight").float()
    whole = whole_model(in_fp32(weights), torch.float32, "eager")

    output = whole(input_ids=prompt.tokens[None], output_router_logits=True)
    assert (trace.hidden[:64] @ head.T - output.logits[0]).abs().max() < 1e-4
    for layer, logits in enumerate(output.router_logits, 1):
        torch.testing.assert_close(trace.router_logits[:64, layer], logits, atol=1e-4, rtol=0)
        assert torch.equal(trace.experts[:64, layer], logits.topk(TINY.top_k).indices)

    streamed = Transformers(TINY, in_fp32(weights), CPU, "eager")
    for i, context in enumerate(prompt.contexts):
        at = slice(64 + 3 * i, 67 + 3 * i)
        hidden = streamed.decode(prompt.branches[i], context, trace, trace.experts[at])
        assert (trace.hidden[at] @ head.T - hidden @ head.T).abs().max() < 1e-4


@torch.inference_mode()
def test_cache_holds_what_transformers_would_cache() -> None:
    weights = RandomWeights(TINY, 1)
    prompt = Prompt.random(TINY, (9,), 1, 24, 0)
    trace = Reference(TINY, weights).run(prompt)
    whole = whole_model(in_fp32(weights), torch.float32, "eager")
    cache = transformers.DynamicCache()  # without a configuration it keeps what left the window
    name = Transformers(TINY, weights, CPU).cache_name
    whole(prompt.tokens[None], **{name: cache})
    enlarged = fidelity.needles(prompt.contexts, TINY.window)
    assert enlarged == [0, 1, 7]
    scale = torch.ones(24, 1, 1)
    scale[enlarged] = fidelity.NEEDLE
    for layer in range(TINY.layers):
        keys, values = (x[0].transpose(0, 1) for x in (cache.layers[layer].keys, cache.layers[layer].values))
        torch.testing.assert_close(trace.keys[layer].float(), keys * scale, atol=1e-3, rtol=1e-2)
        torch.testing.assert_close(trace.values[layer].float(), values, atol=1e-3, rtol=1e-2)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@torch.inference_mode()
def test_streamed_transformers_equals_the_whole_model_bit_for_bit(attention: str) -> None:
    weights = RandomWeights(TINY, 1)
    tokens = torch.randint(TINY.vocab, (40,), generator=torch.Generator().manual_seed(0))
    whole = whole_model(weights, torch.bfloat16, attention)
    streamed = Transformers(TINY, weights, CPU, attention)
    hidden, experts = streamed.prefill(tokens)
    assert torch.equal(hidden @ streamed.embedding.T, whole(input_ids=tokens[None]).logits[0])
    assert experts.shape == (40, TINY.layers, TINY.top_k)


class OneBuffer(TorchDecoder):
    """Gives its logits in fp32 and in the same memory each time, as a kernel does."""

    def step(self, token: int, position: int, experts: Tensor | None = None) -> Tensor:
        if not hasattr(self, "logits"):
            self.logits = torch.empty(self.shape.vocab)
        return self.logits.copy_(super().step(token, position, experts))


def test_logits_may_be_overwritten_by_the_next_step() -> None:
    own, shared = (measured(decoder, (9, 40), 70) for decoder in (TorchDecoder, OneBuffer))
    assert shared.forced == own.forced
    assert shared.ours == own.ours


class WindowTooWide(TorchDecoder):
    def __init__(self, shape: Shape, weights: RandomWeights, device: torch.device) -> None:
        super().__init__(replace(shape, window=shape.window + 1), weights, device)


class WindowTooNarrow(TorchDecoder):
    def __init__(self, shape: Shape, weights: RandomWeights, device: torch.device) -> None:
        super().__init__(replace(shape, window=shape.window - 1), weights, device)


class LosesAPage(TorchDecoder):
    def load_kv(self, layer: int, keys: Tensor, values: Tensor) -> None:
        keys = keys.clone()
        keys[4:8] = 0
        super().load_kv(layer, keys, values)


class SwapsValueHeads(TorchDecoder):
    def load_kv(self, layer: int, keys: Tensor, values: Tensor) -> None:
        super().load_kv(layer, keys, values.flip(1))


class IgnoresRouting(TorchDecoder):
    def step(self, token: int, position: int, experts: Tensor | None = None) -> Tensor:
        return super().step(token, position, None if experts is None else (experts + 1) % self.shape.experts)


def measured(decoder: fidelity.DecoderFactory, contexts: tuple[int, ...], free: int) -> fidelity.Report:
    return fidelity.measure(TINY, RandomWeights(TINY, 1), Prompt.random(TINY, contexts, 8, free, 0), decoder)


def test_a_right_decoder_is_at_parity() -> None:
    report = measured(TorchDecoder, (1, 3, 4, 5, 7, 8, 9, 16, 40), 192)
    assert [e.context for e in report.forced] == [1, 3, 4, 5, 7, 8, 9, 16, 40]
    # So small a model leaves much to chance: the limit of the real one is 1.1.
    assert all(0.7 < e.ratio < 1.4 for e in report.forced)
    assert report.kl_difference[0] <= 0 <= report.top1_difference[1]
    assert report.ours is not None
    assert report.ours.kl < 0.01
    assert report.ours.top1 > 0.9
    assert report.ours.other_experts < 0.1


@pytest.mark.parametrize("decoder", [WindowTooWide, WindowTooNarrow, LosesAPage, SwapsValueHeads, IgnoresRouting])
def test_a_wrong_decoder_fails(decoder: fidelity.DecoderFactory) -> None:
    report = measured(decoder, (9, 16, 40), 0)
    assert not report.passed
    assert max(e.ratio for e in report.forced) > 3


class Noisy(TorchDecoder):
    def step(self, token: int, position: int, experts: Tensor | None = None) -> Tensor:
        logits = super().step(token, position, experts).float()
        return logits + 0.2 * torch.randn(len(logits), generator=torch.Generator().manual_seed(position))


def test_more_noise_excludes_parity() -> None:
    report = measured(Noisy, (1,), 192)
    assert report.kl_difference[0] > 0
    assert not report.passed


def test_bootstrap_covers_the_mean() -> None:
    sample = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    low, high = fidelity.bootstrap(sample + 1.0)
    assert low < 1.0 < high
    assert high - low == pytest.approx(2 * 1.96 / 1000**0.5, rel=0.15)


def test_weights_are_the_same_each_time_and_stacked_alike() -> None:
    weights, again = RandomWeights(TINY, 3), RandomWeights(TINY, 3)
    names = list(weights.names())
    assert len(names) == len(set(names)) == 2 + 9 * 5 + 3 + 8 * (1 + 8 * 3)
    stacks = {which: again(f"model.layers.2.mlp.experts.{which}") for which in ("gate_up_proj", "down_proj")}
    for name in reversed(names):
        assert torch.equal(weights(name), again(name))
    for expert in range(TINY.experts):
        gate, up, down = (
            weights(f"model.layers.2.mlp.experts.{expert}.{x}_proj.weight") for x in ("gate", "up", "down")
        )
        assert torch.equal(stacks["gate_up_proj"][expert], torch.cat((gate, up)))
        assert torch.equal(stacks["down_proj"][expert], down)
    assert not torch.equal(weights(names[1]), RandomWeights(TINY, 4)(names[1]))
    for wrong in ("model.layers.0.mlp.gate.weight", "model.layers.0.mlp.experts.gate_up_proj", "lm_head.weight"):
        with pytest.raises(KeyError, match=r"has no tensor"):
            weights(wrong)


def test_weights_have_the_real_layers_statistics() -> None:
    shape = replace(Shape(), layers=2, vocab=64)
    weights = RandomWeights(shape)
    assert sum(name.startswith("model.layers.1.") for name in weights.names()) == 390
    for name, std in {
        "self_attn.q_proj": 0.03074,
        "self_attn.k_proj": 0.05046,
        "self_attn.v_proj": 0.01320,
        "mlp.gate": 0.08388,
        "mlp.experts.5.gate_proj": 0.02188,
        "mlp.experts.5.up_proj": 0.02144,
    }.items():
        tensor = weights(f"model.layers.1.{name}.weight").float()
        assert tensor.std().item() == pytest.approx(std, rel=0.01)
        assert abs(tensor.mean().item()) < 1e-4
    norm = weights("model.layers.1.input_layernorm.weight").float()
    assert norm.mean().item() == pytest.approx(0.2410, rel=0.02)
    assert norm.std().item() == pytest.approx(0.0469, rel=0.1)
    down = [weights(f"model.layers.1.mlp.experts.{e}.down_proj.weight").float().std().item() for e in (0, 64, 96, 127)]
    assert down == sorted(down, reverse=True)
    assert down[0] == pytest.approx(0.0285, rel=0.01)
    assert down[-1] == pytest.approx(0.0215, rel=0.01)


def test_command_writes_every_figure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(fidelity, "shape_of", lambda dims: TINY)
    out = tmp_path / "result.json"
    options = ["--decoder", "torch", "--device", "cpu", "--contexts", "1", "9", "--branches", "4", "--tokens", "70"]
    code = fidelity.main([*options, "--out", str(out)])
    result = json.loads(out.read_text())
    assert code == (0 if result["passed"] else 1)
    assert [e["context"] for e in result["forced"]] == [1, 9]
    assert {"commit", "torch", "transformers"} <= set(result["environment"])
    assert result["settings"]["tokens"] == 70
    assert result["transformers"]["kl"] > 0
    assert {"seconds", "ours", "kl_difference"} <= set(result)
    assert "routing free" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="unknown decoder"):
        fidelity.main(["--decoder", "nobody"])


class FakeKernel:
    """In the megakernel's place: takes its arguments and keeps them."""

    def __init__(self, dims: Any, weights: Any, full: Tensor, sliding: Tensor, *, max_context: int) -> None:
        self.pools = (full, sliding)
        self.routing = torch.zeros(dims.layers, dims.top_k, dtype=torch.int32)
        self.logits = torch.zeros(dims.vocab)

    def step(self, token: int, position: int, full: Tensor, sliding: Tensor, **options: Any) -> int:
        self.tables, self.options = (full, sliding), options
        return 0


def test_the_megakernel_gets_its_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fidelity, "PAGE", 64)
    monkeypatch.setattr(fidelity, "MAX_CONTEXT", 512)
    monkeypatch.setattr(fidelity, "Megakernel", FakeKernel)
    dims = fidelity.SMALL
    decoder = fidelity.MegakernelDecoder(fidelity.shape_of(dims), RandomWeights(fidelity.shape_of(dims)), CPU)
    kernel: Any = decoder._kernel
    keys, values = torch.randn(2, 330, dims.kv_heads, 128).bfloat16()
    decoder.load_kv(4, keys, values)
    decoder.load_kv(5, values, keys)
    decoder.step(7, 330, torch.ones(dims.layers, dims.top_k, dtype=torch.long))
    for group, layer, pair in ((0, 1, (keys, values)), (1, 3, (values, keys))):
        first = 0 if group == 0 else 1  # page 0 has left the window of 256
        table = kernel.tables[group][first:6]
        assert (kernel.tables[group][:first] == -1).all()
        assert len(set(table.tolist())) == len(table)
        for i, expected in enumerate(pair):
            stored = kernel.pools[group][layer][table.long(), :, i].transpose(1, 2).flatten(0, 1)
            assert torch.equal(stored[: 330 - 64 * first], expected[64 * first :])
    assert kernel.options["force_routing"].dtype == torch.int32
    with pytest.raises(SystemExit, match="not built for"):
        fidelity.MegakernelDecoder(TINY, RandomWeights(TINY), CPU)
