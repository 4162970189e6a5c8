"""Frames between host and core: msgpack behind a 4-byte little-endian length, over a socketpair.

The core speaks token ids alone. Text, stop strings, chat formats and HTTP are the host's.
"""

import socket
import struct
from collections.abc import Iterator
from typing import Literal

import msgspec

VERSION = 1
MAX_FRAME = 64 << 20


class Sampling(msgspec.Struct, omit_defaults=True):
    """Resolved sampling parameters; the defaults are greedy."""

    temperature: float = 0.0
    top_k: int = 0
    """0: all."""
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = {}
    seed: int | None = None
    logprobs: int | None = None
    """None: none; k: the chosen token's log-probability and those of the k likeliest (0..20)."""


class Submit(msgspec.Struct, tag="submit"):
    rid: int
    """Unique for the life of the core; chosen by the host."""
    prompt: list[int]
    max_tokens: int
    sampling: Sampling
    stop_ids: list[int] = []
    """Generation ends with one of these; it is reported as the last id."""
    min_tokens: int = 0
    """Stop ids are not sampled before that many tokens."""
    prompt_logprobs: int | None = None
    """As Sampling.logprobs, for each prompt token after the first (disables prefix hits)."""
    grammar: str = ""
    """What the answer must be (engine/grammar.py); empty: anything. min_tokens doesn't count then."""
    generated: int = 0
    """How many of the prompt's last ids belong to the answer already, as far as the grammar is concerned."""


class Abort(msgspec.Struct, tag="abort"):
    rid: int


class Shutdown(msgspec.Struct, tag="shutdown"):
    pass


ToCore = Submit | Abort | Shutdown


class Loading(msgspec.Struct, tag="loading"):
    what: str
    done: int
    total: int
    """Bytes."""


class Ready(msgspec.Struct, tag="ready"):
    """The model is loaded and requests will be served; sent once."""

    version: int
    device: str
    """As the status bar shows it: `CPU, 2 threads` or the GPU's name."""
    dtype: str
    """As the status bar shows it: `int4`, `bfloat16`, `float32`."""
    vocab_size: int
    max_model_len: int
    """Tokens of prompt and output together that one request may have; may be less than the model's own limit."""
    notes: list[str] = []
    """Lines for the user, e.g. that max_model_len was lowered to fit memory."""


class Failed(msgspec.Struct, tag="failed"):
    """The core can't start; it exits after this. One line that names cause and remedy."""

    message: str


class Logprob(msgspec.Struct):
    token: int
    logprob: float
    top: list[tuple[int, float]] = []


class Output(msgspec.Struct, tag="output", omit_defaults=True):
    """What one step brought for one request."""

    rid: int
    ids: list[int] = []
    logprobs: list[Logprob] = []
    prompt_logprobs: list[Logprob] = []
    finish: Literal["stop", "length", "abort", "error"] | None = None
    message: str = ""
    """With finish=error: what went wrong, in one line."""
    computed: int = 0
    """Prompt tokens computed or found cached so far (set while prefilling)."""
    cached: int | None = None
    """Prompt tokens found in the prefix cache; set in the first output after admission."""
    tok_s: float | None = None
    """Decode rate of this request over about the last second."""


class Step(msgspec.Struct, tag="step", omit_defaults=True):
    outputs: list[Output]
    running: int = 0
    waiting: int = 0
    kv_used: float = 0.0
    """Share of pages held by running requests, 0..1."""
    preemptions: int = 0
    """Since the start."""


FromCore = Loading | Ready | Failed | Step

_header = struct.Struct("<I")
_encoder = msgspec.msgpack.Encoder()


class ProtocolError(Exception):
    """The peer sent bytes that are no frame of this version."""


def encode(frame: ToCore | FromCore) -> bytes:
    body = _encoder.encode(frame)
    return _header.pack(len(body)) + body


class FrameBuffer:
    """Cuts a byte stream into frames of one direction.

    Raises ProtocolError when a frame is over MAX_FRAME bytes or can't be decoded.
    """

    def __init__(self, types: object) -> None:
        self._decoder = msgspec.msgpack.Decoder(types)
        self._bytes = bytearray()

    def feed(self, data: bytes) -> Iterator[object]:
        self._bytes += data
        while len(self._bytes) >= _header.size:
            (size,) = _header.unpack_from(self._bytes)
            if size > MAX_FRAME:
                raise ProtocolError(f"frame of {size} bytes is over the limit of {MAX_FRAME}")
            end = _header.size + size
            if len(self._bytes) < end:
                return
            body = bytes(self._bytes[_header.size : end])
            del self._bytes[:end]
            try:
                yield self._decoder.decode(body)
            except msgspec.MsgspecError as error:
                raise ProtocolError(str(error)) from error


def send(sock: socket.socket, frame: ToCore | FromCore) -> None:
    sock.sendall(encode(frame))
