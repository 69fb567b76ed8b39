"""Errors as OpenAI's API words them."""

from __future__ import annotations

import json
from typing import Any

import pydantic
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from engine.async_engine import EngineDeadError, EngineDrainingError
from scheduler.waiting import QueueFullError

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    405: "invalid_request_error",
    413: "invalid_request_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
}
# Seconds after which a refused client should try again: about the life of a short request.
_RETRY_AFTER = "1"


class ApiError(Exception):
    """A request that is answered by an error. The message is one sentence for the user."""

    def __init__(
        self, status: int, message: str, *, param: str | None = None, code: str | None = None
    ):
        """Args:
        status: HTTP status.
        message: one sentence.
        param: the field at fault.
        code: a word for programs.
        """
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code

    @property
    def body(self) -> dict[str, Any]:
        """{"error": {"message", "type", "param", "code"}}."""
        return {
            "error": {
                "message": self.message,
                "type": _TYPES.get(self.status, "internal_server_error"),
                "param": self.param,
                "code": self.code,
            }
        }

    def response(self) -> JSONResponse:
        """The error as an HTTP response."""
        headers = {"Retry-After": _RETRY_AFTER} if self.status in (429, 503) else {}
        if self.status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        return JSONResponse(self.body, self.status, headers)


def as_api_error(error: BaseException) -> ApiError:
    """Chooses status and words for an exception of the engine."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, QueueFullError):
        return ApiError(429, str(error), code="queue_full")
    if isinstance(error, EngineDrainingError):
        return ApiError(503, str(error), code="shutting_down")
    if isinstance(error, EngineDeadError):
        return ApiError(503, str(error), code="engine_dead")
    if isinstance(error, ValueError):
        return ApiError(400, str(error))
    return ApiError(500, f"{type(error).__name__}: {error}", code="internal_error")


def validation_error(error: pydantic.ValidationError) -> ApiError:
    """The first complaint of pydantic as one sentence."""
    details = error.errors(include_url=False)
    # A union reports each alternative; the deepest path says most.
    first = max(details, key=lambda d: len(d["loc"])) if details else {"loc": (), "msg": str(error)}
    path = ".".join(str(p) for p in first["loc"] if not _is_type_name(p))
    message = first["msg"].removeprefix("Value error, ")
    shown = _shorten(first.get("input"))
    where = f"{path}: " if path else ""
    return ApiError(400, f"{where}{message}{shown}", param=path or None)


def _is_type_name(part: object) -> bool:
    """Pydantic puts the alternatives of a union into the path."""
    return isinstance(part, str) and ("[" in part or part in ("str", "int", "float", "bool"))


def _shorten(value: object) -> str:
    if isinstance(value, dict | list) or value is None:
        return ""
    text = json.dumps(value, default=str)
    return f" (got {text if len(text) <= 60 else text[:57] + '...'})"


async def on_error(_: Request, error: Exception) -> Response:
    """Starlette's handler for everything that an endpoint raises."""
    return as_api_error(error).response()
