"""The throughput benchmark's arithmetic, its rounds, and its workers with an engine made for tests."""

import io
import json
import math
import sys
import time
import types

import numpy as np
import pytest

from benchmarks import checkpoints, peer_venvs, throughput
from benchmarks.peers import memory_bandwidth, worker
from benchmarks.peers.process import Worker, WorkerError
from models.config import ModelConfig
from models.gguf_file import GGUFFile
from models.gguf_loader import GGUFSource, config_from_gguf


class FakeEngine:
    """Takes 1 s per prompt token and 2 s per later token of a batch, by a clock of its own."""

    def __init__(self):
        self.now = 0.0

    def generate(self, prompts, output_len):
        self.now += sum(map(len, prompts)) + 2.0 * (output_len - 1)
        return [[7] * output_len for _ in prompts]

    def info(self):
        return {"version": "fake"}


def test_rates_of_a_measurement():
    engine = FakeEngine()
    found = worker.measure(engine, [[1] * 4, [2] * 4], 11, clock=lambda: engine.now)
    assert found["prefill_s"] == 8.0 and found["total_s"] == 28.0
    assert found["prefill_tok_s"] == 1.0
    assert found["output_tok_s"] == pytest.approx(22 / 28)
    assert found["decode_tok_s"] == pytest.approx(1.0)  # 2 rows x 10 tokens in 20 s


def test_an_answer_of_the_wrong_length_is_an_error():
    engine = FakeEngine()
    engine.generate = lambda prompts, n: [[1]]
    with pytest.raises(RuntimeError, match=r"asked for 5 tokens, got \[1\]"):
        worker.measure(engine, [[1]], 5)


def serve(monkeypatch, engine, lines):
    module = types.ModuleType("benchmarks.peers.fake")
    module.load = lambda settings: engine
    monkeypatch.setitem(sys.modules, "benchmarks.peers.fake", module)
    answers = io.StringIO()
    worker.serve({"adapter": "fake"}, io.StringIO("".join(lines)), answers)
    return [json.loads(line) for line in answers.getvalue().splitlines()]


def test_the_protocol_goes_on_after_an_error(monkeypatch):
    request = json.dumps({"prompts": [[1, 2]], "output_len": 3}) + "\n"
    ready, error, answer = serve(monkeypatch, FakeEngine(), ["{\n", request])
    assert ready["ready"]["version"] == "fake" and "error" in error
    assert answer["tokens"] == [[7, 7, 7]]


def test_an_adapter_that_does_not_load_says_why(monkeypatch):
    answers = io.StringIO()
    worker.serve({"adapter": "no_such_engine"}, io.StringIO(""), answers)
    assert "ModuleNotFoundError" in json.loads(answers.getvalue())["error"]


def settings(adapter):
    return {"adapter": adapter, "threads": 1, "dtype": "float32"}


def test_a_worker_process_answers_and_ends(tmp_path):
    process = Worker(sys.executable, settings("memory_bandwidth"), tmp_path / "log", timeout_s=60)
    try:
        assert process.ready["bytes_per_s"] > 1e8
        memory = process.memory()
        assert memory["peak_rss"] >= memory["rss"] > 1 << 20
        with pytest.raises(WorkerError):  # it has no `generate`
            process.ask({"prompts": [[1]], "output_len": 2}, 30)
    finally:
        process.close()
    assert process._process.poll() is not None
    with pytest.raises(WorkerError):
        process.ask({}, 5)


def test_a_worker_that_fails_or_is_missing_is_an_error(tmp_path):
    with pytest.raises(WorkerError, match="no_such_engine"):
        Worker(sys.executable, settings("no_such_engine"), tmp_path / "log", timeout_s=60)
    with pytest.raises(WorkerError, match="does not start"):
        Worker(str(tmp_path / "python"), settings("x"), tmp_path / "log", timeout_s=60)


def test_a_worker_that_hangs_is_ended(tmp_path):
    sleeper = tmp_path / "python"
    sleeper.write_text("#!/bin/sh\nsleep 60\n")
    sleeper.chmod(0o755)
    begun = time.monotonic()
    with pytest.raises(WorkerError, match="no answer within"):
        Worker(str(sleeper), settings("x"), tmp_path / "log", timeout_s=0.2)
    assert time.monotonic() - begun < 5


