"""Speed and correctness of the decode megakernel at batch 1 on one Hopper GPU, with random weights and keys.

    python benchmarks/decode.py                          # speed at 1K, 8K, 32K
    python benchmarks/decode.py --check                  # logits against an fp32 reference, bit stability, time-outs
    python benchmarks/decode.py --timeline timeline.svg # where each SM's time goes
    python benchmarks/decode.py --config in_flight=2 --config in_flight=3,last_experts=1   # several settings in one run

Speed is measured three ways: `step` is the public step, whose token the host waits for; `ahead` launches each step
before the last one's token is known (it never leaves the device), as the executor does; `kernel` is the time between
events around single launches. Random routing: each step's experts are as the random router chooses them.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import time
from itertools import pairwise
from typing import Any

import torch

from northchat.engine.interpreter import random_weights, reference_step
from northchat.engine.megakernel import Megakernel, MegakernelError, Weights, kv_pool
from northchat.engine.schedule import HEAD_DIM, NORTH_MINI_CODE, PAGE, SMALL, Dims, Kind, build

DIMS = {"north_mini_code": NORTH_MINI_CODE, "small": SMALL}
PEAK = 4.70e12  # bytes/s that a read-only ring of bulk copies reaches on an H200


class Bench:
    def __init__(self, dims: Dims, max_context: int) -> None:
        self.dims, self.max_context = dims, max_context
        self.get = random_weights(dims, device="cuda")
        start = time.time()
        self.weights = Weights.pack(dims, self.get)
        torch.cuda.synchronize()
        self.pack_seconds = time.time() - start
        pages = -(-max_context // PAGE) + 8
        self.pools = (
            kv_pool(dims.full_layers, pages, dims.kv_heads),
            kv_pool(dims.sliding_layers, pages, dims.kv_heads),
        )
        for i, pool in enumerate(self.pools):
            pool.normal_(0, 1, generator=torch.Generator("cuda").manual_seed(i))
        # Physical pages in no order, different for both groups.
        self.tables = tuple(
            torch.randperm(pages, generator=torch.Generator().manual_seed(2 + i))[: pages - 8].to(torch.int32)
            for i in range(2)
        )

    def kernel(self, **config: Any) -> Megakernel:
        config = dict(config)
        fixed = config.pop("fixed_experts", 0)
        sms = config.pop("num_sms", torch.cuda.get_device_properties(0).multi_processor_count)
        experts = {k: config.pop(k) for k in ("before_attention", "last_experts", "most_qkv") if k in config}
        self.forced = None
        if fixed:
            self.forced = (
                torch.arange(self.dims.top_k, dtype=torch.int32, device="cuda").repeat(self.dims.layers, 1).mul_(fixed)
            )
        return Megakernel(
            self.dims,
            self.weights,
            *self.pools,
            max_context=self.max_context,
            schedule=build(self.dims, sms, **experts),
            **config,
        )

    def bytes_per_step(self, kernel: Megakernel, context: int) -> int:
        d, s = self.dims, kernel.schedule
        total = sum(s.weight_bytes(sm, Kind.DENSE) + s.weight_bytes(sm, Kind.HEAD) for sm in range(s.num_sms))
        total += (d.layers - 1) * sum(s.weight_bytes(sm, Kind.MIXTURE) for sm in range(s.num_sms))
        return total + sum(d.span(layer, context)[2] for layer in range(d.layers)) * d.kv_heads * d.page_tile

    def cache(self, position: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """The pools' first `position` tokens as the reference wants them."""
        out = []
        for layer in range(self.dims.layers):
            group = 0 if self.dims.full(layer) else 1
            pages = self.pools[group][self.dims.index_in_group(layer)][self.tables[group].long().cuda()]
            both = pages.permute(2, 1, 0, 3, 4).reshape(2, self.dims.kv_heads, -1, HEAD_DIM)[:, :, :position].float()
            out.append((both[0], both[1]))
        return out


