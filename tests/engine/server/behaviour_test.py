"""Clients that leave, read slowly or come too late; engines that fail; the request log."""

import asyncio
import json

from engine.server.request_log import RequestLog
from engine.testing import FakeCore

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
LONG = {"prompt": "ab", "max_tokens": 400, "ignore_eos": True}


def _core(**settings):
    return FakeCore(step_seconds=0.005, **settings)


class RawClient:
    """One request spoken in ASGI, so that the client can leave or dawdle."""

    def __init__(self, app, path, body, *, pause=0.0):
        self.chunks = []
        self.status = None
        self.gone = asyncio.Event()
        self._app, self._path, self._body, self._pause = app, path, body, pause
        self._read = False

    async def run(self):
        scope = {
            "type": "http", "method": "POST", "path": self._path, "headers": [],
            "query_string": b"", "http_version": "1.1", "asgi": {"version": "3.0"},
        }  # fmt: skip
        await self._app(scope, self._receive, self._send)

    async def _receive(self):
        if not self._read:
            self._read = True
            return {"type": "http.request", "body": json.dumps(self._body).encode()}
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message):
        if message["type"] == "http.response.start":
            self.status = message["status"]
        else:
            self.chunks.append(message["body"])
            await asyncio.sleep(self._pause)


async def _idle(core):
    for _ in range(400):
        if not core.has_unfinished():
            return
        await asyncio.sleep(0.005)
    raise AssertionError("the request was not aborted")


def _app_of(client):
    return client._transport.app


def test_disconnecting_frees_the_request(run_app):
    async def test(client, engine, core):
        for stream in (True, False):
            for wait in (0.05, 0.0):
                raw = RawClient(_app_of(client), COMPLETIONS, {**LONG, "stream": stream, "n": 2})
                task = asyncio.ensure_future(raw.run())
                await asyncio.sleep(wait)
                raw.gone.set()
                await asyncio.wait_for(task, 5)
                await _idle(core)
                assert engine.num_unfinished == 0
                assert core.scheduler.kv_cache_usage == 0
                assert core.num_steps < 200

    run_app(test, core=_core())


def test_disconnecting_while_queued(run_app):
    async def test(client, engine, core):
        first = RawClient(_app_of(client), COMPLETIONS, {**LONG, "stream": True})
        second = RawClient(_app_of(client), COMPLETIONS, LONG)
        tasks = [asyncio.ensure_future(c.run()) for c in (first, second)]
        while core.scheduler.num_waiting != 1 or core.scheduler.num_running != 1:
            await asyncio.sleep(0.005)
        second.gone.set()
        await asyncio.wait_for(tasks[1], 5)
        while core.scheduler.num_waiting:
            await asyncio.sleep(0.005)
        assert core.scheduler.num_running == 1
        first.gone.set()
        await tasks[0]
        await _idle(core)

    run_app(test, core=_core(max_num_seqs=1))


def test_a_slow_reader_neither_stalls_the_engine_nor_loses_text(run_app):
    async def test(client, engine, core):
        slow = RawClient(_app_of(client), COMPLETIONS, {**LONG, "stream": True}, pause=0.1)
        task = asyncio.ensure_future(slow.run())
        fast = await client.post(COMPLETIONS, json={"prompt": "xyz", "max_tokens": 5})
        assert fast.json()["choices"][0]["text"] == "xyzxy"
        await asyncio.wait_for(task, 20)
        chunks = [json.loads(c[6:]) for c in slow.chunks if c.startswith(b"data: {")]
        text = "".join(c["choices"][0]["text"] for c in chunks)
        assert text == "ab" * 200
        # Far fewer pieces than tokens: what waited was joined.
        assert len(chunks) < 60

    run_app(test, core=_core(rule=lambda tokens, n: tokens[(len(tokens) - n) % n]))


def test_a_full_queue_is_429(run_app):
    async def test(client, engine, core):
        bodies = [client.post(COMPLETIONS, json={**LONG, "max_tokens": 30}) for _ in range(8)]
        answers = await asyncio.gather(*bodies)
        codes = sorted(a.status_code for a in answers)
        assert set(codes) == {200, 429}
        refused = next(a for a in answers if a.status_code == 429)
        assert refused.headers["retry-after"] == "1"
        assert refused.json()["error"]["code"] == "queue_full"
        streamed = await asyncio.gather(
            *(
                client.post(COMPLETIONS, json={**LONG, "max_tokens": 30, "stream": True})
                for _ in range(8)
            )
        )
        assert {a.status_code for a in streamed} == {200, 429}

    run_app(test, core=_core(max_num_seqs=1, max_num_queued_reqs=2))