class FakeWorker:
    def __init__(self, rate, fail_at=math.inf):
        self.rate, self.fail_at, self.asked, self.closed = rate, fail_at, 0, False

    def ask(self, request, timeout_s):
        self.asked += 1
        if self.asked >= self.fail_at:
            raise WorkerError("it broke")
        rate = self.rate + self.asked
        return {
            "decode_tok_s": rate, "output_tok_s": rate / 2, "prefill_tok_s": 10 * rate,
            "tokens": [[1] * request["output_len"] for _ in request["prompts"]],
        }  # fmt: skip

    def close(self):
        self.closed = True


def rounds(workers, **options):
    defaults = {
        "concurrency": [2], "output_len": 3, "rounds": 3, "deadline": time.monotonic() + 60,
        "say": lambda text: None,
    }  # fmt: skip
    return throughput.run_rounds(workers, [[1], [2]], **(defaults | options))


def test_rounds_alternate_and_leave_out_what_is_far_behind_or_broken():
    ours, good = FakeWorker(100), FakeWorker(50)
    slow, broken = FakeWorker(20), FakeWorker(60, fail_at=2)
    workers = {
        ("tidegate", "float32"): ours, ("llama_cpp", "float32"): good,
        ("transformers_static", "float32"): slow, ("vllm_cpu", "float32"): broken,
    }  # fmt: skip
    answers = rounds(workers)
    assert (ours.asked, good.asked, slow.asked) == (3, 3, 1)
    assert broken.closed and ("vllm_cpu", "float32") not in workers
    assert len(answers["vllm_cpu", "float32", 2]) == 1
    again = rounds({("llama_cpp", "float32"): good, ("x", "float32"): slow}, repeat_all=True)
    assert len(again["x", "float32", 2]) == 3


def test_nothing_begins_after_the_deadline():
    assert rounds({("tidegate", "int8"): FakeWorker(1)}, deadline=time.monotonic() - 1) == {}


def test_summary_takes_medians_and_compares_with_the_best_peer():
    def answer(rate, tokens=(1, 2)):
        return {"decode_tok_s": rate, "output_tok_s": rate, "prefill_tok_s": rate,
                "tokens": [list(tokens)]}  # fmt: skip

    rows = throughput.summarize(
        {
            ("llama_cpp", "bfloat16", 1): [answer(40), answer(60), answer(50)],
            ("vllm_cpu", "bfloat16", 1): [answer(20, (1, 3))],
            ("tidegate", "bfloat16", 1): [answer(70), answer(75), answer(80)],
            ("tidegate", "int8", 1): [answer(100)] * 3,
            ("llama_cpp", "float32", 8): [answer(1000)],
        },
        {("tidegate", "int8"): {"peak_rss": 3 << 20, "rss": 2 << 20}},
        {"bfloat16": 150.0, "int8": 200.0},
        {("tidegate", "int8"): 1 << 20},
    )
    found = {(row["engine"], row["dtype"], row["concurrency"]): row for row in rows}
    ours = found["tidegate", "bfloat16", 1]
    assert ours["ratio"] == 1.5 and ours["best_peer"] == "llama_cpp bfloat16"
    assert ours["bound_share"] == 0.5
    int8 = found["tidegate", "int8", 1]
    assert int8["ratio"] == 2.0 and int8["peak_rss_mib"] == 3 and int8["kv_pool_mib"] == 1
    assert found["vllm_cpu", "bfloat16", 1]["same_first_tokens"] == 0.0
    assert found["llama_cpp", "bfloat16", 1]["same_first_tokens"] == 1.0
    table = throughput.format_table(rows)
    assert "1.50x llama_cpp bfloat16" in table and "| 50% |" in table


def test_ratios_count_the_rounds_that_both_ran():
    def answers(*rates):
        return [dict.fromkeys(throughput.RATES, rate) | {"tokens": [[1]]} for rate in rates]

    rows = throughput.summarize(
        {
            ("tidegate", "bfloat16", 8): answers(90),  # out of time before its slow round
            ("vllm_cpu", "bfloat16", 8): answers(60, 30),
        },
        {},
        {},
    )
    ours = next(row for row in rows if row["engine"] == "tidegate")
    assert (ours["ratio"], ours["prefill_ratio"], ours["ratio_rounds"]) == (1.5, 1.5, 1)


def test_prompts_differ_and_have_their_length():
    prompts = throughput.make_prompts(range(50), 4, 70)
    assert [len(prompt) for prompt in prompts] == [70] * 4 and len({*map(tuple, prompts)}) == 4
    assert prompts[0][:3] == [0, 1, 2] and prompts[0][50] == 0
    assert len(throughput.reference_stream()) > 1000
    with pytest.raises(ValueError, match="0 tokens"):
        throughput.make_prompts([1], 1, 0)


