"""Endpoints, answers and refusals, against an engine without a device."""

import json

import pytest

from engine.testing import FakeCore

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"


def _chat(text="hi", **more):
    return {"messages": [{"role": "user", "content": text}], **more}


def test_small_endpoints(run_app):
    async def test(client, engine, core):
        assert (await client.get("/health")).json() == {"status": "ok"}
        assert "version" in (await client.get("/version")).json()
        models = (await client.get("/v1/models")).json()
        assert [m["id"] for m in models["data"]] == ["fake", "alias"]
        assert models["data"][0]["max_model_len"] == 512
        assert (await client.get("/v1/models/alias")).json()["id"] == "alias"
        for method, path, status in (
            ("GET", "/nothing", 404),
            ("GET", "/v1/models/other", 404),
            ("GET", CHAT, 405),
            ("POST", "/health", 405),
        ):
            response = await client.request(method, path)
            assert response.status_code == status
            assert set(response.json()["error"]) == {"message", "type", "param", "code"}

    run_app(test)


def test_completion(run_app):
    async def test(client, engine, core):
        body = {"model": "alias", "prompt": "abc", "max_tokens": 5}
        answer = (await client.post(COMPLETIONS, json=body)).json()
        assert answer["object"] == "text_completion"
        assert answer["model"] == "alias"
        (choice,) = answer["choices"]
        assert choice["text"] == "abcab"
        assert choice["finish_reason"] == "length"
        assert answer["usage"] == {
            "prompt_tokens": 3,
            "completion_tokens": 5,
            "total_tokens": 8,
            "prompt_tokens_details": {"cached_tokens": 0},
            "num_preemptions": 0,
            "num_recomputed_tokens": 0,
        }

    run_app(test)


def test_completion_ends_at_eos_without_its_text(run_app):
    async def test(client, engine, core):
        answer = (await client.post(COMPLETIONS, json={"prompt": "ab", "max_tokens": 50})).json()
        assert answer["choices"][0]["text"] == "ababab"
        assert answer["choices"][0]["finish_reason"] == "stop"
        assert answer["choices"][0]["stop_reason"] is None
        assert answer["usage"]["completion_tokens"] == 7

    run_app(test)


def test_several_prompts_and_n(run_app):
    async def test(client, engine, core):
        body = {"prompt": ["ab", "cd"], "n": 2, "max_tokens": 3, "echo": True}
        answer = (await client.post(COMPLETIONS, json=body)).json()
        assert [c["index"] for c in answer["choices"]] == [0, 1, 2, 3]
        assert [c["text"] for c in answer["choices"]] == ["ababa"] * 2 + ["cdcdc"] * 2
        body = {"prompt": [[67, 68], [69]], "max_tokens": 2, "stream": True}
        texts = {0: "", 1: ""}
        for chunk in await client.events(COMPLETIONS, body):
            for choice in chunk["choices"]:
                texts[choice["index"]] += choice["text"]
        assert texts == {0: "AB", 1: "CC"}

    run_app(test)


def test_chat(run_app):
    async def test(client, engine, core):
        answer = (await client.post(CHAT, json=_chat(max_completion_tokens=7))).json()
        assert answer["object"] == "chat.completion"
        message = answer["choices"][0]["message"]
        assert message["role"] == "assistant"
        assert message["content"] == "user: h"
        assert answer["usage"]["prompt_tokens"] == len("user: hi|assistant: ")
        parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
        body = {"messages": [{"role": "user", "content": parts}], "max_tokens": 13}
        answer = (await client.post(CHAT, json=body)).json()
        assert answer["choices"][0]["message"]["content"] == "user: one\ntwo"

    run_app(test)


def test_chat_stream(run_app):
    async def test(client, engine, core):
        body = _chat(max_tokens=6, stream=True, stream_options={"include_usage": True}, n=2)
        chunks = await client.events(CHAT, body)
        assert {c["object"] for c in chunks} == {"chat.completion.chunk"}
        assert len({c["id"] for c in chunks}) == 1
        assert [c["choices"][0]["delta"].get("role") for c in chunks[:2]] == ["assistant"] * 2
        texts, reasons = {0: "", 1: ""}, {}
        for chunk in chunks[:-1]:
            assert chunk["usage"] is None
            (choice,) = chunk["choices"]
            texts[choice["index"]] += choice["delta"].get("content", "")
            if choice["finish_reason"]:
                reasons[choice["index"]] = choice["finish_reason"]
        assert texts == {0: "user: ", 1: "user: "}
        assert reasons == {0: "length", 1: "length"}
        assert chunks[-1]["choices"] == []
        assert chunks[-1]["usage"]["completion_tokens"] == 12

    run_app(test)


