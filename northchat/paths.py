"""Where files live: XDG base directories and a private directory for sockets."""

import os
import stat
from pathlib import Path

APP = "northchat"


class PathError(Exception):
    """A directory can't be used; the message names it and the remedy."""


def _xdg(variable: str, fallback: str) -> Path:
    # The specification says to ignore relative values.
    value = os.environ.get(variable, "")
    base = Path(value) if value.startswith("/") else Path.home() / fallback
    return base / APP


def config_dir() -> Path:
    return _xdg("XDG_CONFIG_HOME", ".config")


def data_dir() -> Path:
    """Models."""
    return _xdg("XDG_DATA_HOME", ".local/share")


def state_dir() -> Path:
    """Logs, history, sessions."""
    return _xdg("XDG_STATE_HOME", ".local/state")


def cache_dir() -> Path:
    return _xdg("XDG_CACHE_HOME", ".cache")


def runtime_dir() -> Path:
    """The directory of sockets and locks, made with mode 0700 and checked to be ours.

    Raises PathError when another user owns it or it isn't a directory.
    """
    value = os.environ.get("XDG_RUNTIME_DIR", "")
    if value.startswith("/") and os.access(value, os.W_OK):
        path = Path(value) / APP
    else:
        import tempfile  # brings much that front ends would not need before they paint

        path = Path(tempfile.gettempdir()) / f"{APP}-{os.getuid()}"
    path.mkdir(mode=0o700, exist_ok=True)
    info = path.lstat()
    if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.getuid():
        raise PathError(f"{path} is not a directory of yours; remove it or set XDG_RUNTIME_DIR")
    if info.st_mode & 0o077:
        path.chmod(0o700)
    return path
