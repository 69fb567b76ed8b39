"""The server process with the default model, spoken to by OpenAI's own client."""

import asyncio
import concurrent.futures
import json
import pathlib
import signal
import subprocess
import sys
import time

import httpx
import openai
import psutil
import pytest

ROOT = pathlib.Path(__file__).resolve().parents[3]
CASES = json.loads((ROOT / "tests" / "data" / "smollm2_135m_q4_1_greedy.json").read_text())["cases"]
CHATS = [c for c in CASES if c["messages"] is not None and c["n_prompt"] < 100]
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
MODEL = "smollm2"


class Server:
    """A server process with the default model."""

    def __init__(self, log, *flags):
        self._log = open(log, "w+")  # noqa: SIM115
        self.popen = subprocess.Popen(
            [sys.executable, "run_server.py", "--port=0", f"--served_model_name={MODEL}", *flags],
            cwd=ROOT,
            stderr=self._log,
        )
        deadline = time.monotonic() + 240
        self.url = None
        while self.url is None:
            assert self.popen.poll() is None, self.log
            assert time.monotonic() < deadline, self.log
            self.url = next(
                (x.split()[-1] for x in self.log.splitlines() if " on http://" in x), None
            )
            time.sleep(0.1)
        self.client = openai.OpenAI(base_url=self.url + "/v1", api_key="any", max_retries=0)

    @property
    def log(self):
        """What the server wrote so far."""
        return pathlib.Path(self._log.name).read_text()

    def metric(self, name):
        """One number of /metrics."""
        text = httpx.get(self.url + "/metrics").text
        return next(float(x.split()[-1]) for x in text.splitlines() if x.startswith(name))

    def stop(self):
        """Ends the server by SIGTERM; returns its exit code."""
        if self.popen.poll() is None:
            self.popen.send_signal(signal.SIGTERM)
        try:
            return self.popen.wait(60)
        finally:
            self.popen.kill()
            self._log.close()


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    server = Server(
        tmp_path_factory.mktemp("server") / "log",
        "--dtype=float32",
        "--max-num-seqs=16",
        "--max-num-batched-tokens=64",
        "--max-model-len=512",
        "--num-kv-blocks=100",
        "--block_size=8",
        "--watermark=0.02",
    )
    yield server
    assert server.stop() == 0, server.log


def _chat(server, messages, **more):
    more = {"temperature": 0, "max_tokens": 64, **more}
    return server.client.chat.completions.create(model=MODEL, messages=messages, **more)


def test_answers_equal_the_reference(server):
    """All at once, on a pool that does not hold them all."""
    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        answers = pool.map(lambda case: _chat(server, case["messages"]), CHATS)
        for case, answer in zip(CHATS, answers, strict=True):
            (choice,) = answer.choices
            assert choice.message.role == "assistant"
            assert answer.usage.prompt_tokens == case["n_prompt"]
            if case["first_eos_index"] is None:
                assert choice.message.content == case["text_all"]
                assert choice.finish_reason == "length"
            else:
                assert choice.message.content == case["text_until_eos"]
                assert choice.finish_reason == "stop"
                assert answer.usage.completion_tokens == case["first_eos_index"] + 1


def test_streams_say_the_same(server):
    whole = _chat(server, QUESTION)
    stream = _chat(server, QUESTION, stream=True, stream_options={"include_usage": True})
    text, usage = "", None
    for chunk in stream:
        if chunk.choices:
            text += chunk.choices[0].delta.content or ""
        usage = chunk.usage or usage
    assert text == whole.choices[0].message.content == "The capital of France is Paris."
    assert usage.completion_tokens == whole.usage.completion_tokens == 8


def test_completions(server):
    case = next(c for c in CASES if c["id"] == "raw_text_1")
    arguments = {"model": MODEL, "max_tokens": 16, "temperature": 0}
    answer = server.client.completions.create(prompt=case["prompt"], logprobs=5, **arguments)
    (choice,) = answer.choices
    for step, expected in enumerate(case["top5_first16"]):
        values = sorted(choice.logprobs.top_logprobs[step].values(), reverse=True)[:5]
        assert values == pytest.approx([v for _, v in expected], abs=1e-3)
    by_ids = server.client.completions.create(prompt=case["prompt_ids"], **arguments)
    assert by_ids.choices[0].text == choice.text
    pieces = server.client.completions.create(prompt=case["prompt"], stream=True, **arguments)
    assert "".join(c.choices[0].text for c in pieces) == choice.text