def test_stream_without_usage_has_none(run_app):
    async def test(client, engine, core):
        chunks = await client.events(CHAT, _chat(max_tokens=3, stream=True))
        assert all("usage" not in c for c in chunks)
        body = _chat(
            max_tokens=3,
            stream=True,
            stream_options={"include_usage": True, "continuous_usage_stats": True},
        )
        chunks = await client.events(CHAT, body)
        counts = [c["usage"]["completion_tokens"] for c in chunks if c.get("usage")]
        assert counts == sorted(counts)
        assert counts[-1] == 3

    run_app(test)


def test_characters_are_never_cut(run_app):
    """One token per byte: half a character must wait for its other half."""

    async def test(client, engine, core):
        text = "é—🚀x"
        body = {"prompt": text, "max_tokens": len(text.encode()), "stream": True}
        chunks = await client.events(COMPLETIONS, body)
        pieces = [c["choices"][0]["text"] for c in chunks]
        assert "".join(pieces) == text
        assert "\ufffd" not in "".join(pieces)
        body["max_tokens"] = 4
        chunks = await client.events(COMPLETIONS, body)
        assert "".join(c["choices"][0]["text"] for c in chunks) == "é\ufffd"

    run_app(test)


def test_stop_strings_across_tokens(run_app):
    async def test(client, engine, core):
        for stream in (False, True):
            for include in (False, True):
                body = {
                    "prompt": "hello stop",
                    "stop": ["never", "o st"],
                    "stream": stream,
                    "max_tokens": 30,
                    "include_stop_str_in_output": include,
                }
                if stream:
                    chunks = await client.events(COMPLETIONS, body)
                    text = "".join(c["choices"][0]["text"] for c in chunks)
                    last = chunks[-1]["choices"][0]
                else:
                    last = (await client.post(COMPLETIONS, json=body)).json()["choices"][0]
                    text = last["text"]
                assert text == ("hello st" if include else "hell")
                assert last["finish_reason"] == "stop"
                assert last["stop_reason"] == "o st"

    run_app(test)


def test_completion_logprobs(run_app):
    async def test(client, engine, core):
        body = {"prompt": "é", "max_tokens": 3, "logprobs": 2}
        choice = (await client.post(COMPLETIONS, json=body)).json()["choices"][0]
        logprobs = choice["logprobs"]
        assert logprobs["tokens"] == ["bytes:\\xc3", "bytes:\\xa9", "bytes:\\xc3"]
        assert logprobs["token_logprobs"] == [-0.5] * 3
        assert [len(t) for t in logprobs["top_logprobs"]] == [2] * 3
        chunks = await client.events(COMPLETIONS, {**body, "prompt": "ab", "stream": True})
        offsets = [o for c in chunks for o in c["choices"][0]["logprobs"]["text_offset"]]
        assert offsets == [0, 1, 2]

    run_app(test)


def test_chat_logprobs(run_app):
    async def test(client, engine, core):
        body = _chat(logprobs=True, top_logprobs=3, max_tokens=2)
        content = (await client.post(CHAT, json=body)).json()["choices"][0]["logprobs"]["content"]
        assert [e["token"] for e in content] == ["u", "s"]
        assert content[0]["bytes"] == [ord("u")]
        assert [t["token"] for t in content[0]["top_logprobs"]] == ["u", "v", "w"]
        body = _chat(logprobs=True, max_tokens=2)
        content = (await client.post(CHAT, json=body)).json()["choices"][0]["logprobs"]["content"]
        assert content[0]["top_logprobs"] == []
        assert content[0]["logprob"] == -0.5

    run_app(test)


