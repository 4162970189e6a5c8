"""Errors as OpenAI's clients expect them: an HTTP status and {"error": {message, type, param, code}}."""

from typing import Any

import msgspec
from starlette.responses import Response


class ApiError(Exception):
    """Ends a request. `code` is a stable word for programs, `message` one line for people."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        kind: str | None = None,
        retry_after: int | None = None,
        retry: bool | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.param = param
        self.kind = kind or ("invalid_request_error" if status < 500 else "server_error")
        self.retry_after = retry_after
        self.retry = retry

    def body(self) -> dict[str, Any]:
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}

    def response(self) -> Response:
        headers = {}
        if self.retry_after is not None:
            headers["retry-after"] = str(self.retry_after)
        if self.retry is not None:
            headers["x-should-retry"] = "true" if self.retry else "false"
        content = msgspec.json.encode(self.body())
        return Response(content, self.status, headers, media_type="application/json")


def bad_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    return ApiError(400, message, param=param, code=code)


def context_overflow(limit: int, prompt: int, param: str) -> ApiError:
    """The sentence is OpenAI's: editors and agents recognise it and compact their conversation."""
    return ApiError(
        400,
        f"This model's maximum context length is {limit} tokens. However, your messages resulted in {prompt} tokens. "
        "Please reduce the length of the messages.",
        code="context_length_exceeded",
        param=param,
    )