def test_sampling(server):
    arguments = {"temperature": 1.0, "max_tokens": 12, "seed": 11}
    first = _chat(server, QUESTION, n=3, **arguments)
    again = _chat(server, QUESTION, n=3, **arguments)
    texts = [c.message.content for c in first.choices]
    assert texts == [c.message.content for c in again.choices]
    assert len(set(texts)) > 1


def test_stop(server):
    answer = _chat(server, QUESTION, stop=["France is"])
    assert answer.choices[0].message.content == "The capital of "
    assert answer.choices[0].finish_reason == "stop"


def test_errors(server):
    client = server.client
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        client.chat.completions.create(model="other", messages=QUESTION)
    with pytest.raises(openai.BadRequestError, match="max_tokens=0"):
        _chat(server, QUESTION, max_tokens=0)
    with pytest.raises(openai.BadRequestError, match=r"513 tokens; with max_model_len=512"):
        client.completions.create(model=MODEL, prompt=[5] * 513)
    with pytest.raises(openai.BadRequestError, match="49152"):
        client.completions.create(model=MODEL, prompt=[49152])
    assert client.models.list().data[0].id == MODEL


def test_leaving_frees_the_request(server):
    stream = _chat(server, QUESTION, stream=True, max_tokens=400, extra_body={"ignore_eos": True})
    next(iter(stream))
    stream.close()
    deadline = time.monotonic() + 10
    while server.metric("vllm:num_requests_running"):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert server.metric("vllm:kv_cache_usage_perc") == 0


def test_preemptions_are_told(server):
    before = server.metric("vllm:num_preemptions_total")
    body = {"temperature": 0, "max_tokens": 100, "ignore_eos": True, "prompt": "Once upon a time"}

    def one(_):
        return httpx.post(server.url + "/v1/completions", json=body, timeout=120).json()

    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(one, range(12)))
    assert len({a["choices"][0]["text"] for a in answers}) == 1
    assert all(a["usage"]["completion_tokens"] == 100 for a in answers)
    told = sum(a["usage"]["num_preemptions"] for a in answers)
    assert told == server.metric("vllm:num_preemptions_total") - before > 0


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_three_waves_of_200_streams(tmp_path):
    """A pool for a few dozen, 200 clients: all complete, memory stays, and SIGTERM ends it."""
    server = Server(
        tmp_path / "log",
        "--max-model-len=512",
        "--max-num-seqs=64",
        "--num-kv-blocks=200",
        "--shutdown-timeout-s=3",
    )
    process = psutil.Process(server.popen.pid)

    async def one(client, i, tokens):
        body = {
            "prompt": f"Tell me about the number {i}.", "max_tokens": tokens, "ignore_eos": True,
            "temperature": 0, "stream": True, "stream_options": {"include_usage": True},
        }  # fmt: skip
        lines = []
        async with client.stream("POST", server.url + "/v1/completions", json=body) as response:
            assert response.status_code == 200
            lines = [line async for line in response.aiter_lines() if line]
        assert lines[-1] == "data: [DONE]"
        return json.loads(lines[-2][6:])

    async def wave(tokens):
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(timeout=600, limits=limits) as client:
            return await asyncio.gather(*(one(client, i, tokens) for i in range(200)))

    resident = []
    for _ in range(3):
        last = asyncio.run(wave(60))
        assert all(chunk["usage"]["completion_tokens"] == 60 for chunk in last)
        assert server.metric("vllm:kv_cache_usage_perc") == 0
        assert server.metric("vllm:num_requests_running") == 0
        resident.append(process.memory_info().rss)
    assert server.metric("vllm:num_preemptions_total") > 0
    assert server.metric("tidegate:watchdog_violations_total") == 0
    assert resident[2] < 1.03 * resident[1], resident

    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        running = pool.submit(asyncio.run, wave(400))
        while server.metric("vllm:num_requests_waiting") < 50:
            time.sleep(0.05)
        began = time.monotonic()
        assert server.stop() == 0
        assert time.monotonic() - began < 15
        ends = running.result()
    cut = [chunk for chunk in ends if "error" in chunk]
    assert cut
    assert all(chunk["error"]["code"] == "shutting_down" for chunk in cut)
