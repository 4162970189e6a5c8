"""A core without a model: speaks the frames of engine/protocol.py and answers as a script says.

Run as a core is: `scripted_core.py --model SCRIPT --device D --dtype T --fd N`, SCRIPT being a JSON file that is read
anew for each request. Its keys, all optional:

  load          seconds of loading
  fail          a line: can't start
  answers       list of texts (or lists of ids), taken in turn; the default echoes the prompt's last 64 ids
  delay         seconds between tokens        prefill   seconds between prefill reports (8 per prompt)
  per_step      tokens of one output          crash_on  a text in the prompt at which to die
  hang_on       a text in the prompt at which to fall silent, working
  error_on      a text in the prompt for which the request fails
  max_model_len
"""

import argparse
import ctypes
import json
import os
import selectors
import signal
import socket
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from northchat.engine import protocol

MARKERS = {"<|im_start|>": 256, "<|im_end|>": 257, "<|endoftext|>": 258}
VOCAB = 260


class ByteTokenizer:
    """A token is a byte; three markers."""

    markers = MARKERS
    vocab_size = VOCAB

    def __init__(self, path: Path | None = None) -> None:
        del path

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def token_id(self, marker: str) -> int | None:
        return MARKERS.get(marker)

    def decode_bytes(self, ids: Any) -> bytes:
        names = {token: marker.encode() for marker, token in MARKERS.items()}
        return b"".join(names.get(token) or bytes([token]) for token in ids)


@dataclass
class Running:
    request: protocol.Submit
    ids: list[int]
    done: int = 0
    prefilled: int = 0
    due: float = 0.0
    stuck: bool = False
    error: bool = False
    started: float = field(default_factory=time.monotonic)


class Core:
    def __init__(self, sock: socket.socket, path: Path, device: str) -> None:
        self.sock = sock
        self.path = path
        self.device = device
        self.requests: dict[int, Running] = {}
        self.answered = 0

    @property
    def script(self) -> dict[str, Any]:
        script: dict[str, Any] = json.loads(self.path.read_text())
        return script

    def load(self) -> None:
        script = self.script
        seconds = script.get("load", 0.0)
        for part in range(4):
            protocol.send(self.sock, protocol.Loading("loading weights", part * 25, 100))
            time.sleep(seconds / 4)
        if "fail" in script:
            protocol.send(self.sock, protocol.Failed(script["fail"]))
            sys.exit(1)
        limit = script.get("max_model_len", 2048)
        protocol.send(self.sock, protocol.Ready(protocol.VERSION, f"scripted {self.device}", "int8", VOCAB, limit))

    def serve(self) -> None:
        self.sock.setblocking(False)
        frames = protocol.FrameBuffer(protocol.ToCore)
        selector = selectors.DefaultSelector()
        selector.register(self.sock, selectors.EVENT_READ)
        while True:
            now = time.monotonic()
            dues = [request.due for request in self.requests.values() if not request.stuck]
            if selector.select(max(0.0, min(dues) - now) if dues else None):
                data = self.sock.recv(1 << 18)
                if not data:
                    return
                for frame in frames.feed(data):
                    match frame:
                        case protocol.Submit():
                            self.submit(frame)
                        case protocol.Abort(rid):
                            self.log(f"abort {rid}")
                            self.requests.pop(rid, None)
                        case protocol.Shutdown():
                            return
            self.step()

    def submit(self, request: protocol.Submit) -> None:
        script = self.script
        text = ByteTokenizer().decode_bytes(request.prompt).decode(errors="replace")
        self.log(f"submit {request.rid} {request.max_tokens} {json.dumps(text)}")
        if script.get("crash_on") and script["crash_on"] in text:
            os.kill(os.getpid(), signal.SIGSEGV)
        answers = script.get("answers")
        if answers:
            answer = answers[self.answered % len(answers)]
            self.answered += 1
            ids = [*answer.encode(), 257] if isinstance(answer, str) else list(answer)
        else:
            ids = [*[token for token in request.prompt if token < 256][-64:], 257]
        running = Running(request, ids)
        running.stuck = bool(script.get("hang_on")) and script["hang_on"] in text
        running.error = bool(script.get("error_on")) and script["error_on"] in text
        self.requests[request.rid] = running

    def step(self) -> None:
        now = time.monotonic()
        outputs = []
        script = self.script if self.requests else {}
        for rid, running in list(self.requests.items()):
            if running.stuck or running.due > now:
                continue
            output = self.advance(running, script, now)
            if output.finish is not None:
                del self.requests[rid]
            outputs.append(output)
        if outputs:
            self.sock.setblocking(True)
            protocol.send(self.sock, protocol.Step(outputs, running=len(self.requests)))
            self.sock.setblocking(False)

    def advance(self, running: Running, script: dict[str, Any], now: float) -> protocol.Output:
        request = running.request
        output = protocol.Output(request.rid)
        if running.error:
            output.finish, output.message = "error", "scripted failure"
            return output
        total = len(request.prompt)
        if running.prefilled < total:
            if running.prefilled == 0:
                output.cached = 0
            running.prefilled = min(total, running.prefilled + max(1, total // 8))
            output.computed = running.prefilled
            running.due = now + script.get("prefill", 0.0)
            if running.prefilled < total:
                return output
        piece = running.ids[running.done : running.done + script.get("per_step", 1)]
        piece = piece[: request.max_tokens - running.done]
        for at, token in enumerate(piece):
            if token in request.stop_ids:
                piece = piece[: at + 1]
                output.finish = "stop"
        running.done += len(piece)
        output.ids = piece
        output.tok_s = 100.0
        if request.sampling.logprobs is not None:
            top = [(token, -0.5) for token in range(65, 65 + request.sampling.logprobs)]
            output.logprobs = [protocol.Logprob(token, -0.25, top) for token in piece]
        if request.prompt_logprobs is not None and running.done == len(piece):
            output.prompt_logprobs = [protocol.Logprob(token, -1.0, []) for token in request.prompt[1:]]
        if output.finish is None and (running.done >= request.max_tokens or running.done >= len(running.ids)):
            output.finish = "length"
        running.due = now + script.get("delay", 0.0)
        return output

    def log(self, line: str) -> None:
        with self.path.with_suffix(".log").open("a") as file:
            file.write(line + "\n")


def main() -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # die with the host, as real cores do
    parser = argparse.ArgumentParser()
    for option in ("--model", "--device", "--dtype", "--tokenizer"):
        parser.add_argument(option)
    parser.add_argument("--fd", type=int)
    options = parser.parse_args()
    with socket.socket(fileno=options.fd) as sock:
        core = Core(sock, Path(options.model), options.device)
        core.log(f"start {os.getpid()}")
        try:
            core.load()
            core.serve()
        except ConnectionError:
            pass


if __name__ == "__main__":
    main()
