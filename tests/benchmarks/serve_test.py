"""The serving client against a small server that answers as told, and its statistics."""

import asyncio
import contextlib
import json
import math

import pytest

from benchmarks import serve
from benchmarks.http_stream import HttpError, loopback_address, post_events
from benchmarks.serving_load import (
    LoadRequest,
    Outcome,
    file_requests,
    random_requests,
    run_load,
    summarize,
)


class FakeServer:
    """Streams `max_tokens` words, `gap` seconds apart; notes bodies and how many run at once."""

    def __init__(self, *, gap=0.002, status=200, chunked=True, done=True, error=False):
        self.gap, self.status, self.chunked, self.done, self.error = (
            gap,
            status,
            chunked,
            done,
            error,
        )
        self.bodies, self.headers, self.running, self.most, self.arrivals = [], [], 0, 0, []

    @contextlib.asynccontextmanager
    async def run(self):
        server = await asyncio.start_server(self._answer, "127.0.0.1", 0)
        async with server:
            yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"

    async def _answer(self, reader, writer):
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        length = int(head.lower().split("content-length:")[1].split("\r\n")[0])
        body = json.loads(await reader.readexactly(length))
        self.bodies.append(body)
        self.headers.append(head)
        self.arrivals.append(asyncio.get_running_loop().time())
        self.running += 1
        self.most = max(self.most, self.running)
        framing = "Transfer-Encoding: chunked" if self.chunked else "Connection: close"
        writer.write(f"HTTP/1.1 {self.status} X\r\n{framing}\r\n\r\n".encode())

        def send(data):
            payload = f"data: {data}\n\n".encode()
            # Split in the middle, as networks do.
            for part in (payload[:7], payload[7:]):
                writer.write(b"%x\r\n%s\r\n" % (len(part), part) if self.chunked else part)

        tokens = body["max_tokens"]
        key = "delta" if "messages" in body else "text"
        for number in range(tokens):
            await asyncio.sleep(self.gap)
            text = f"w{number} "
            choice = {"delta": {"content": text}} if key == "delta" else {"text": text}
            send(json.dumps({"choices": [choice]}))
        if self.error:
            send(json.dumps({"error": {"message": "out of luck"}}))
        send(
            json.dumps({"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": tokens}})
        )
        if self.done:
            send("[DONE]")
        self.running -= 1
        if self.chunked:
            writer.write(b"0\r\n\r\n")
        with contextlib.suppress(OSError):
            await writer.drain()
        writer.close()


def load(server, requests, **settings):
    async def go():
        async with server.run() as url:
            return await run_load(url, requests, **settings)

    return asyncio.run(go())


@pytest.mark.parametrize("chunked", [True, False])
def test_times_and_counts_of_a_stream(chunked):
    server = FakeServer(gap=0.02, chunked=chunked)
    outcomes, duration = load(server, [LoadRequest([1, 2], 5)] * 3, model="m", api_key="k")
    for outcome in outcomes:
        assert outcome.error is None
        assert (outcome.input_tokens, outcome.output_tokens, len(outcome.itl)) == (5, 5, 4)
        assert 0.02 <= outcome.ttft < outcome.e2e <= duration
        assert outcome.ttft + sum(outcome.itl) == pytest.approx(outcome.e2e)
    assert all("Authorization: Bearer k" in head for head in server.headers)
    body = server.bodies[0]
    assert body["prompt"] == [1, 2] and body["model"] == "m" and body["ignore_eos"] is True


def test_conversations_go_to_the_chat_endpoint():
    server = FakeServer()
    request = LoadRequest(None, 3, [{"role": "user", "content": "hi"}])
    outcomes, _ = load(server, [request], ignore_eos=False)
    assert outcomes[0].error is None and outcomes[0].output_tokens == 3
    assert server.headers[0].startswith("POST /v1/chat/completions ")
    assert "ignore_eos" not in server.bodies[0]


def test_a_closed_loop_keeps_its_number_under_way():
    server = FakeServer()
    outcomes, _ = load(server, [LoadRequest("a", 4)] * 12, max_concurrency=3)
    assert len(outcomes) == 12 and server.most == 3


def test_an_open_loop_follows_its_rate_and_seed():
    server = FakeServer(gap=0)
    load(server, [LoadRequest("a", 1)] * 40, request_rate=200.0, seed=1)
    span = server.arrivals[-1] - server.arrivals[0]
    assert 0.08 < span < 1.0  # 39 gaps of 5 ms in the mean


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"status": 503}, "status 503"),
        ({"done": False}, r"without \[DONE\]"),
        ({"error": True}, "out of luck"),
    ],
)
def test_failures_are_told(settings, text):
    outcomes, duration = load(FakeServer(**settings), [LoadRequest("a", 2)])
    assert outcomes[0].error is not None
    assert text.replace("\\", "") in outcomes[0].error
    report = summarize(outcomes, duration)
    assert report["failed"] == 1 and report["completed"] == 0 and report["mean_ttft_ms"] is None