def check(bench: Bench, kernel: Megakernel, contexts: list[int]) -> dict[str, Any]:
    """Relative errors of logits and of each layer's residual against the fp32 reference, with the routing that the
    kernel chose.
    """
    d, result = bench.dims, {}
    hidden = torch.zeros(d.layers + 1, d.hidden, device="cuda")
    for position in contexts:
        token = (position * 7919 + 13) % d.vocab
        cache = bench.cache(position)
        hidden.fill_(float("nan"))
        kernel.logits.fill_(float("nan"))
        kernel.launch(token, position, *bench.tables, want_logits=True, hidden=hidden)
        got = kernel.result()
        chosen = kernel.routing.clone()
        seen: list[torch.Tensor] = []
        free: list[torch.Tensor] = []
        want = reference_step(d, bench.get, token, position, cache, force_routing=chosen, hidden=seen)
        states = torch.stack(seen)
        errors = ((hidden - states).norm(dim=1) / states.norm(dim=1)).tolist()
        reference_step(d, bench.get, token, position, bench.cache(position), routing=free)
        same = sum(set(a.tolist()) == set(b.tolist()) for a, b in zip(chosen[1:], free, strict=True))
        result[str(position)] = {
            "logit_error": float((kernel.logits - want).norm() / want.norm()),
            "token": got,
            "reference_token": int(want.argmax()),
            "argmax_of_logits": int(kernel.logits.argmax()),
            "residual_errors": errors,
            "layers_routed_alike": same,
        }
        r = result[str(position)]
        print(
            f"position {position:6}: logits {r['logit_error']:.2e}, residual max {max(errors):.2e} "
            f"(layer {errors.index(max(errors))}), "
            f"token {got} (reference {r['reference_token']}), routed alike in {same} of {d.layers - 1} layers",
            flush=True,
        )
    return result


def stability(bench: Bench, kernel: Megakernel, steps: int, runs: int) -> bool:
    """Whether greedy decoding from an empty context repeats bit by bit."""
    seen = set()
    for _ in range(runs):
        ids, total = [], torch.zeros((), dtype=torch.int64, device="cuda")
        for position in range(steps):
            kernel.launch(17 if position == 0 else None, position, *bench.tables, want_logits=True)
            total = total * 31 + kernel.logits.view(torch.int32).sum(dtype=torch.int64)
            ids.append(kernel._out[0].clone())
        kernel.result()
        seen.add((tuple(torch.stack(ids).tolist()), int(total)))
    return len(seen) == 1


def timeouts(bench: Bench, kernel: Megakernel) -> str:
    """A step whose SM 5 stops signalling must end in an error that names the wait, and the next one must work."""
    good = kernel.step(3, 0, *bench.tables)
    patience, kernel.timeout_s = kernel.timeout_s, 0.02
    start = time.time()
    try:
        kernel.launch(3, 0, *bench.tables, stall_sm=5)
        kernel.result()
        return "FAILED: no error"
    except MegakernelError as error:
        text = f"layer {error.layer}, {error.phase}, SM {error.sm} after {time.time() - start:.3f} s"
    kernel.timeout_s = patience
    kernel.reset()
    again = kernel.step(3, 0, *bench.tables)
    return f"{text}; afterwards {'the same token' if again == good else f'FAILED: {again} != {good}'}"


def speed(bench: Bench, kernel: Megakernel, context: int, steps: int) -> dict[str, Any]:
    tables = bench.tables

    def ahead() -> float:
        torch.cuda.synchronize()
        start = time.perf_counter()
        for i in range(steps):
            kernel.launch(None, context + i, *tables, force_routing=bench.forced)
        kernel.result()
        return (time.perf_counter() - start) / steps * 1e6

    def public() -> float:
        start = time.perf_counter()
        for i in range(steps):
            kernel.step(None, context + i, *tables, force_routing=bench.forced)
        return (time.perf_counter() - start) / steps * 1e6

    kernel.step(1, context, *tables)
    ahead()
    events = []
    for i in range(30):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        kernel.launch(None, context + i, *tables, force_routing=bench.forced)
        end.record()
        events.append((begin, end))
    kernel.result()
    alone = statistics.median(a.elapsed_time(b) * 1e3 for a, b in events)
    runs = sorted(ahead() for _ in range(3))
    stepped = sorted(public() for _ in range(3))
    moved = bench.bytes_per_step(kernel, context)
    return {
        "context": context,
        "step_us": stepped[1],
        "ahead_us": runs[1],
        "kernel_us": alone,
        "step_tok_s": 1e6 / stepped[1],
        "ahead_tok_s": 1e6 / runs[1],
        "bytes": moved,
        "of_peak": moved / PEAK / runs[1] * 1e6,
        "ahead_all": runs,
        "step_all": stepped,
    }


def bandwidth(bench: Bench, seconds: float = 3.0) -> float:
    """Bytes/s of plain reductions over the experts' weights."""
    tensors = [w.experts.view(torch.int32) for w in bench.weights.layers]
    tensors[0].amax()
    torch.cuda.synchronize()
    start, moved = time.perf_counter(), 0
    while time.perf_counter() - start < seconds:
        for tensor in tensors:
            tensor.amax()
            moved += tensor.numel() * 4
        torch.cuda.synchronize()
    return moved / (time.perf_counter() - start)


