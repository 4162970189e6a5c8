"""The terminal app as its user feels it, through a pseudo terminal of 120x40.

    python -m benchmarks.tui --out benchmarks/results/tui.json

First with a server that serves known texts at a known rate: how much later the last word is on the screen than it was
served, what share of a core the app takes, how many bytes a token costs the terminal. Then with SmolLM2 decoding on
the same cores: time to the first paint and to the first key's echo, echo of keys while an answer streams, and the
engine's tokens per second beside those of `northchat -p` for the same question.
"""

import argparse
import asyncio
import fcntl
import json
import os
import platform
import pty
import re
import select
import signal
import statistics
import struct
import subprocess
import sys
import tempfile
import termios
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROWS, COLUMNS = 40, 120
KEY = "¤"
"""A character that no answer contains: each time the terminal gets it, the prompt was drawn."""
END = "zzTHEENDzz"
STORY = "Write a long story about a sailor, at least 900 words, with many details."
TEXTS = {
    "prose": "".join(f"Some prose with number {n}, and a little more. " + "\n\n" * (n % 9 == 8) for n in range(110)),
    "list": "".join(f"- item {n} with **bold** and `code`\n" for n in range(140)),
    "code": "```python\n" + "".join(f"def f{n}(x):\n    return x + {n}  # comment\n" for n in range(90)) + "```\n",
    "table": "| a | b | c |\n|---|---|--:|\n" + "".join(f"| row {n} | some text | {n * n} |\n" for n in range(110)),
}
_SEQUENCE = re.compile(rb"\x1b\[[0-9;?<>=:$]*[ -/]?[@-~]")


