"""Microseconds that the scheduler takes per step, by number of running requests.

`python -m benchmarks.scheduler_overhead [--json]` times schedule + update of pure decode steps,
and the step that admits 16 prompts of 512 tokens. Thread CPU time, median over steps, so that
other work on the machine counts little. `--profile=N` shows where the time goes at N requests.
"""

from __future__ import annotations

import argparse
import cProfile
import gc
import json
import pstats
import time
from collections.abc import Sequence

import numpy as np

from scheduler import Request, Scheduler, SchedulerConfig

BLOCK_SIZE = 16
RUNNING = (1, 32, 128, 256, 1024, 4096)


def _decoding_scheduler(running: int, prefix_caching: bool, num_steps: int) -> Scheduler:
    """A scheduler whose `running` requests decode, with room for `num_steps` steps."""
    rng = np.random.default_rng(0)
    max_model_len = 256 + num_steps
    blocks_per_seq = -(-max_model_len // BLOCK_SIZE)
    scheduler = Scheduler(
        SchedulerConfig(
            num_blocks=1 + running * blocks_per_seq,
            block_size=BLOCK_SIZE,
            max_num_seqs=running,
            max_num_batched_tokens=max(8192, running),
            max_model_len=max_model_len,
            enable_prefix_caching=prefix_caching,
        )
    )
    for i in range(running):
        # Lengths differ, so that in each step about one request in 16 needs a block.
        prompt = rng.integers(3, 50000, int(rng.integers(64, 128)), dtype=np.int32)
        request = Request(f"r{i}", prompt, num_steps + 128, stop_token_ids=(2,))
        scheduler.add(request)
    while scheduler.num_waiting:
        output = scheduler.schedule()
        scheduler.update(output, np.full(len(output.slots), 5, np.int32))
    return scheduler


def time_decode(running: int, prefix_caching: bool, num_steps: int) -> list[float]:
    """Seconds of thread CPU time of each of `num_steps` decode steps."""
    scheduler = _decoding_scheduler(running, prefix_caching, num_steps + 50)
    rng = np.random.default_rng(1)
    seconds = []
    gc.collect()
    for step in range(num_steps + 20):
        tokens = rng.integers(3, 50000, running, dtype=np.int32)
        start = time.thread_time_ns()
        output = scheduler.schedule()
        scheduler.update(output, tokens)
        elapsed = time.thread_time_ns() - start
        assert output.num_decodes == running
        if step >= 20:
            seconds.append(elapsed * 1e-9)
    return seconds


def time_prefill(prefix_caching: bool, num_steps: int) -> list[float]:
    """Seconds of thread CPU time of steps that admit and compute 16 prompts of 512 tokens."""
    rng = np.random.default_rng(2)
    scheduler = Scheduler(
        SchedulerConfig(
            num_blocks=2048,
            block_size=BLOCK_SIZE,
            max_num_batched_tokens=8192,
            max_model_len=1024,
            enable_prefix_caching=prefix_caching,
        )
    )
    seconds = []
    for step in range(num_steps):
        for i in range(16):
            prompt = rng.integers(3, 50000, 512, dtype=np.int32)
            scheduler.add(Request(f"r{step}.{i}", prompt, 64, stop_token_ids=(2,)))
        start = time.thread_time_ns()
        output = scheduler.schedule()
        scheduler.update(output, np.full(16, 5, np.int32))
        elapsed = time.thread_time_ns() - start
        assert output.total_num_tokens == 8192
        assert len(output.joined) == 16
        for i in range(16):
            scheduler.abort(f"r{step}.{i}")
        scheduler.schedule()
        seconds.append(elapsed * 1e-9)
    return seconds


def measure(running: Sequence[int], num_steps: int) -> list[dict]:
    """Rows {running, prefix_caching, us}: median microseconds per schedule + update."""
    return [
        {
            "running": n,
            "prefix_caching": caching,
            "us": round(1e6 * float(np.median(time_decode(n, caching, num_steps))), 1),
        }
        for n in running
        for caching in (False, True)
    ]


def measure_prefill(num_steps: int) -> list[dict]:
    """Rows {prefill, prefix_caching, us} of steps of 16 x 512 prompt tokens."""
    return [
        {
            "prefill": "16x512",
            "prefix_caching": caching,
            "us": round(1e6 * float(np.median(time_prefill(caching, num_steps))), 1),
        }
        for caching in (False, True)
    ]


def _profile(running: int, num_steps: int) -> None:
    scheduler = _decoding_scheduler(running, True, num_steps)
    tokens = np.full(running, 5, np.int32)
    profile = cProfile.Profile()
    profile.enable()
    for _ in range(num_steps):
        scheduler.update(scheduler.schedule(), tokens)
    profile.disable()
    pstats.Stats(profile).sort_stats("tottime").print_stats(20)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print the decode rows as JSON only")
    parser.add_argument("--running", type=int, nargs="*", default=RUNNING)
    parser.add_argument("--steps", type=int, default=1000, help="steps timed for each row")
    parser.add_argument("--profile", type=int, metavar="N", help="profile N running requests")
    args = parser.parse_args(argv)
    if args.profile:
        _profile(args.profile, args.steps)
        return
    table = measure(args.running, args.steps)
    if args.json:
        print(json.dumps(table))
        return
    print(f"{'running':>8} {'prefix caching':>15} {'us per step':>12}")
    for row in table:
        print(f"{row['running']:>8} {row['prefix_caching']!s:>15} {row['us']:>12.1f}")
    for row in measure_prefill(max(100, args.steps // 5)):
        print(f"{row['prefill']:>8} {row['prefix_caching']!s:>15} {row['us']:>12.1f}")


if __name__ == "__main__":
    main()