def test_draining(run_app):
    async def test(client, engine, core):
        running = asyncio.ensure_future(client.events(COMPLETIONS, {**LONG, "stream": True}))
        while not core.scheduler.num_running:
            await asyncio.sleep(0.005)
        draining = asyncio.ensure_future(engine.drain(0.2))
        await asyncio.sleep(0.01)
        health = await client.get("/health")
        assert (health.status_code, health.json()["status"]) == (503, "shutting down")
        late = await client.post(COMPLETIONS, json={"prompt": "a"})
        assert late.status_code == 503
        assert late.headers["retry-after"]
        assert late.json()["error"]["code"] == "shutting_down"
        assert not await draining
        chunks = await running
        assert chunks[0]["choices"][0]["text"]
        assert chunks[-1]["error"]["code"] == "shutting_down"

    run_app(test, core=_core())


def test_a_failing_engine(run_app):
    async def test(client, engine, core):
        streams = [
            asyncio.ensure_future(client.events(path, {**body, "stream": True}))
            for path, body in (
                (COMPLETIONS, LONG),
                (CHAT, {"messages": [{"role": "user", "content": "x"}], "max_tokens": 400}),
            )
        ]
        whole = asyncio.ensure_future(client.post(COMPLETIONS, json=LONG))
        while core.scheduler.num_running < 3:
            await asyncio.sleep(0.005)
        core.fail = RuntimeError("RESOURCE_EXHAUSTED: out of memory")
        for stream in streams:
            chunks = await stream
            assert "RESOURCE_EXHAUSTED" in chunks[-1]["error"]["message"]
            assert chunks[-1]["error"]["code"] == "engine_dead"
        assert (await whole).status_code == 503
        health = await client.get("/health")
        assert (health.status_code, health.json()["status"]) == (503, "failed")
        late = await client.post(COMPLETIONS, json={"prompt": "a"})
        assert late.status_code == 503
        assert (await client.get("/metrics")).status_code == 200

    run_app(test, core=_core())


def test_preemptions_show_in_usage_and_metrics(run_app):
    async def test(client, engine, core):
        bodies = [
            {"prompt": chr(97 + i) * 20, "max_tokens": 60, "ignore_eos": True} for i in range(8)
        ]
        answers = await asyncio.gather(*(client.post(COMPLETIONS, json=b) for b in bodies))
        usages = [a.json()["usage"] for a in answers]
        assert sum(u["num_preemptions"] for u in usages) > 0
        assert sum(u["num_recomputed_tokens"] for u in usages) > 0
        for i, answer in enumerate(answers):
            assert answer.json()["choices"][0]["text"] == chr(97 + i) * 60
        text = (await client.get("/metrics")).text
        line = next(x for x in text.splitlines() if x.startswith("vllm:num_preemptions_total"))
        assert float(line.split()[-1]) == sum(u["num_preemptions"] for u in usages)

    rule = lambda tokens, n: tokens[0]  # noqa: E731
    run_app(test, core=FakeCore(num_blocks=50, rule=rule))


def test_request_log(run_app, tmp_path):
    path = tmp_path / "log.jsonl"
    log = RequestLog(path)

    async def test(client, engine, core):
        await client.post(COMPLETIONS, json={"prompt": "abc", "max_tokens": 5})
        await client.events(COMPLETIONS, {"prompt": ["ab", "a"], "max_tokens": 4, "stream": True})
        raw = RawClient(_app_of(client), COMPLETIONS, {**LONG, "stream": True})
        task = asyncio.ensure_future(raw.run())
        await asyncio.sleep(0.05)
        raw.gone.set()
        await task
        refused = await client.post(COMPLETIONS, json={"prompt": ""})
        assert refused.status_code == 400

    run_app(test, core=_core(), request_log=log)
    log.close()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(x["prompt_len"], x["max_tokens"], x["finish_reason"]) for x in lines] == [
        (3, 5, "length"), (2, 4, "length"), (1, 4, "stop"), (2, 400, "abort"),
    ]  # fmt: skip
    assert [x["output_len"] for x in lines[:3]] == [5, 4, 4]
    assert all(x["arrival"] >= 0 for x in lines)


def test_a_full_disk_ends_the_log_not_the_service(run_app, caplog):
    log = RequestLog("/dev/full")

    async def test(client, engine, core):
        for _ in range(3):
            answer = await client.post(COMPLETIONS, json={"prompt": "a", "max_tokens": 1})
            assert answer.status_code == 200

    run_app(test, request_log=log)
    assert sum("request log" in r.getMessage() for r in caplog.records) == 1


def test_priorities_need_the_policy(run_app):
    async def test(client, engine, core):
        body = {"prompt": "a", "max_tokens": 1, "priority": -3}
        assert (await client.post(COMPLETIONS, json=body)).status_code == 200

    run_app(test, core=FakeCore(scheduling_policy="priority"), priorities=True)
