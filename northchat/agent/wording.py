"""How states and figures are worded, the same in every front end."""

from northchat.client import Health
from northchat.messages import Finish, Stats


def speed(stats: Stats) -> str:
    """`84 tok/s`, with a tilde when the client estimated it; empty when unknown."""
    if stats.tok_s is None:
        return ""
    return f"{'~' if stats.estimated else ''}{stats.tok_s:.{0 if stats.tok_s >= 10 else 1}f} tok/s"


def prefill(stats: Stats) -> str:
    """`reading 512 of 2,048 tokens` while the prompt is computed, else empty."""
    done, total = stats.prefill_done, stats.prefill_total
    if done is None or total is None or done >= total:
        return ""
    return f"reading {done:,} of {total:,} tokens"


def context(stats: Stats) -> str:
    if stats.context_used is None:
        return ""
    limit = f" of {stats.context_limit:,}" if stats.context_limit else ""
    return f"context {stats.context_used:,}{limit}"


def answered(finish: Finish) -> str:
    """One line on a finished answer: speed, time to first token, context, what the cache saved, an unusual end."""
    stats = finish.stats
    cached = stats.cached_tokens if stats.cached_tokens is not None else finish.usage.cached_tokens
    parts = (
        speed(stats),
        f"first token {stats.ttft_s:.2f} s" if stats.ttft_s is not None else "",
        context(stats),
        f"{cached:,} cached" if cached else "",
        {"length": "cut off at the token limit", "abort": "stopped", "error": "failed"}.get(finish.reason, ""),
    )
    return " · ".join(part for part in parts if part)


def loading(health: Health) -> str:
    """What our engine is busy with before it is ready."""
    if health.status == "failed":
        return health.message or "the engine failed; `northchat logs` tells more"
    if (progress := health.progress) is None:
        return f"starting {health.model}".rstrip()
    what = "loading weights" if progress.what == "weights" else progress.what
    if progress.total <= 0:
        return what
    share = min(progress.done / progress.total, 1)
    return f"{what} {share:.0%} ({progress.done / 1e6:.0f} of {progress.total / 1e6:.0f} MB)"


def engine(health: Health) -> str:
    """`smollm2-135m · CPU, 2 threads · int4`."""
    return " · ".join(part for part in (health.model, health.device, health.dtype) if part)


def limits(health: Health, demo: bool) -> list[str]:
    """What a user of a model that can't call tools should know, and what to do about it; else empty."""
    if health.status != "ready" or health.can_call_tools is not False:
        return []
    first = "is a demonstration: it chats, but is too small for tools or to be relied on" if demo else "only chats"
    return [
        f"{health.model} {first}.",
        "For a coding assistant use a server you have (--base-url URL --model NAME) or a machine with a Hopper GPU.",
    ]
