"""A server in this process over an engine without a device."""

import asyncio
import contextlib
import json

import httpx
import pytest

from engine.async_engine import AsyncEngine
from engine.metrics import EngineMetrics
from engine.server.app import build_app
from engine.server.prepare import Preparer
from engine.server.serving import Serving
from engine.testing import FakeCore


class Client(httpx.AsyncClient):
    """Requests to the app in process; `events` reads a stream."""

    async def events(self, path, body):
        async with self.stream("POST", path, json=body) as response:
            assert response.status_code == 200, await response.aread()
            assert response.headers["content-type"].startswith("text/event-stream")
            lines = [line async for line in response.aiter_lines() if line]
        assert lines[-1] == "data: [DONE]"
        assert all(line.startswith("data: ") for line in lines)
        return [json.loads(line[6:]) for line in lines[:-1]]


@pytest.fixture
def run_app():
    """run_app(test, core=..., **settings): runs `await test(client, engine, core)`."""

    def run(
        test, *, core=None, api_keys=(), max_body_bytes=32 * 2**20, request_log=None, **settings
    ):
        core = core or FakeCore()

        async def main():
            metrics = EngineMetrics(core.scheduler, model_name="fake", config={"block_size": 4})
            engine = AsyncEngine(core, metrics=metrics)
            options = {
                "model_names": ["fake", "alias"],
                "max_model_len": core.scheduler.config.max_model_len,
                **settings,
            }
            preparer = Preparer(core.tokenizer, **options)
            serving = Serving(engine, preparer, request_log=request_log)
            app = build_app(serving, metrics, api_keys=api_keys, max_body_bytes=max_body_bytes)
            engine.start()
            transport = httpx.ASGITransport(app)
            try:
                async with Client(transport=transport, base_url="http://test") as client:
                    await asyncio.wait_for(test(client, engine, core), 60)
            finally:
                await engine.close()
            if engine.errored is None:
                assert engine.num_unfinished == 0
                core.check_integrity()
                assert not core.has_unfinished()

        with contextlib.closing(asyncio.new_event_loop()) as loop:
            loop.run_until_complete(main())

    return run
