"""The engine on the CPU against transformers and llama.cpp: same file, same machine, same run.

    python -m benchmarks.cpu --out benchmarks/results/cpu.json [--llama-cpp PYTHON]

Figures that are compared are taken in turns, round by round, and the best of each counts, for others may use the
machine meanwhile. llama.cpp is measured if llama-cpp-python can be imported by PYTHON (by default this interpreter).
"""

import argparse
import json
import platform
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from northchat.chat.chatml import ChatML
from northchat.engine import cpu
from northchat.engine.core import LIMITS
from northchat.engine.executor import PAGE
from northchat.engine.kv_cache import KVCache, plan
from northchat.engine.protocol import Sampling, Submit
from northchat.engine.scheduler import Scheduler
from northchat.messages import Message, Turn
from northchat.messages import Sampling as Defaults
from northchat.model.catalog import resolve
from northchat.model.checkpoint import open_weights
from northchat.model.paged_kv import PagedKV, Span
from northchat.model.tokenizer import Tokenizer

PROMPTS = (
    "What is the capital of France?", "Write a Python function that reverses a string.", "Tell me a story about a fox.",
    "Explain gravity to a child.", "List five fruits.", "What is 12 times 12?", "Write a haiku about rain.",
    "How do I boil an egg?", "Who wrote Hamlet?", "Translate 'good morning' into Spanish.", "What is photosynthesis?",
    "Give me three tips for better sleep.", "What does HTTP stand for?", "Describe the colour blue.",
    "Why is the sky dark at night?", "Write a limerick about a cat.", "What is a prime number?",
    "Name the planets of the solar system.", "How does a bicycle stay upright?", "Summarise the plot of Cinderella.",
)  # fmt: skip
ANSWER = 64
"""Tokens decoded in each timing and comparison."""
PROMPT = 512
LONG = 2000
STREAMS = 8
BATCH_PAGES = 7
"""So few that the requests running at once don't fit to their ends, and some are preempted."""


class Engine:
    """Scheduler, pages and executor as the core drives them, without its process."""

    def __init__(self, executor: cpu.CpuExecutor, pages: int | None = None, chunk: int | None = None) -> None:
        limits = LIMITS["cpu"]
        self.chunk = chunk or limits.chunk
        counts, self.longest = plan(
            executor.groups, limits.kv_memory, executor.max_context, limits.rows, self.chunk, PAGE
        )
        self.pages = [pages] if pages else counts
        self.executor = executor
        executor.allocate(self.pages)
        self.forget()
        self._rid = 0

    def forget(self) -> None:
        """Drop the prefix cache."""
        cache = KVCache(self.executor.groups, self.pages, self.chunk, PAGE)
        longest = min(self.longest, self.pages[0] * PAGE)
        self.scheduler = Scheduler(
            cache, self.executor.vocab_size, longest, self.chunk, min(self.chunk, LIMITS["cpu"].mixed_chunk), 16
        )

    def run(self, prompts: Sequence[Sequence[int]], tokens: int = ANSWER) -> tuple[list[list[int]], float, float]:
        """Greedy answers; seconds until all have their first token; tokens per second of all together after that."""
        first = self._rid
        self._rid += len(prompts)
        start = time.perf_counter()
        begun = start
        for offset, prompt in enumerate(prompts):
            refused = self.scheduler.add(Submit(first + offset, list(prompt), tokens, Sampling()))
            assert refused is None, refused
        answers: list[list[int]] = [[] for _ in prompts]
        given = 0
        while self.scheduler.busy:
            started = all(answers)
            launch = self.scheduler.schedule()
            for output in self.scheduler.publish(launch, self.executor.poll(self.executor.submit(launch.batch))):
                answers[output.rid - first] += output.ids
                given += len(output.ids) if started else 0
            if all(answers) and not started:
                begun = time.perf_counter()
        for rid in self.scheduler.retired:
            self.executor.release(rid)
        self.scheduler.retired.clear()
        return answers, begun - start, given / (time.perf_counter() - begun)


class Transformers:
    """LlamaForCausalLM with the file's weights, dequantised."""

    def __init__(self, path: Path, dtype: torch.dtype) -> None:
        weights = open_weights(path)
        c = weights.config
        config = LlamaConfig(
            **{key: value for key, value in c.items() if not key.startswith("rope") and not key.endswith("token_id")}
        )
        config.rope_parameters = {"rope_type": "default", "rope_theta": c["rope_theta"]}
        self.model = LlamaForCausalLM(config)
        self.model.train(False)
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                parameter.copy_(weights.load(name, tuple(parameter.shape)))
        self.model.to(dtype)

    def logits(self, ids: Sequence[int]) -> torch.Tensor:
        logits: torch.Tensor = self.model(torch.tensor([ids])).logits
        return logits[0].float()

    def run(self, prompt: Sequence[int], tokens: int = ANSWER) -> tuple[list[int], float, float]:
        """As Engine.run for one prompt."""
        start = time.perf_counter()
        cache = DynamicCache()
        ids = torch.tensor([prompt])
        answer: list[int] = []
        begun = start
        for _ in range(tokens):
            out = self.model(ids, past_key_values=cache, logits_to_keep=1)
            ids = out.logits[:, -1].argmax(-1, keepdim=True)
            answer.append(int(ids))
            if len(answer) == 1:
                begun = time.perf_counter()
        return answer, begun - start, (tokens - 1) / (time.perf_counter() - begun)