BAD = [
    (COMPLETIONS, {"prompt": ""}, 400, "empty"),
    (COMPLETIONS, {"prompt": []}, 400, "empty"),
    (COMPLETIONS, {"prompt": [[]]}, 400, "empty"),
    (COMPLETIONS, {}, 400, "prompt"),
    (COMPLETIONS, {"prompt": 3}, 400, "prompt"),
    (COMPLETIONS, {"prompt": [1, "a"]}, 400, "prompt"),
    (COMPLETIONS, {"prompt": [999]}, 400, "999"),
    (COMPLETIONS, {"prompt": [-1]}, 400, "vocabulary"),
    (COMPLETIONS, {"prompt": "a", "model": "other"}, 404, "other"),
    (COMPLETIONS, {"prompt": "a" * 600}, 400, "600 tokens; with max_model_len=512"),
    (COMPLETIONS, {"prompt": "a", "max_tokens": 0}, 400, "max_tokens=0"),
    (COMPLETIONS, {"prompt": "a", "max_tokens": -5}, 400, "max_tokens=-5"),
    (COMPLETIONS, {"prompt": "a", "max_tokens": "5"}, 400, "max_tokens"),
    (COMPLETIONS, {"prompt": "a", "max_tokens": True}, 400, "max_tokens"),
    (COMPLETIONS, {"prompt": "a", "max_tokens": 1.5}, 400, "max_tokens"),
    (COMPLETIONS, {"prompt": "a", "temperature": -1}, 400, "temperature"),
    (COMPLETIONS, {"prompt": "a", "temperature": "hot"}, 400, "temperature"),
    (COMPLETIONS, {"prompt": "a", "top_p": 0}, 400, "top_p"),
    (COMPLETIONS, {"prompt": "a", "n": 10**6}, 400, "n=1000000"),
    (COMPLETIONS, {"prompt": ["a"] * 20, "n": 100}, 400, "2000 sequences"),
    (COMPLETIONS, {"prompt": "a", "n": 0}, 400, "n=0"),
    (COMPLETIONS, {"prompt": "a", "logprobs": 21}, 400, "logprobs=21"),
    (COMPLETIONS, {"prompt": "a", "logprobs": -1}, 400, "logprobs=-1"),
    (COMPLETIONS, {"prompt": "a", "seed": 2**70}, 400, "seed"),
    (COMPLETIONS, {"prompt": "a", "stop": ["x"] * 100}, 400, "100 strings"),
    (COMPLETIONS, {"prompt": "a", "stop": [""]}, 400, "stop"),
    (COMPLETIONS, {"prompt": "a", "stop_token_ids": [99999]}, 400, "99999"),
    (COMPLETIONS, {"prompt": "a", "logit_bias": {"x": 1}}, 400, "'x'"),
    (COMPLETIONS, {"prompt": "a", "logit_bias": {"5": 101}}, 400, "101"),
    (COMPLETIONS, {"prompt": "a", "suffix": "b"}, 400, "suffix"),
    (COMPLETIONS, {"prompt": "a", "best_of": 3}, 400, "best_of"),
    (COMPLETIONS, {"prompt": "a", "echo": True, "logprobs": 1}, 400, "echo"),
    (COMPLETIONS, {"prompt": "a", "prompt_logprobs": 1}, 400, "prompt_logprobs"),
    (COMPLETIONS, {"prompt": "a", "priority": 1}, 400, "--scheduling_policy=priority"),
    (COMPLETIONS, {"prompt": "a", "stream_options": {"include_usage": True}}, 400, "stream=true"),
    (COMPLETIONS, {"prompt": "\ud800"}, 400, "surrogate"),
    (COMPLETIONS, {"prompt": "x" * 3000 + "\udfff"}, 400, "surrogate"),
    (CHAT, {"messages": []}, 400, "messages"),
    (CHAT, {"messages": "hi"}, 400, "messages"),
    (CHAT, {"messages": [{"content": "x"}]}, 400, "role"),
    (CHAT, {"messages": [{"role": "wizard", "content": "x"}]}, 400, "unknown role wizard"),
    (CHAT, _chat(top_logprobs=2), 400, "logprobs=true"),
    (CHAT, _chat(logprobs=True, top_logprobs=50), 400, "logprobs=50"),
    (CHAT, _chat(tools=[{"type": "function"}]), 400, "tools"),
    (CHAT, _chat(response_format={"type": "json_object"}), 400, "response_format"),
    (CHAT, _chat(reasoning_effort="high"), 400, "reasoning_effort"),
    (CHAT, _chat([{"type": "image_url", "image_url": {"url": "x"}}]), 400, "image_url"),
    (CHAT, _chat(chat_template_kwargs={"messages": []}), 400, "must not set messages"),
    (CHAT, _chat(max_completion_tokens=0), 400, "max_tokens=0"),
]


