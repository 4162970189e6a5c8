"""The fields that chat and plain completions share, and the limits on them."""

import math

import msgspec

from northchat.host.errors import bad_request
from northchat.messages import Sampling

MAX_STOPS = 16
MAX_STOP = 256
MAX_BIASES = 1024


class SamplingFields(msgspec.Struct, kw_only=True):
    model: str | None = None
    n: int | None = None
    max_tokens: int | None = None
    stop: str | list[str] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    seed: int | None = None

    def choices(self, limit: int) -> int:
        """n. Raises ApiError."""
        n = 1 if self.n is None else self.n
        if not 1 <= n <= limit:
            raise bad_request(f"n must be in 1..{limit}.", "n")
        return n

    def stops(self) -> list[str]:
        """Raises ApiError."""
        stops = [self.stop] if isinstance(self.stop, str) else self.stop or []
        if len(stops) > MAX_STOPS:
            raise bad_request(f"At most {MAX_STOPS} stop strings are supported.", "stop")
        if any(len(stop) > MAX_STOP for stop in stops):
            raise bad_request(f"A stop string may have {MAX_STOP} characters.", "stop")
        return [stop for stop in stops if stop]

    def sampling(self) -> Sampling:
        """Raises ApiError for a value out of its range."""
        _within("temperature", self.temperature, 0, 10)
        _within("top_p", self.top_p, 0, 1)
        _within("min_p", self.min_p, 0, 1)
        _within("presence_penalty", self.presence_penalty, -2, 2)
        _within("frequency_penalty", self.frequency_penalty, -2, 2)
        _within("repetition_penalty", self.repetition_penalty, 0.01, 10)
        if self.top_p == 0:
            raise bad_request("top_p must be above 0.", "top_p")
        # -1 is what other servers call "all".
        top_k = 0 if self.top_k == -1 else self.top_k
        if top_k is not None and top_k < 0:
            raise bad_request("top_k must be 0 (all) or more.", "top_k")
        if self.seed is not None and not -(1 << 63) <= self.seed < 1 << 63:
            raise bad_request("seed must fit 64 bits.", "seed")
        return Sampling(
            temperature=self.temperature,
            top_k=top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            repetition_penalty=self.repetition_penalty,
            logit_bias=self._biases(),
            seed=self.seed,
        )

    def _biases(self) -> dict[int, float]:
        biases = self.logit_bias or {}
        if len(biases) > MAX_BIASES:
            raise bad_request(f"At most {MAX_BIASES} biases are supported.", "logit_bias")
        result = {}
        for token, bias in biases.items():
            if not token.isascii() or not token.isdigit():
                raise bad_request(f"logit_bias: {token!r} is not a token id.", "logit_bias")
            result[int(token)] = max(-100.0, min(100.0, bias))
        return result


def _within(name: str, value: float | None, low: float, high: float) -> None:
    if value is not None and not (math.isfinite(value) and low <= value <= high):
        raise bad_request(f"{name} must be in {low}..{high}.", name)
