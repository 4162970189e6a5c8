"""The sockets that a host listens on."""

import socket
from pathlib import Path


class HostError(Exception):
    """The host can't do its work: one line that names cause and remedy."""


def bind_unix(path: Path) -> socket.socket:
    """Replaces a socket that a dead host left; the caller holds the lock of the place."""
    path.unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(str(path))
    path.chmod(0o600)
    listener.listen(128)
    return listener


def bind_tcp(address: tuple[str, int], api_key: str | None) -> socket.socket:
    """Raises HostError for an address that is taken, unknown, or open to others without a key."""
    from northchat.host.guard import is_loopback

    host, port = address
    if api_key is None and not is_loopback(host):
        raise HostError(f"{host} is open to other machines: set an API key (NORTHCHAT_API_KEY), or use 127.0.0.1")
    listener = None
    try:
        family, kind, protocol, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(where)
        listener.listen(256)
    except (OSError, OverflowError, UnicodeError) as error:
        if listener is not None:
            listener.close()
        reason = getattr(error, "strerror", None) or error
        raise HostError(f"can't listen on {host}:{port} ({reason}); choose another with --host and --port") from error
    return listener