class App:
    """`python -m northchat` in a pseudo terminal."""

    def __init__(self, *arguments: str) -> None:
        self.began = time.monotonic()
        self.pid, self._fd = pty.fork()
        if self.pid == 0:
            os.environ.update(TERM="xterm-256color", COLORTERM="truecolor")
            os.execv(sys.executable, [sys.executable, "-m", "northchat", *arguments])
        fcntl.ioctl(self._fd, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
        self.written = bytearray()

    def send(self, keys: str) -> None:
        os.write(self._fd, keys.encode())

    def read(self, seconds: float, until: str = "", since: int | None = None) -> bool:
        """Whether `until` is among what was written since then (a length of `written`), by default since now."""
        wanted, end = until.encode(), time.monotonic() + seconds
        since = len(self.written) if since is None else since
        while not (wanted and wanted in _SEQUENCE.sub(b"", bytes(self.written[since:]))):
            if not select.select([self._fd], [], [], max(0.0, end - time.monotonic()))[0]:
                return False
            self.written += os.read(self._fd, 65536)
        return True

    def must_read(self, until: str, seconds: float = 120.0, since: int | None = None) -> float:
        """Seconds since the start."""
        if not self.read(seconds, until, since):
            raise SystemExit(f"{until!r} did not appear within {seconds:.0f} s:\n{self.tail()}")
        return time.monotonic() - self.began

    def tail(self) -> str:
        return _SEQUENCE.sub(b"", bytes(self.written[-3_000:])).decode(errors="replace")

    def cpu(self) -> float:
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(") ")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def memory(self) -> float:
        """Resident megabytes."""
        return int(Path(f"/proc/{self.pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6

    def close(self) -> None:
        os.kill(self.pid, signal.SIGTERM)
        end = time.monotonic() + 10
        while os.waitpid(self.pid, os.WNOHANG)[0] == 0:
            if time.monotonic() > end:
                os.kill(self.pid, signal.SIGKILL)
            select.select([self._fd], [], [], 0.05)
        os.close(self._fd)


class Server:
    """Streams `text` at `rate` tokens per second to whoever asks; `served` is when the last one left."""

    def __init__(self) -> None:
        self.text, self.rate, self.served, self.tokens = "", 100.0, 0.0, 0
        self.url = ""

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                length = re.search(rb"(?i)content-length: (\d+)", head)
                await reader.readexactly(int(length[1]) if length else 0)
                if head.startswith(b"GET"):
                    body = b'{"object":"list","data":[{"id":"scripted","max_model_len":8192}]}'
                    kind = b"application/json\r\ncontent-length: %d" % len(body)
                    writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: " + kind + b"\r\n\r\n" + body)
                else:
                    await self._stream(writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass

    async def _stream(self, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
        pieces = re.findall(r"\s*\S{1,5}", f"{self.text}\n\n{END}")
        self.tokens, began = len(pieces), time.monotonic()
        for number, piece in enumerate(pieces, 1):
            await asyncio.sleep(max(0.0, began + number / self.rate - time.monotonic()))
            if writer.is_closing():
                raise ConnectionError
            chunk: dict[str, Any] = {"choices": [{"index": 0, "delta": {"content": piece}}]}
            chunk["northchat"] = {"tok_s": self.rate, "context_used": number, "context_limit": 8192}
            self._write(writer, b"data: " + json.dumps(chunk).encode() + b"\n\n")
        self.served = time.monotonic()
        self._write(writer, b"data: [DONE]\n\n")
        writer.write(b"0\r\n\r\n")

    def _write(self, writer: asyncio.StreamWriter, data: bytes) -> None:
        writer.write(b"%x\r\n%s\r\n" % (len(data), data))


@contextmanager
def serving() -> Iterator[Server]:
    server, loop = Server(), asyncio.new_event_loop()
    listening = loop.run_until_complete(asyncio.start_server(server.handle, "127.0.0.1", 0))
    server.url = f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}/v1"
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    yield server
    loop.call_soon_threadsafe(listening.close)
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


def streamed(server: Server, kind: str, rate: float) -> dict[str, Any]:
    server.text, server.rate = TEXTS[kind], rate
    app = App("--base-url", server.url)
    try:
        app.must_read("ready", since=0)
        app.read(1.0)
        before, cpu, began = len(app.written), app.cpu(), time.monotonic()
        app.send("go\r")
        app.must_read(END)
        seen = time.monotonic()
        return {
            "text": kind,
            "tok_s": rate,
            "tokens": server.tokens,
            "wall_over_served": round((seen - began) / (server.served - began), 3),
            "share_of_a_core": round((app.cpu() - cpu) / (seen - began), 3),
            "bytes_per_token": round((len(app.written) - before) / server.tokens),
        }
    finally:
        app.close()


def local(seconds: float) -> dict[str, Any]:
    app = App("--model", "smollm2-135m")
    try:
        paint = app.must_read("sk anything", 20)  # the cursor stands on the A
        app.send(KEY)
        typing = app.must_read(KEY, 20)
        app.send("\x7f")
        ready = app.must_read("ready", since=0)
        app.read(1.0)
        idle = len(app.written)
        app.read(3.0)
        idle = len(app.written) - idle
        app.send(f"{STORY}\r")
        app.must_read("answering")
        app.read(1.0)
        # Without keys first: following them here costs the engine more than the app does.
        since, cpu, began = len(app.written), app.cpu(), time.monotonic()
        app.read(seconds)
        speeds = [float(found) for found in re.findall(rb"([\d.]+) tok/s", bytes(app.written[since:]))]
        share = (app.cpu() - cpu) / (time.monotonic() - began)
        began = time.monotonic()
        echoes = []
        while time.monotonic() - began < seconds:
            pressed = time.monotonic()
            app.send(KEY)
            if not app.read(5.0, KEY):
                raise SystemExit(f"no echo within 5 s:\n{app.tail()}")
            echoes.append((time.monotonic() - pressed) * 1e3)
            app.read(0.08)
        cuts = statistics.quantiles(echoes, n=100)
        return {
            "first_paint_s": round(paint, 3),
            "typing_s": round(typing, 3),
            "ready_s": round(ready, 2),
            "idle_bytes_in_3_s": idle,
            "keys": len(echoes),
            "echo_p50_ms": round(cuts[49], 1),
            "echo_p99_ms": round(cuts[98], 1),
            "share_of_a_core": round(share, 3),
            "tok_s": round(statistics.median(speeds), 1),
            "rss_mb": round(app.memory()),
        }
    finally:
        app.close()


def headless(seconds: float) -> float:
    """Median tokens per second of `-p` over the same stretch of the same answer."""
    command = [
        sys.executable,
        "-m",
        "northchat",
        "--model",
        "smollm2-135m",
        "-p",
        STORY,
        "--output-format",
        "stream-json",
    ]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert process.stdout is not None
    speeds: list[float] = []
    end = 0.0
    for line in process.stdout:
        if found := re.search(r'"tok_s":([\d.]+)', line):
            end = end or time.monotonic() + 1 + seconds
            speeds.append(float(found[1]))
            if time.monotonic() > end:
                break
    process.send_signal(signal.SIGINT)
    process.wait()
    return round(statistics.median(speeds), 1)


def main() -> None:
    parser = argparse.ArgumentParser(description="The terminal app as its user feels it")
    parser.add_argument("--out", type=Path, help="write the figures there as JSON")
    parser.add_argument("--seconds", type=float, default=8.0, help="of answer to measure, and again with keys typed")
    parser.add_argument("--rates", default="100,300,600")
    args = parser.parse_args()
    figures: dict[str, Any] = {"environment": {"python": platform.python_version(), "cores": os.cpu_count()}}
    with tempfile.TemporaryDirectory() as home:
        os.environ |= {"XDG_STATE_HOME": home, "XDG_CONFIG_HOME": home, "XDG_RUNTIME_DIR": home}
        figures["load_before"] = round(os.getloadavg()[0], 2)
        with serving() as server:
            figures["streamed"] = []
            for rate in map(float, args.rates.split(",")):
                for kind in TEXTS:
                    figures["streamed"].append(streamed(server, kind, rate))
                    print(figures["streamed"][-1], flush=True)
        figures["smollm2"] = local(args.seconds)
        figures["smollm2"]["headless_tok_s"] = headless(args.seconds)
        print(figures["smollm2"])
    if args.out:
        args.out.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
