"""Where the host of a model and device is found, and whether it lives: what launcher and host agree upon.

A host holds a lock on its info file for as long as it lives, whatever becomes of its pid; the socket belongs to the
holder of that lock. The launcher's lock, one per device, is held only while a host is looked for or started.
"""

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from northchat import paths

_LONGEST_SOCKET = 107
"""Bytes of a Unix socket's path."""


class Occupied(Exception):
    """Another process holds the lock."""


class Info(NamedTuple):
    """What a host says of itself on disk."""

    pid: int
    model: str
    device: str
    version: str
    serving: str | None
    """host:port of its TCP endpoint."""


class Place(NamedTuple):
    """The meeting point of one model on one device. `model` is a name, or a path made absolute by place()."""

    model: str
    device: str

    @property
    def _stem(self) -> Path:
        import hashlib

        key = hashlib.sha256(f"{self.model}\0{self.device}".encode()).hexdigest()[:12]
        return paths.runtime_dir() / f"engine-{key}"

    @property
    def socket(self) -> Path:
        """Raises PathError when it would be too long for the system."""
        path = self._stem.with_suffix(".sock")
        if len(os.fsencode(path)) > _LONGEST_SOCKET:
            raise paths.PathError(f"{path} is too long for a socket; set XDG_RUNTIME_DIR to a shorter path")
        return path

    @property
    def info(self) -> Path:
        return self._stem.with_suffix(".json")

    @property
    def log(self) -> Path:
        import re

        name = re.sub(r"[^A-Za-z0-9._-]+", "-", Path(self.model).name).strip("-.") or "model"
        return paths.state_dir() / "log" / f"{name}-{self.device}.log"


def place(model: str, device: str) -> Place:
    """Paths are made absolute, so that a model is the same from wherever it is named."""
    if os.path.exists(model):
        model = os.path.realpath(model)
    return Place(model, device)


@contextmanager
def launching(device: str, timeout: float) -> Iterator[None]:
    """One launcher at a time. Raises Occupied after `timeout` seconds."""
    with lock(paths.runtime_dir() / f"launch-{device}.lock", timeout):
        yield


@contextmanager
def lock(path: Path, timeout: float) -> Iterator[int]:
    """Holds a lock file, made when missing and left behind; yields its descriptor. Raises Occupied."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        deadline = time.monotonic() + timeout
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    raise Occupied(str(path)) from None
                time.sleep(0.02)
        yield descriptor
    finally:
        os.close(descriptor)


def write_info(descriptor: int, info: Info) -> None:
    """Into the locked info file."""
    import json

    data = json.dumps(info._asdict()).encode()
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, data, 0)


def living() -> list[Info]:
    """The hosts whose info file is locked."""
    hosts = []
    for path in sorted(paths.runtime_dir().glob("engine-*.json")):
        info = _read_if_locked(path)
        if info is not None:
            hosts.append(info)
    return hosts


def _read_if_locked(path: Path) -> Info | None:
    import json

    try:
        with path.open("rb") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return Info(**json.load(file))
    except (OSError, ValueError, TypeError):
        pass
    return None
