"""A small HTTP/1.1 client on asyncio streams: one request per connection, bodies read as they come.

Standard library only, so that the client's own work stays small beside what it times.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import json
import urllib.parse
from collections.abc import AsyncIterator
from typing import Any

_LINE_LIMIT = 1 << 20


class HttpError(RuntimeError):
    """The server answered with an error status or something that is not HTTP."""


def loopback_address(base_url: str) -> tuple[str, int]:
    """(host, port) of an http URL on this machine. Raises ValueError for any other."""
    url = urllib.parse.urlsplit(base_url)
    host = url.hostname or ""
    try:
        local = host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        local = False
    if url.scheme != "http" or not local:
        raise ValueError(f"base_url={base_url!r} is not http on a loopback address")
    return host, url.port or 80


@contextlib.asynccontextmanager
async def _exchange(
    method: str, base_url: str, path: str, body: Any, headers: dict[str, str]
) -> AsyncIterator[AsyncIterator[bytes]]:
    host, port = loopback_address(base_url)
    reader, writer = await asyncio.open_connection(host, port, limit=_LINE_LIMIT)
    try:
        payload = b"" if body is None else json.dumps(body).encode()
        lines = [
            f"{method} {path} HTTP/1.1",
            f"Host: {host}:{port}",
            "Connection: close",
            f"Content-Length: {len(payload)}",
            "Content-Type: application/json",
            *(f"{name}: {value}" for name, value in headers.items()),
        ]
        writer.write("\r\n".join(lines).encode() + b"\r\n\r\n" + payload)
        await writer.drain()
        status, fields = await _read_head(reader)
        parts = _read_body(reader, fields)
        if status != 200:
            text = b"".join([part async for part in parts]).decode(errors="replace")
            raise HttpError(f"status {status}: {text[:300]}")
        yield parts
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


async def _read_head(reader: asyncio.StreamReader) -> tuple[int, dict[str, str]]:
    first = (await reader.readline()).decode("latin-1").split(maxsplit=2)
    if len(first) < 2 or not first[0].startswith("HTTP/1.") or not first[1].isdigit():
        raise HttpError("the answer is not HTTP/1.1")
    fields: dict[str, str] = {}
    while line := (await reader.readline()).decode("latin-1").strip():
        name, _, value = line.partition(":")
        fields[name.strip().lower()] = value.strip()
    return int(first[1]), fields


async def _read_body(reader: asyncio.StreamReader, fields: dict[str, str]) -> AsyncIterator[bytes]:
    if fields.get("transfer-encoding", "").lower() == "chunked":
        while size := int((await reader.readline()).split(b";")[0] or b"0", 16):
            yield await reader.readexactly(size)
            await reader.readexactly(2)
        return
    left = int(fields.get("content-length", -1))
    while left:
        part = await reader.read(65536 if left < 0 else min(left, 65536))
        if not part:
            if left > 0:
                raise HttpError("the connection closed before the end of the answer")
            return
        left -= len(part) if left > 0 else 0
        yield part


async def get(base_url: str, path: str) -> str:
    """The body of a GET. Raises HttpError, OSError."""
    async with _exchange("GET", base_url, path, None, {}) as parts:
        return b"".join([part async for part in parts]).decode()


async def post_events(
    base_url: str, path: str, body: Any, headers: dict[str, str] | None = None
) -> AsyncIterator[dict[str, Any]]:
    """Posts JSON and yields the objects of the answer's event stream until it says [DONE].

    Raises HttpError, also where the stream ends early or carries an error; OSError.
    """
    async with _exchange("POST", base_url, path, body, headers or {}) as parts:
        rest = b""
        async for part in parts:
            *lines, rest = (rest + part).split(b"\n")
            for line in lines:
                if not line.startswith(b"data:"):
                    continue
                data = line[5:].strip()
                if data == b"[DONE]":
                    return
                event = json.loads(data)
                if "error" in event:
                    raise HttpError(f"error event: {str(event['error'])[:300]}")
                yield event
        raise HttpError("the event stream ended without [DONE]")