def test_bytes_that_a_token_has_to_read():
    config = ModelConfig(
        family="llama", vocab_size=10, hidden_size=4, intermediate_size=8, num_layers=1,
        num_heads=2, num_kv_heads=1, head_dim=2, tie_embeddings=True,
    )  # fmt: skip
    matrices = 40 + 16 + 8 + 8 + 16 + 32 * 3  # embedding, q, k, v, o, mlp
    assert throughput.bytes_per_token(config, "float32", 0) == 4 * (matrices + 12)
    kv = 10 * 2 * 2 * 2  # 10 tokens of keys and values of 2 numbers of 2 bytes
    assert throughput.bytes_per_token(config, "bfloat16", 10) == 2 * (matrices + 12) + kv
    scales = 10 + 4 + 2 + 2 + 4 + 8 + 8 + 4
    assert throughput.bytes_per_token(config, "int8", 0) == matrices + 4 * scales + 4 * 12


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["--only=vllm"], "'vllm'"),
        (["--dtypes=fp8"], "'fp8'"),
        (["--concurrency=0"], "--concurrency=0"),
        (["--rounds=0"], "--rounds=0"),
        (["--output_len=1"], "--output_len=1"),
        (["--threads=100000"], "--threads=100000"),
        ([], "--venvs"),
    ],
)
def test_wrong_arguments(arguments, word, capsys):
    with pytest.raises(SystemExit):
        throughput.parse(arguments)
    assert word in capsys.readouterr().err


def test_variants_and_interpreters(tmp_path):
    found = throughput.variants(throughput.ENGINES, throughput.DTYPES)
    assert len(found) == 11 and ("llama_cpp", "int8") not in found
    assert peer_venvs.interpreter("tidegate", None) == sys.executable
    with pytest.raises(FileNotFoundError, match="--setup"):
        peer_venvs.interpreter("vllm_cpu", tmp_path)


def test_bandwidth_is_of_the_right_order():
    assert 1e8 < memory_bandwidth.read_bandwidth(1, 1 << 20) < 1e13


@pytest.fixture(scope="module")
def tiny_gguf(tmp_path_factory):
    from gguf import GGUFWriter

    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    writer = GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_context_length(64)
    writer.add_embedding_length(8)
    writer.add_feed_forward_length(16)
    writer.add_head_count(2)
    writer.add_head_count_kv(1)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(12)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(["t", "1", *(f"t{i}" for i in range(1, 11))])
    writer.add_token_merges(["t 1"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    rng = np.random.default_rng(0)
    shapes = {
        "token_embd": (12, 8), "output_norm": (8,), "blk.0.attn_norm": (8,),
        "blk.0.ffn_norm": (8,), "blk.0.attn_q": (8, 8), "blk.0.attn_k": (4, 8),
        "blk.0.attn_v": (4, 8), "blk.0.attn_output": (8, 8), "blk.0.ffn_gate": (16, 8),
        "blk.0.ffn_up": (16, 8), "blk.0.ffn_down": (8, 16),
    }  # fmt: skip
    for name, shape in shapes.items():
        writer.add_tensor(name + ".weight", rng.standard_normal(shape).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("dtype", checkpoints.DTYPES)
def test_converted_weights_are_the_same(tiny_gguf, tmp_path, dtype):
    from engine.tokenizer import Tokenizer
    from models.hf_config import config_from_folder
    from models.safetensors_loader import SafetensorsSource

    paths = checkpoints.prepare(tiny_gguf, tmp_path, dtype)
    file = GGUFFile(tiny_gguf)
    config = config_from_gguf(file)
    source = GGUFSource(file, config)
    again = GGUFFile(paths["gguf"])
    assert config_from_gguf(again) == config
    assert again.metadata["tokenizer.ggml.tokens"] == file.metadata["tokenizer.ggml.tokens"]
    folder = tmp_path / f"hf-{dtype}"
    assert config_from_folder(folder)[0].num_kv_heads == config.num_kv_heads
    assert Tokenizer.load(folder).id_to_token(3) == "t2"
    assert Tokenizer.load(folder).eos_token_ids == (2,)
    hf, plain = SafetensorsSource(folder), GGUFSource(again, config)
    tolerance = 0 if dtype == "float32" else 2**-8
    for name in source.names():
        want = source.read(name)
        np.testing.assert_allclose(hf.read(name).astype(np.float32), want, rtol=tolerance)
        np.testing.assert_allclose(plain.read(name), want, rtol=tolerance)