def test_a_request_has_a_time_limit():
    outcomes, _ = load(FakeServer(gap=5), [LoadRequest("a", 2)], timeout_s=0.1)
    assert outcomes[0].error == "no end within 0.1 s"


def test_statistics():
    outcomes = [
        Outcome(ttft=0.1 * i, e2e=0.1 * i + 0.9, itl=[0.3] * 3, input_tokens=10, output_tokens=4)
        for i in range(1, 11)
    ]
    report = summarize([*outcomes, Outcome(error="x")], 10.0)
    assert (report["completed"], report["failed"]) == (10, 1)
    assert report["request_throughput"] == 1.0
    assert report["output_throughput"] == 4.0 and report["total_token_throughput"] == 14.0
    assert report["mean_ttft_ms"] == pytest.approx(550) == report["median_ttft_ms"]
    assert report["p90_ttft_ms"] == pytest.approx(910)
    assert report["p99_ttft_ms"] == pytest.approx(991)
    assert report["mean_tpot_ms"] == pytest.approx(300) == pytest.approx(report["p99_itl_ms"])
    assert report["median_e2el_ms"] == pytest.approx(1450)


def test_random_requests_follow_seed_and_range():
    one, again = (random_requests(200, 64, 320, range_ratio=0.2, seed=3) for _ in range(2))
    assert one == again != random_requests(200, 64, 320, range_ratio=0.2, seed=4)
    assert {len(r.prompt) for r in one} <= set(range(51, 78))
    outputs = [r.output_len for r in one]
    assert min(outputs) >= 256 and max(outputs) <= 384 and max(outputs) - min(outputs) > 80
    assert all(100 <= i < 32000 for r in one for i in r.prompt)


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        ({"count": 0}, "num_prompts=0"),
        ({"input_len": 0}, "input_len=0"),
        ({"range_ratio": 1.0}, "range_ratio=1.0"),
        ({"vocab_size": 10}, "vocab_size=10"),
    ],
)
def test_wrong_numbers(arguments, word):
    with pytest.raises(ValueError, match=word):
        random_requests(**({"count": 1, "input_len": 1, "output_len": 1} | arguments))


def test_limits_of_the_load():
    for settings, word in (
        ({"max_concurrency": 0}, "max_concurrency=0"),
        ({"request_rate": 0.0}, "request_rate=0"),
        ({"request_rate": math.nan}, "request_rate=nan"),
    ):
        with pytest.raises(ValueError, match=word):
            asyncio.run(run_load("http://127.0.0.1:1", [], **settings))
    with pytest.raises(ValueError, match="at once"):
        asyncio.run(run_load("http://127.0.0.1:1", [LoadRequest("a", 1)] * 2000))


def test_files(tmp_path):
    path = tmp_path / "prompts.jsonl"
    chat = [{"role": "user", "content": "x"}]
    path.write_text(
        json.dumps({"prompt": "a", "output_len": 3})
        + "\n\n"
        + json.dumps({"messages": chat})
        + "\n"
    )
    assert file_requests(path, 3, 9) == [
        LoadRequest("a", 3), LoadRequest(None, 9, chat), LoadRequest("a", 3)
    ]  # fmt: skip
    for text, word in (
        ("{", "line 1 is not"),
        ("{}", "needs either"),
        ('{"prompt": "a", "output_len": 0}', "output_len=0"),
        ("", "no request"),
    ):
        path.write_text(text)
        with pytest.raises(ValueError, match=word):
            file_requests(path, 1, 9)


@pytest.mark.parametrize(
    "url", ["http://10.0.0.1:80", "https://127.0.0.1", "http://example.org", "127.0.0.1:8000"]
)
def test_only_this_machine_is_loaded(url):
    with pytest.raises(ValueError, match="loopback"):
        loopback_address(url)


def test_what_is_not_http_is_refused():
    async def go():
        async def answer(reader, writer):
            writer.write(b"SSH-2.0\r\n")
            writer.close()

        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        async with server:
            url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
            async for _ in post_events(url, "/", {}):
                pass

    with pytest.raises(HttpError, match="not HTTP"):
        asyncio.run(go())


def test_command_line(tmp_path, capsys):
    server, output = FakeServer(gap=0.001), tmp_path / "report.json"

    async def go():
        async with server.run() as url:
            arguments = serve.parse(
                ["--base_url", url, "--num_prompts=6", "--max_concurrency=2", "--input_len=8",
                 "--output_len=4", "--output", str(output), "--api_key=secret"]
            )  # fmt: skip
            await serve._run(arguments)

    asyncio.run(go())
    value = json.loads(output.read_text())
    assert value["completed"] == 6 and value["total_output_tokens"] == 24
    assert len(value["itls"]) == 6 and "secret" not in output.read_text()
    assert "Time to first token" in capsys.readouterr().out
    assert serve.main(["--base_url=http://10.0.0.1"]) == 1
    assert "loopback" in capsys.readouterr().err
    assert serve.main(["--dataset=file"]) == 1
    assert "--dataset_path" in capsys.readouterr().err