def timeline(bench: Bench, kernel: Megakernel, context: int) -> dict[str, Any]:
    """ns per layer and SM of one step: arrival, H1 passed, normed, end of each task; cycles that the first consumer
    warp waited for the ring.
    """
    d, ticks = (
        bench.dims,
        torch.zeros(kernel.schedule.num_sms, bench.dims.layers + 1, 24, dtype=torch.int64, device="cuda"),
    )
    for i in range(8):
        kernel.launch(5 if i == 0 else None, context + i, *bench.tables, ticks=ticks)
    kernel.result()
    t = ticks.double().cpu()
    layers = t[:, 1 : d.layers]
    events = {"wait H1": layers[..., 1] - layers[..., 0], "norm": layers[..., 2] - layers[..., 1]}
    names = ["QKV", "experts 1", "attention", "experts 2", "O", "experts 3"]
    for i, name in enumerate(names):
        events[name] = layers[..., 3 + i] - layers[..., 2 + i]
    events["end of layer"] = t[:, 2 : d.layers, 0] - layers[:, :-1, 8]
    events = {k: torch.where(v.abs() < 1e9, v, torch.nan) for k, v in events.items()}  # not every SM has every task
    report = {
        k: [round(float(v.nanmean()) / 1e3, 3), round(float(v.nan_to_num(0).amax(0).mean()) / 1e3, 3)]
        for k, v in events.items()
    }
    for i, name in enumerate(names[:5]):
        report[f"ring wait in {name} (cycles)"] = [
            round(float(layers[..., 9 + i].mean())),
            round(float(layers[..., 9 + i].amax(0).mean())),
        ]
    report["wait for q"] = [
        round(float(layers[..., 14].mean()) / 1e3, 3),
        round(float(layers[..., 14].amax(0).mean()) / 1e3, 3),
    ]
    report["wait for o"] = [
        round(float(layers[..., 15].mean()) / 1e3, 3),
        round(float(layers[..., 15].amax(0).mean()) / 1e3, 3),
    ]
    passed = layers[..., 1].amin(0)
    chain = ("logits seen", "routed", "routing taken by the producer", "QKV handed on", "query here", "attention done",
             "attention handed on", "all attention seen")  # fmt: skip
    for event, name in enumerate(chain, 16):
        since = (layers[..., event] - passed) / 1e3
        report[f"{name}, after the first SM passed H1"] = [
            round(float(since.mean()), 2),
            round(float(since.amax(0).mean()), 2),
        ]
    arrive = layers[..., 0]
    report["arrival spread last-first, last-median"] = [
        round(float((arrive.amax(0) - arrive.amin(0)).mean()) / 1e3, 3),
        round(float((arrive.amax(0) - arrive.median(0).values).mean()) / 1e3, 3),
    ]
    lateness = (arrive - arrive.median(0).values).mean(1)
    report["head"] = [
        round(float((t[:, d.layers, 3] - t[:, d.layers, 2]).mean()) / 1e3, 1),
        round(float((t[:, d.layers, 3] - t[:, d.layers, 2]).amax()) / 1e3, 1),
    ]
    report["step"] = [round(float(t[:, d.layers, 3].amax() - t[:, 0, 0].amin()) / 1e3, 1)]
    print("timeline, us (mean over SMs and layers, mean of the slowest SM):")
    for k, v in report.items():
        print(f"  {k:42} {v}")
    return {
        "context": context,
        "mean_and_max_us": report,
        "lateness_of_each_sm_ns": lateness.tolist(),
        "ticks": ticks[:, [9, 10, 11, 12]].cpu().tolist(),
    }


def picture(ticks: list[list[list[int]]]) -> str:
    """Two layers of a step as SVG: a row for each SM, a colour for each phase. ticks: [num_sms][layers][24], ns."""
    phases = ("wait for the residual", "norm", "QKV", "experts", "attention", "experts", "output projection", "end")
    colours = ("#d8d8d8", "#444444", "#4c78a8", "#f2a65a", "#54a24b", "#e07b39", "#9467bd", "#111111")
    start = min(sm[0][0] for sm in ticks)
    end = max(sm[2][0] for sm in ticks)
    row, left, top, scale = 4, 40, 44, 1000 / (end - start)
    out = []
    for i, sm in enumerate(ticks):
        for layer in range(2):
            # Arrival, H1 passed, normed, ends of the five tasks; then the next arrival.
            times = [*sm[layer][:8], sm[layer + 1][0]]
            for phase, (a, b) in enumerate(pairwise(times)):
                if b > a:
                    x, width = left + (a - start) * scale, (b - a) * scale
                    box = f'x="{x:.1f}" y="{top + i * row}" width="{width:.1f}" height="{row}"'
                    out.append(f'<rect {box} fill="{colours[phase]}"/>')
    bottom = top + len(ticks) * row
    for us in range(0, int((end - start) / 1000) + 1, 5):
        x = left + us * 1000 * scale
        out.append(f'<path d="M{x:.1f} {bottom}v6" stroke="#000"/><text x="{x:.1f}" y="{bottom + 18}">{us}</text>')
    for phase, name in enumerate(phases):
        x, y = left + phase % 4 * 190, 6 + phase // 4 * 18
        out.append(f'<rect x="{x}" y="{y}" width="12" height="12" fill="{colours[phase]}"/>')
        out.append(f'<text x="{x + 18}" y="{y + 11}" text-anchor="start">{name}</text>')
    out.append(f'<text x="{left + 500}" y="{bottom + 34}">microseconds; a row for each of {len(ticks)} SMs</text>')
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="1060" height="{bottom + 42}" font-family="sans-serif" '
        f'font-size="12" text-anchor="middle"><rect width="100%" height="100%" fill="#fff"/>{"".join(out)}</svg>\n'
    )


