"""Random interleavings of everything a scheduler can be asked, on the counting model."""

from __future__ import annotations

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

CONFIGS = st.fixed_dictionaries(
    {
        "num_blocks": st.integers(4, 30),
        "block_size": st.sampled_from([1, 2, 4, 16]),
        "max_num_seqs": st.integers(1, 8),
        "max_num_batched_tokens": st.integers(8, 40),
        "max_model_len": st.integers(8, 80),
        "watermark": st.sampled_from([0.0, 0.05, 0.2, 0.9]),
        "reserve_full_sequence": st.booleans(),
        "enable_prefix_caching": st.booleans(),
        "scheduling_policy": st.sampled_from(["fcfs", "priority"]),
        "long_prefill_token_threshold": st.sampled_from([0, 3, 10]),
        "max_num_queued_reqs": st.sampled_from([None, 3]),
        "max_preemptions_per_request": st.sampled_from([None, 0, 1]),
        "overlap_depth": st.integers(0, 2),
    }
)


def test_state_machine(make_fuzzer):
    class SchedulerMachine(RuleBasedStateMachine):
        @initialize(config=CONFIGS, loader=st.booleans(), data=st.data())
        def make(self, config, loader, data) -> None:
            self.fuzzer = make_fuzzer(lambda n: data.draw(st.integers(0, n - 1)), **config)
            if loader:
                self.fuzzer.use_loader()

        @rule()
        def add(self) -> None:
            self.fuzzer.add()

        @rule()
        def schedule(self) -> None:
            self.fuzzer.schedule()

        @rule()
        def update(self) -> None:
            self.fuzzer.update()

        @rule()
        def step(self) -> None:
            self.fuzzer.schedule()
            self.fuzzer.update()

        @rule()
        def abort(self) -> None:
            self.fuzzer.abort()

        @rule()
        def stop(self) -> None:
            self.fuzzer.stop()

        @rule()
        def reset(self) -> None:
            self.fuzzer.reset()

        @rule()
        def finish_load(self) -> None:
            self.fuzzer.finish_load()

        @invariant()
        def check(self) -> None:
            if hasattr(self, "fuzzer"):
                self.fuzzer.check()

        def teardown(self) -> None:
            if hasattr(self, "fuzzer"):
                self.fuzzer.end()

    run_state_machine_as_test(
        SchedulerMachine,
        settings=settings(max_examples=120, stateful_step_count=40, deadline=None),
    )


def _random_config(rng: np.random.Generator) -> dict:
    return {
        "num_blocks": int(rng.integers(4, 60)),
        "block_size": int(rng.choice([1, 2, 4, 16])),
        "max_num_seqs": int(rng.integers(1, 9)),
        "max_num_batched_tokens": int(rng.integers(8, 64)),
        "max_model_len": int(rng.integers(8, 120)),
        "watermark": float(rng.choice([0.0, 0.05, 0.2, 0.9])),
        "reserve_full_sequence": bool(rng.integers(2)),
        "enable_prefix_caching": bool(rng.integers(2)),
        "scheduling_policy": str(rng.choice(["fcfs", "priority"])),
        "long_prefill_token_threshold": int(rng.choice([0, 0, 3, 10])),
        "max_num_queued_reqs": [None, 3][rng.integers(2)],
        "max_preemptions_per_request": [None, None, 0, 1][rng.integers(4)],
        "overlap_depth": int(rng.integers(3)),
    }


def _walk(make_fuzzer, seed: int, steps: int) -> dict[str, int]:
    """`steps` schedule calls in walks of 500, each with its own configuration."""
    rng = np.random.default_rng(seed)
    seen = dict.fromkeys(
        ("num_preemptions", "prefix_hits", "num_discarded_tokens", "num_generated_tokens"), 0
    )
    for _ in range(steps // 500):
        fuzzer = make_fuzzer(lambda n: int(rng.integers(n)), **_random_config(rng))
        if rng.integers(3) == 0:
            fuzzer.use_loader()
        load = 0.05 + 0.4 * rng.random()
        for step in range(500):
            while fuzzer.scheduler.num_waiting < 12 and rng.random() < load:
                fuzzer.add()
            fuzzer.schedule()
            depth = fuzzer.scheduler.config.overlap_depth
            while len(fuzzer.driver.pending) > depth or (
                fuzzer.driver.pending and rng.random() < 0.3
            ):
                fuzzer.update()
            if rng.random() < 0.03:
                fuzzer.abort()
            if rng.random() < 0.02:
                fuzzer.stop()
            if rng.random() < 0.005:
                fuzzer.reset()
            if rng.random() < 0.3:
                fuzzer.finish_load()
            if step % 25 == 0:
                fuzzer.check()
        fuzzer.end()
        for name in seen:
            seen[name] += getattr(fuzzer.scheduler.stats, name)
    return seen


def test_counting_model_over_random_steps(make_fuzzer):
    seen = _walk(make_fuzzer, seed=0, steps=12_000)
    # The walk went where the difficulties are.
    assert seen["num_preemptions"] > 200
    assert seen["prefix_hits"] > 200
    assert seen["num_discarded_tokens"] > 50
    assert seen["num_generated_tokens"] > 10_000


@pytest.mark.slow
def test_counting_model_over_100k_random_steps(make_fuzzer):
    for seed in range(1, 11):
        _walk(make_fuzzer, seed, steps=10_000)
