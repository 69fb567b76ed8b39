"""Reading a trace of steady decode steps."""

import pytest

from benchmarks.device_busy import Timeline, plot, record


def test_overlapping_executions_count_once():
    timeline = Timeline(device=[(0.0, 4.0), (3.0, 6.0), (8.0, 10.0)], host=[])
    assert timeline.busy == pytest.approx(0.8)
    assert timeline.longest_gap_ms == pytest.approx(2.0)


def test_a_trace_holds_every_step_and_the_waiting_is_not_the_hosts(tmp_path, tiny_model_dir):
    timelines = {}
    for on in (False, True):
        timelines[str(on)] = timeline = record(
            rows=4,
            dtype="float32",
            num_steps=40,
            async_scheduling=on,
            model=str(tiny_model_dir),
            load_format="dummy",
        )
        assert timeline.device  # not all 40: the smallest end before anybody waits for them
        assert all(begin < end for begin, end in timeline.device)
        assert 0 < timeline.busy <= 1
        assert len(timeline.host) == 80  # before the wait for tokens, and after it
        assert all(begin <= end for begin, end in timeline.host)
    plot(timelines, tmp_path / "timeline.png", window_ms=5)
    assert (tmp_path / "timeline.png").stat().st_size > 1000
