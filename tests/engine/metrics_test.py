"""Names, labels and numbers of the metrics."""

from prometheus_client.parser import text_string_to_metric_families

from engine.metrics import EngineMetrics, Histogram
from engine.output_processor import OutputProcessor
from engine.sampling_params import SamplingParams
from engine.testing import FakeCore

VLLM = {
    "vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc",
    "vllm:num_preemptions_total", "vllm:prefix_cache_queries_total",
    "vllm:prefix_cache_hits_total", "vllm:prompt_tokens_total", "vllm:generation_tokens_total",
    "vllm:request_success_total", "vllm:time_to_first_token_seconds_bucket",
    "vllm:inter_token_latency_seconds_bucket", "vllm:e2e_request_latency_seconds_bucket",
    "vllm:request_time_per_output_token_seconds_sum", "vllm:request_queue_time_seconds_count",
    "vllm:request_prefill_time_seconds_count", "vllm:request_decode_time_seconds_count",
    "vllm:request_inference_time_seconds_count", "vllm:iteration_tokens_total_bucket",
    "vllm:request_prompt_tokens_bucket", "vllm:request_generation_tokens_bucket",
    "vllm:request_params_n_bucket", "vllm:request_params_max_tokens_bucket",
    "vllm:cache_config_info",
}  # fmt: skip
OURS = {
    "tidegate:watermark_blocks", "tidegate:kv_blocks", "tidegate:recomputed_tokens_total",
    "tidegate:preemptions_total", "tidegate:watchdog_violations_total",
}  # fmt: skip


def _samples(metrics):
    return {
        (sample.name, sample.labels.get("le"), sample.labels.get("finished_reason")): sample
        for family in text_string_to_metric_families(metrics.render().decode())
        for sample in family.samples
    }


def test_histogram():
    histogram = Histogram("h", "help", [1, 2])
    for value in (0.5, 1.0, 1.5, 2.5):
        histogram.observe(value)
    histogram.observe(2.0, times=3)
    family = histogram.family({"a": "b"})
    assert [(s.labels.get("le"), s.value) for s in family.samples[:3]] == [
        ("1.0", 2.0), ("2.0", 6.0), ("+Inf", 7.0),
    ]  # fmt: skip
    assert family.samples[-1].value == 11.5
    assert histogram.count == 7


def test_everything_is_there_and_counts():
    core = FakeCore(num_blocks=40, watermark=0.1)
    metrics = EngineMetrics(core.scheduler, model_name="m", config={"block_size": 4})
    processor = OutputProcessor(core, delta=True)
    for i in range(8):
        params = SamplingParams(max_tokens=20, ignore_eos=True, n=1 + (i == 0))
        processor.add_request(f"r{i}", None, [5 + i] * 12, params, arrival_time=100.0)
        metrics.on_add(f"r{i}", 100.0, n=params.n, max_tokens=20)
    now = 100.0
    while core.has_unfinished():
        now += 0.5
        metrics.on_step(processor.process(core.step()), now)
    samples = _samples(metrics)
    names = {name for name, _, _ in samples}
    assert names >= VLLM | OURS
    for sample in samples.values():
        assert sample.labels["model_name"] == "m"
        assert sample.labels["engine"] == "0"

    def value(name, le=None, reason=None):
        return samples[name, le, reason].value

    assert value("vllm:generation_tokens_total") == 9 * 20
    assert value("vllm:prompt_tokens_total") == 8 * 12
    assert value("vllm:request_success_total", reason="length") == 9
    assert value("vllm:e2e_request_latency_seconds_count") == 8
    assert value("vllm:time_to_first_token_seconds_bucket", "+Inf") == 8
    assert value("vllm:request_generation_tokens_sum") == 180
    assert value("vllm:num_preemptions_total") == core.scheduler.stats.num_preemptions > 0
    assert value("tidegate:watermark_blocks") == 4
    assert value("vllm:num_requests_running") == 0
    assert value("vllm:inter_token_latency_seconds_bucket", "0.4") == 0
    assert value("vllm:inter_token_latency_seconds_bucket", "0.5") > 0
    # A counter never falls below zero and buckets only grow.
    buckets = [
        s.value
        for (n, le, _), s in samples.items()
        if n == "vllm:e2e_request_latency_seconds_bucket"
    ]
    assert buckets == sorted(buckets)