@pytest.mark.parametrize(("path", "body", "status", "words"), BAD, ids=lambda v: str(v)[:40])
def test_bad_requests(run_app, path, body, status, words):
    async def test(client, engine, core):
        for stream in (False, True):
            whole = body if "stream_options" in body else {**body, "stream": stream}
            content = json.dumps(whole).encode()
            response = await client.post(path, content=content)
            assert response.status_code == status, response.text
            error = response.json()["error"]
            assert words in error["message"]
            assert "\n" not in error["message"]
        # The engine serves on.
        good = await client.post(COMPLETIONS, json={"prompt": "a", "max_tokens": 1})
        assert good.status_code == 200

    run_app(test)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "JSON"),
        (b"{", "JSON"),
        (b"[]", "object"),
        (b"\xff\xfe{}", "UTF"),
        (b'{"prompt": "\xff"}', "UTF-8"),
        (b'{"prompt": ' + b"[" * 100_000 + b"}", "nested"),
        (b'{"prompt": "a", "temperature": NaN}', "temperature"),
        (b'{"prompt": "a", "temperature": 1e999}', "temperature"),
        (b'{"prompt": "a", "seed": ' + b"9" * 5000 + b"}", "integer"),
    ],
    ids=lambda v: str(v)[:20],
)
def test_bad_bodies(run_app, content, words):
    async def test(client, engine, core):
        response = await client.post(COMPLETIONS, content=content)
        assert response.status_code == 400, response.text
        assert words in response.json()["error"]["message"]

    run_app(test)


def test_large_bodies(run_app):
    async def test(client, engine, core):
        long = {"prompt": "word " * 2_000_000, "max_tokens": 1}
        response = await client.post(COMPLETIONS, json=long)
        assert response.status_code == 400
        assert "10000000 characters" in response.json()["error"]["message"]
        ids = {"prompt": [5] * 1_000_000, "max_tokens": 1}
        response = await client.post(COMPLETIONS, json=ids)
        assert response.status_code == 400
        assert "1000000 tokens; with max_model_len=512" in response.json()["error"]["message"]

    run_app(test, max_body_bytes=11 * 2**20)

    async def too_large(client, engine, core):
        response = await client.post(COMPLETIONS, json={"prompt": "x" * 3000})
        assert response.status_code == 413

        async def chunks():
            for _ in range(10):
                yield b"x" * 500

        response = await client.post(COMPLETIONS, content=chunks())
        assert response.status_code == 413
        assert "max_body_mib" in response.json()["error"]["message"]

    run_app(too_large, max_body_bytes=2048)


def test_harmless_fields_are_accepted(run_app, caplog):
    async def test(client, engine, core):
        body = _chat(
            max_tokens=2, user="u", metadata={"a": "b"}, tools=[], tool_choice="none",
            response_format={"type": "text"}, n=None, temperature=None, surprise=3,
            prompt_logprobs=None, stream=None, seed=5, top_k=-1, min_p=0.0, logit_bias={},
        )  # fmt: skip
        for _ in range(2):
            assert (await client.post(CHAT, json=body)).status_code == 200

    run_app(test)
    assert sum("'surprise'" in record.getMessage() for record in caplog.records) == 1


def test_api_key(run_app):
    async def test(client, engine, core):
        body = {"prompt": "a", "max_tokens": 1}
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "Basic one"}):
            response = await client.post(COMPLETIONS, json=body, headers=headers)
            assert response.status_code == 401
            assert response.json()["error"]["code"] == "invalid_api_key"
        for key in ("one", "two"):
            headers = {"Authorization": f"Bearer {key}"}
            response = await client.post(COMPLETIONS, json=body, headers=headers)
            assert response.status_code == 200
        assert (await client.get("/health")).status_code == 200
        assert (await client.get("/v1/models")).status_code == 401

    run_app(test, api_keys=["one", "two"])


def test_cached_tokens_are_reported(run_app):
    async def test(client, engine, core):
        body = {"prompt": "abcdefghijkl", "max_tokens": 1}
        first = (await client.post(COMPLETIONS, json=body)).json()["usage"]
        second = (await client.post(COMPLETIONS, json=body)).json()["usage"]
        assert first["prompt_tokens_details"]["cached_tokens"] == 0
        assert second["prompt_tokens_details"]["cached_tokens"] == 8
        salted = (await client.post(COMPLETIONS, json={**body, "cache_salt": "s"})).json()["usage"]
        assert salted["prompt_tokens_details"]["cached_tokens"] == 0

    run_app(test, core=FakeCore(enable_prefix_caching=True))


def test_a_pool_that_is_too_small_warns(run_app):
    async def test(client, engine, core):
        body = {"prompt": "abcdefgh", "max_tokens": 40, "ignore_eos": False}
        answer = (await client.post(COMPLETIONS, json=body)).json()
        assert answer["choices"][0]["finish_reason"] == "length"
        assert answer["usage"]["completion_tokens"] < 24
        assert answer["warnings"]
        body |= {"stream": True, "stream_options": {"include_usage": True}}
        chunks = await client.events(COMPLETIONS, body)
        assert chunks[-1]["warnings"] == answer["warnings"]

    run_app(test, core=FakeCore(num_blocks=5))