_LLAMA_CPP = """
import json, sys, time, llama_cpp
path, threads = sys.argv[1], int(sys.argv[2])
model = llama_cpp.Llama(path, n_ctx=4096, n_threads=threads, n_threads_batch=threads, n_batch=512, verbose=False)
print(json.dumps([llama_cpp.__version__, llama_cpp.llama_print_system_info().decode()]), flush=True)
for line in sys.stdin:
    prompt, tokens = json.loads(line)
    model.reset()
    start = time.perf_counter()
    model.eval(prompt)
    token = model.sample(temp=0)
    begun = time.perf_counter()
    for _ in range(tokens - 1):
        model.eval([token])
        token = model.sample(temp=0)
    print(json.dumps([begun - start, (tokens - 1) / (time.perf_counter() - begun)]), flush=True)
"""


class LlamaCpp:
    def __init__(self, python: str, path: Path) -> None:
        """Raises OSError when llama-cpp-python isn't there or can't load the model."""
        self._process = subprocess.Popen(
            [python, "-c", _LLAMA_CPP, str(path), str(cpu.threads())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        line = self._process.stdout.readline() if self._process.stdout else ""
        if not line:
            raise OSError
        self.version, self.system = json.loads(line)

    def run(self, prompt: Sequence[int], tokens: int = ANSWER) -> tuple[float, float]:
        assert self._process.stdin
        assert self._process.stdout
        print(json.dumps([list(prompt), tokens]), file=self._process.stdin, flush=True)
        first, rate = json.loads(self._process.stdout.readline())
        return first, rate

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


@contextmanager
def llama_cpp(python: str, path: Path) -> Iterator[LlamaCpp | None]:
    try:
        peer = LlamaCpp(python, path)
    except OSError:
        print("llama-cpp-python isn't there; not measured")
        yield None
        return
    try:
        yield peer
    finally:
        peer.close()


def speed(path: Path, text: Sequence[int], rounds: int, python: str) -> dict[str, Any]:
    engine = Engine(cpu.load(path, "auto", _silent))
    reference = Transformers(path, torch.bfloat16)
    short, prompt = text[:64], text[:PROMPT]
    figures: dict[str, list[float]] = {}

    def note(**values: float) -> None:
        for name, value in values.items():
            figures.setdefault(name, []).append(value)

    with llama_cpp(python, path) as peer:
        for _ in range(rounds):
            engine.forget()
            note(decode=engine.run([short])[2])
            note(streams=engine.run([text[i * 64 : i * 64 + 64] for i in range(STREAMS)])[2])
            note(prefill=PROMPT / engine.run([prompt], 1)[1])
            note(transformers_decode=reference.run(short, ANSWER // 2)[2])
            note(transformers_prefill=PROMPT / reference.run(prompt, 1)[1])
            if peer:
                note(llama_cpp_decode=peer.run(short)[1], llama_cpp_prefill=PROMPT / peer.run(prompt, 1)[0])
            engine.forget()
            answers, cold, _ = engine.run([text[:LONG]], 8)
            follow_up = [*text[:LONG], *answers[0], *text[LONG : LONG + 40]]
            note(first_token_cold=cold, first_token_second_turn=engine.run([follow_up], 1)[1])
    best = {name: min(v) if name.startswith("first") else max(v) for name, v in figures.items()}
    ratios = {
        "decode / transformers": best["decode"] / best["transformers_decode"],
        "8 streams / transformers": best["streams"] / best["transformers_decode"],
        "prefill / transformers": best["prefill"] / best["transformers_prefill"],
        "second turn / cold": best["first_token_second_turn"] / best["first_token_cold"],
    }
    if peer:
        ratios["decode / llama.cpp"] = best["decode"] / best["llama_cpp_decode"]
        ratios["prefill / llama.cpp"] = best["prefill"] / best["llama_cpp_prefill"]
    return {
        "unit": "tokens per second; first_token: seconds",
        "best": _rounded(best),
        "ratios": _rounded(ratios),
        "rounds": {name: [_round(v) for v in values] for name, values in figures.items()},
        "llama_cpp": f"{peer.version}: {peer.system}" if peer else None,
    }


def equality(path: Path, prompts: Sequence[list[int]]) -> dict[str, bool]:
    """Whether greedy answers in float32 are transformers', token by token."""
    reference = Transformers(path, torch.float32)
    expected = [reference.run(prompt)[0] for prompt in prompts]
    executor = cpu.load(path, "float32", _silent)
    roomy = Engine(executor)
    results = {"alone": [roomy.run([prompt])[0][0] for prompt in prompts] == expected}
    long = [[*prompt, *answer[:-8]] for prompt, answer in zip(prompts, expected, strict=True)]
    results["after a cache hit"] = [roomy.run([ids], 8)[0][0] for ids in long] == [answer[-8:] for answer in expected]
    roomy.forget()
    results["batched"] = roomy.run(prompts)[0] == expected
    results["chunked"] = Engine(executor, chunk=17).run(prompts)[0] == expected
    tight = Engine(executor, pages=BATCH_PAGES)
    results["after preemption"] = tight.run(prompts)[0] == expected and tight.scheduler.preemptions > 0
    return results


def accuracy(path: Path, text: Sequence[int]) -> dict[str, Any]:
    """Mean KL divergence from float32, and how often the likeliest token agrees; decoding's and prefill's products."""
    ids = text[:LONG]
    exact = Transformers(path, torch.float32).logits(ids).log_softmax(-1)

    def compare(logits: torch.Tensor) -> dict[str, float]:
        other = logits.log_softmax(-1)
        divergence = (exact.exp() * (exact - other)).sum(-1).mean()
        agree = (exact.argmax(-1) == other.argmax(-1)).float().mean()
        return {"kl": float(divergence), "top1": float(agree)}

    model = cpu.load(path, "auto", _silent)._model
    found = {"transformers bfloat16": compare(Transformers(path, torch.bfloat16).logits(ids))}
    for name, chunk in (("prefill", 256), ("decode", 1)):
        c = model.config
        pages = list(range(-(-LONG // PAGE)))
        kv = PagedKV(len(c.groups[0][0]), c.kv_heads, c.head_dim, len(pages), PAGE, model.dtype)
        parts = []
        for at in range(0, LONG, chunk):
            part = ids[at : at + chunk]
            states = model.hidden(torch.tensor(part), [kv.plan([Span(at, len(part), pages)])], [kv])
            parts.append(model.logits(states))
        found[f"auto, {name}"] = compare(torch.cat(parts))
    base = found["transformers bfloat16"]["kl"]
    return {name: _rounded(v | {"kl ratio": v["kl"] / base}) for name, v in found.items()}


def memory(path: Path) -> None:
    """In a process of its own, prints MiB: resident after loading, and at the peak of a long conversation."""
    engine = Engine(cpu.load(path, "auto", _silent))
    loaded = _status("VmRSS")
    engine.run([[i % 1000 for i in range(engine.longest - ANSWER - 1)]])
    print(json.dumps({"loaded_mib": loaded, "peak_mib": _status("VmHWM"), "context": engine.longest}))


def _status(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(field)).split()[1]) >> 10


def _silent(what: str, done: int, total: int) -> None:
    pass


def _round(value: float) -> float:
    return float(f"{value:.4g}")


def _rounded(values: dict[str, float]) -> dict[str, float]:
    return {name: _round(value) for name, value in values.items()}


def _cpu_name() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def _commit() -> str:
    done = subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=False)
    return done.stdout.strip()


def main() -> None:
    parser = argparse.ArgumentParser(description="The engine on the CPU against transformers and llama.cpp")
    parser.add_argument("--model", default="smollm2-135m", help="a name of the catalog or a GGUF file, ChatML llama")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--llama-cpp", default=sys.executable, metavar="PYTHON")
    parser.add_argument("--only", choices=["speed", "equality", "accuracy", "memory"])
    parser.add_argument("--memory-of", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help="write the figures there as JSON")
    args = parser.parse_args()
    if args.memory_of:
        with torch.inference_mode():
            memory(args.memory_of)
        return
    files = resolve(args.model).fetch(_silent)
    tokenizer = Tokenizer(files.tokenizer_json)
    chat = ChatML(tokenizer, Defaults())
    prompts = [chat.render(Turn([Message("user", text)]), lambda message: None) for text in PROMPTS]
    text = tokenizer.encode("\n".join(topics[name] for name in sorted(topics))[:40_000])
    results: dict[str, Any] = {
        "model": args.model,
        "cpu": _cpu_name(),
        "threads": cpu.threads(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "commit": _commit(),
    }
    torch.set_num_threads(cpu.threads())
    with torch.inference_mode():
        for name, measure in (
            ("memory", lambda: _memory(files.path)),
            ("speed", lambda: speed(files.path, text, args.rounds, args.llama_cpp)),
            ("accuracy", lambda: accuracy(files.path, text)),
            ("equality", lambda: equality(files.path, prompts)),
        ):
            if args.only in (None, name):
                results[name] = measure()
                print(name, json.dumps(results[name], indent=1))
    if args.out:
        args.out.write_text(json.dumps(results, indent=1) + "\n")


def _memory(path: Path) -> Any:
    command = [sys.executable, "-m", "benchmarks.cpu", "--memory-of", str(path)]
    return json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


if __name__ == "__main__":
    main()
