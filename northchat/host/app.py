"""The routes, and OpenAI-shaped errors for whatever goes wrong in them."""

import logging
from typing import Protocol

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from northchat.host import transport
from northchat.host.chat_completions import chat_completions
from northchat.host.completions import completions
from northchat.host.errors import ApiError
from northchat.host.lend import lend
from northchat.host.state import State, reports
from northchat.host.turns import Turns

log = logging.getLogger(__name__)


class Host(Protocol):
    state: State
    created: int

    def turns(self) -> Turns:
        """Raises ApiError while the model isn't ready."""

    def stop(self) -> None: ...

    def greet(self) -> bool:
        """A client is about to attach: give it time. Whether we stay at all."""


def make_app(host: Host) -> Starlette:
    app = Starlette(
        routes=[
            Route("/", root),
            Route("/health", health),
            Route("/v1/models", models),
            Route("/v1/models/{name:path}", model),
            Route("/v1/chat/completions", chat_completions, methods=["POST"]),
            Route("/v1/completions", completions, methods=["POST"]),
            Route("/northchat/attach", attach),
            Route("/northchat/greet", greet, methods=["POST"]),
            Route("/northchat/lend", lend, methods=["POST"]),
            Route("/northchat/stop", stop, methods=["POST"]),
        ],
        exception_handlers={ApiError: on_api_error, HTTPException: on_http_error, Exception: on_bug},
    )
    app.state.host = host
    return app


async def root(request: Request) -> Response:
    return transport.json_response({"name": "northchat", "version": _host(request).state.health.version})


async def health(request: Request) -> Response:
    health = _host(request).state.health
    return transport.json_response(health, 200 if health.status == "ready" else 503)


async def models(request: Request) -> Response:
    return transport.json_response({"object": "list", "data": [_model_object(_host(request))]})


async def model(request: Request) -> Response:
    host = _host(request)
    name = request.path_params["name"]
    served = host.state.health.model
    if name != served:
        raise ApiError(404, f"The model `{name}` is not served; `{served}` is.", code="model_not_found")
    return transport.json_response(_model_object(host))


def _model_object(host: Host) -> dict[str, object]:
    limit = host.state.health.max_model_len
    return {
        "id": host.state.health.model,
        "object": "model",
        "created": host.created,
        "owned_by": "northchat",
        "root": host.state.health.model,
        # Two names for one number: clients look for either.
        "max_model_len": limit,
        "context_length": limit,
    }


async def attach(request: Request) -> Response:
    """Health on every change, as server-sent events; the connection itself says that a client is there."""
    state = _host(request).state
    state.attach()
    return transport.EventStream(reports(state), state.detach)


async def greet(request: Request) -> Response:
    return transport.json_response({"stays": _host(request).greet()})


async def stop(request: Request) -> Response:
    _host(request).stop()
    return transport.json_response({"status": "stopping"})


def _host(request: Request) -> Host:
    host: Host = request.app.state.host
    return host


async def on_api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error.response()


async def on_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message = {
        404: f"There is no {request.url.path} here.",
        405: f"{request.method} is not allowed for {request.url.path}.",
    }.get(error.status_code, error.detail)
    code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code)
    response = ApiError(error.status_code, message, code=code).response()
    response.headers.update(error.headers or {})
    return response


async def on_bug(request: Request, error: Exception) -> Response:
    # Starlette raises the error again behind this response, and uvicorn logs its traceback.
    message = "Something went wrong in the server; its log has the details."
    return ApiError(500, message, code="internal_error").response()