def environment() -> dict[str, str]:
    def shell(*command: str) -> str:
        try:
            return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
        except OSError:
            return ""

    driver = shell("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    return {
        "gpu": torch.cuda.get_device_name(),
        "driver": driver,
        "torch": torch.__version__,
        "commit": shell("git", "rev-parse", "HEAD"),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=DIMS, default="north_mini_code")
    parser.add_argument("--contexts", default="1024,8192,32000")
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--check-contexts", default="0,1,62,63,64,1023,4094,4095,4096,8191,32000")
    parser.add_argument("--stability", type=int, default=0, metavar="STEPS", help="greedy steps, repeated 5 times")
    parser.add_argument("--timeline", metavar="FILE", help="an SVG of two layers; figures go to --out")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--no-speed", action="store_true")
    parser.add_argument("--probe", action="store_true", help="read bandwidth for three seconds")
    parser.add_argument(
        "--config",
        action="append",
        default=[],
        help="name=number,...: in_flight, early_pages, before_attention, last_experts, most_qkv, num_sms, "
        "fixed_experts (distance of the ids forced)",
    )
    parser.add_argument("--timeout", type=float, help="seconds for a step (sanitizers); no time-out test")
    parser.add_argument("--commit", default="", help="what to record where git is not at hand")
    parser.add_argument("--out")
    a = parser.parse_args()
    result: dict[str, Any] = {"environment": environment(), "model": a.model, "runs": []}
    if a.commit:
        result["environment"]["commit"] = a.commit
    contexts = [int(c) for c in a.contexts.split(",")]
    dims = DIMS[a.model]
    bench = Bench(dims, 1024 if a.model == "small" else 32768)
    print(f"{result['environment']}; weights packed in {bench.pack_seconds:.1f} s", flush=True)
    for text in a.config or [""]:
        config = {k: int(v) for k, v in (item.split("=") for item in text.split(",") if item)}
        kernel = bench.kernel(**config)
        entry: dict[str, Any] = {"config": config}
        result["runs"].append(entry)
        if a.check and len(result["runs"]) == 1:
            if a.timeout:
                kernel.timeout_s = a.timeout
            else:
                entry["timeout"] = timeouts(bench, kernel)
                print("time-out:", entry["timeout"], flush=True)
            entry["check"] = check(
                bench, kernel, [int(c) for c in a.check_contexts.split(",") if int(c) < bench.max_context]
            )
        if a.stability and len(result["runs"]) == 1:
            entry["bit_stable"] = stability(bench, kernel, a.stability, 5)
            print(f"5 x {a.stability} greedy steps bit-identical: {entry['bit_stable']}", flush=True)
        if not a.no_speed:
            entry["speed"] = [speed(bench, kernel, c, a.steps) for c in contexts if c + a.steps <= bench.max_context]
            for r in entry["speed"]:
                print(
                    f"{text or 'default':40} context {r['context']:6}: "
                    f"step {r['step_us']:7.1f} us {r['step_tok_s']:6.1f} tok/s | "
                    f"ahead {r['ahead_us']:7.1f} us {r['ahead_tok_s']:6.1f} tok/s | kernel {r['kernel_us']:7.1f} us | "
                    f"{r['bytes'] / 1e9:.3f} GB, {100 * r['of_peak']:.1f} % of 4.70 TB/s",
                    flush=True,
                )
        if a.timeline and len(result["runs"]) == 1:
            entry["timeline"] = found = timeline(bench, kernel, contexts[min(1, len(contexts) - 1)])
            with open(a.timeline, "w", encoding="utf-8") as file:
                file.write(picture(found["ticks"]))
        del kernel
    if a.probe:
        result["read_bandwidth"] = bandwidth(bench)
        print(f"read probe: {result['read_bandwidth'] / 1e12:.2f} TB/s")
    if a.out:
        with open(a.out, "w", encoding="utf-8") as file:
            json.dump(result, file, indent=1)


if __name__ == "__main__":
    main()
