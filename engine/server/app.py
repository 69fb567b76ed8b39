"""The ASGI application: routes, authorisation, reading bodies."""

from __future__ import annotations

import asyncio
import hmac
import http
import logging
import time
from collections.abc import Sequence
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from engine import __version__
from engine.metrics import CONTENT_TYPE, EngineMetrics
from engine.server.errors import ApiError, as_api_error, on_error
from engine.server.protocol import ChatRequest, CompletionRequest, parse_body
from engine.server.serving import Serving

logger = logging.getLogger(__name__)

# Bodies above this size are parsed in a thread.
_LARGE_BODY = 256 * 1024


class _Authorize:
    """Lets requests to /v1 pass that carry one of the keys."""

    def __init__(self, app: ASGIApp, keys: Sequence[str]):
        self._app = app
        self._keys = [key.encode() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"].startswith("/v1"):
            given = dict(scope["headers"]).get(b"authorization", b"")
            kind, _, key = given.partition(b" ")
            known = [hmac.compare_digest(key.strip(), k) for k in self._keys]
            if kind.lower() != b"bearer" or not any(known):
                error = ApiError(
                    401,
                    "send a valid API key as 'Authorization: Bearer KEY'",
                    code="invalid_api_key",
                )
                await error.response()(scope, receive, send)
                return
        await self._app(scope, receive, send)


class _Endpoints:
    def __init__(self, serving: Serving, metrics: EngineMetrics, max_body_bytes: int):
        self._serving = serving
        self._metrics = metrics
        self._max_body_bytes = max_body_bytes
        self._created = int(time.time())

    async def health(self, _: Request) -> Response:
        engine = self._serving.engine
        if engine.errored is not None:
            return JSONResponse({"status": "failed", "error": str(engine.errored)}, 503)
        if engine.draining:
            return JSONResponse({"status": "shutting down"}, 503)
        return JSONResponse({"status": "ok"})

    async def version(self, _: Request) -> Response:
        return JSONResponse({"version": __version__})

    async def metrics(self, _: Request) -> Response:
        return Response(self._metrics.render(), headers={"Content-Type": CONTENT_TYPE})

    async def models(self, _: Request) -> Response:
        data = [self._model(name) for name in self._serving.preparer.model_names]
        return JSONResponse({"object": "list", "data": data})

    async def model(self, request: Request) -> Response:
        name = request.path_params["name"]
        if name not in self._serving.preparer.model_names:
            raise ApiError(404, f"the model {name[:200]!r} does not exist", code="model_not_found")
        return JSONResponse(self._model(name))

    def _model(self, name: str) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": self._created,
            "owned_by": "tidegate",
            "root": self._serving.preparer.model_names[0],
            "parent": None,
            "max_model_len": self._serving.preparer.max_model_len,
        }

    async def completions(self, request: Request) -> Response:
        return await self._generate(request, CompletionRequest)

    async def chat(self, request: Request) -> Response:
        return await self._generate(request, ChatRequest)

    async def _generate(
        self, request: Request, kind: type[CompletionRequest] | type[ChatRequest]
    ) -> Response:
        arrival = time.monotonic()
        try:
            raw = await self._read(request)
            if len(raw) > _LARGE_BODY:
                body = await asyncio.to_thread(parse_body, kind, raw)
            else:
                body = parse_body(kind, raw)
            return await self._serving.answer(body, request.receive, arrival)
        except ClientDisconnect:
            return Response(status_code=499)  # nobody reads it
        except Exception as error:
            problem = as_api_error(error)
            if problem.status == 500:
                logger.exception("A request failed")
            return problem.response()

    async def _read(self, request: Request) -> bytes:
        limit = self._max_body_bytes
        error = ApiError(
            413, f"the body is larger than {limit / 2**20:g} MiB (--max_body_mib)",
            code="body_too_large",
        )  # fmt: skip
        announced = request.headers.get("content-length", "")
        if announced.isdigit() and int(announced) > limit:
            raise error
        chunks, size = [], 0
        async for chunk in request.stream():
            size += len(chunk)
            if size > limit:
                raise error
            chunks.append(chunk)
        return b"".join(chunks)


async def _on_http_error(_: Request, error: Exception) -> Response:
    """Starlette's own refusals (unknown path, wrong method) in our words."""
    assert isinstance(error, HTTPException)
    message = error.detail or http.HTTPStatus(error.status_code).phrase
    response = ApiError(error.status_code, message).response()
    response.headers.update(error.headers or {})
    return response


def build_app(
    serving: Serving,
    metrics: EngineMetrics,
    *,
    api_keys: Sequence[str] = (),
    max_body_bytes: int = 32 * 2**20,
) -> ASGIApp:
    """Puts the application together.

    Args:
      serving: answers requests.
      metrics: shown under /metrics.
      api_keys: of which a request to /v1 must bring one; empty lets all in.
      max_body_bytes: larger bodies get status 413.
    """
    endpoints = _Endpoints(serving, metrics, max_body_bytes)
    app = Starlette(
        routes=[
            Route("/health", endpoints.health),
            Route("/version", endpoints.version),
            Route("/metrics", endpoints.metrics),
            Route("/v1/models", endpoints.models),
            Route("/v1/models/{name:path}", endpoints.model),
            Route("/v1/completions", endpoints.completions, methods=["POST"]),
            Route("/v1/chat/completions", endpoints.chat, methods=["POST"]),
        ],
        exception_handlers={HTTPException: _on_http_error, ApiError: on_error},
    )
    return _Authorize(app, api_keys) if api_keys else app
