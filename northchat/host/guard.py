"""Who may talk to the host. Plain ASGI: Starlette's middleware base class hides disconnects."""

import hashlib
import hmac
import ipaddress
from collections.abc import Iterable
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from northchat.host.errors import ApiError


def is_loopback(host: str) -> bool:
    """Whether a host name or address, brackets allowed, is this machine's own."""
    host = host.strip("[]").lower()
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


class TcpGuard:
    """On TCP: a browser's pages are turned away, and whoever has no key, if there is one."""

    def __init__(self, app: ASGIApp, bound: str, api_key: str | None) -> None:
        self._app = app
        self._bound = bound.strip("[]").lower()
        self._key = None if api_key is None else hashlib.sha256(api_key.encode()).digest()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            error = self._refuse(scope["path"], scope["method"], Headers(scope=scope))
            if error is not None:
                await error.response()(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _refuse(self, path: str, method: str, headers: Headers) -> ApiError | None:
        if path.startswith("/northchat/"):
            return ApiError(404, f"There is no {path} here.", code="not_found")
        # A page whose name was rebound to 127.0.0.1 still sends its own name; with a key it couldn't do harm anyway.
        host = headers.get("host", "")
        if self._key is None and not self._known(host):
            return ApiError(403, f"The Host header names {host!r}, which this server is not.", code="host_not_allowed")
        origin = headers.get("origin")
        if origin is not None and not is_loopback(urlsplit(origin).hostname or ""):
            return ApiError(403, "Requests from web pages are not allowed.", code="origin_not_allowed")
        if self._key is not None and not (path == "/health" or method == "OPTIONS"):
            given = [headers.get("x-api-key"), headers.get("api-key"), _bearer(headers.get("authorization", ""))]
            if not self._matches(given):
                kind = "authentication_error"
                return ApiError(401, "The API key is missing or wrong.", code="invalid_api_key", kind=kind)
        return None

    def _known(self, host: str) -> bool:
        name = urlsplit(f"//{host}").hostname or "" if _well_formed(host) else ""
        return is_loopback(name) or name == self._bound

    def _matches(self, given: Iterable[str | None]) -> bool:
        assert self._key is not None
        hashes = [hashlib.sha256(key.encode()).digest() for key in given if key]
        return any([hmac.compare_digest(digest, self._key) for digest in hashes])  # noqa: C419 - no early exit


def _bearer(value: str) -> str:
    scheme, _, key = value.partition(" ")
    return key.strip() if scheme.lower() == "bearer" else ""


def _well_formed(host: str) -> bool:
    try:
        urlsplit(f"//{host}")
    except ValueError:
        return False
    return True
