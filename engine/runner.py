"""Runs planned steps on the device: owns weights, KV pages and resident state, and dispatches."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import hashlib
import os
import pathlib
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx
from numpy.typing import NDArray
from tqdm import tqdm

from engine.aot_bundle import Bundle, source_digest, write_bundle
from engine.buckets import Buckets
from engine.compile_cache import without_jax_cache
from engine.device_state import (
    MAX_BULK_UPDATES,
    DeviceState,
    Need,
    Param,
    StepShape,
    apply_join,
    apply_updates,
    init_state,
    pack_join,
    pack_step,
)
from engine.step import StepConfig, StepFunction, StepOutput, make_step
from pallas_kernels import KVPages, init_kv_pages
from scheduler import SchedulerOutput


@dataclasses.dataclass(frozen=True)
class Join:
    """A request that enters a slot.

    Attributes:
      slot, computed: where, and how many tokens are in the cache already.
      tokens: int32 [L], prompt and output so far, padded to the longest sequence.
      block_row: int32 [B].
      params: int32 [NUM_PARAMS], from `pack_params`.
      need: what its steps need.
    """

    slot: int
    computed: int
    tokens: NDArray[np.int32]
    block_row: NDArray[np.int32]
    params: NDArray[np.int32]
    need: Need


@dataclasses.dataclass(frozen=True)
class FetchedLogprobs:
    """Log-probabilities of a step on the host; see `SampledLogprobs`."""

    chosen: NDArray[np.float32]
    rank: NDArray[np.int32]
    top_values: NDArray[np.float32]
    top_ids: NDArray[np.int32]


_NO_UPDATES = np.zeros((3, 0), np.int32)


class StepHandle:
    """A dispatched step whose tokens may not be there yet."""

    def __init__(
        self, output: StepOutput, num_rows: int, num_steps: int, need: int, *, on_host: bool
    ):
        self._output = output
        self._num_steps = num_steps
        self._num_rows = num_rows
        self._has_logprobs = bool(need & Need.LOGPROBS)
        if not on_host:
            # Starts the copy as soon as the step ends, before anybody waits for it.
            output.tokens.copy_to_host_async()

    def tokens(self) -> NDArray[np.int32]:
        """Waits for the step. int32 [num_rows], or [num_rows, num_steps] of several in a row."""
        tokens = np.asarray(self._output.tokens)
        if self._num_steps > 1:
            return tokens[: self._num_steps, : self._num_rows].T
        return (tokens if tokens.ndim == 1 else tokens[0])[: self._num_rows]

    def logprobs(self) -> FetchedLogprobs | None:
        """Waits for the step; None where no row asked."""
        if not self._has_logprobs:
            return None
        return FetchedLogprobs(*(np.asarray(x) for x in self._output.logprobs))


class ModelRunner:
    """Dispatches steps. Steps run on the device in the order in which they are dispatched."""

    def __init__(
        self,
        model: nnx.Module,
        step_config: StepConfig,
        *,
        num_layers: int,
        num_slots: int,
        max_model_len: int,
        max_blocks: int,
        buckets: Buckets,
    ):
        """Allocates the KV pages and the resident state; compiles nothing yet."""
        graphdef, params = nnx.split(model)
        self._leaves, treedef = jax.tree.flatten(params)
        self._graphdef, self._treedef = graphdef, treedef
        self._config = step_config
        self._num_slots = num_slots
        self.buckets = buckets
        self._kv_pages: list[KVPages] = [
            init_kv_pages(step_config.spec, implementation=step_config.implementation)
            for _ in range(num_layers)
        ]
        self._state = init_state(num_slots, max_model_len, max_blocks)
        self._need = np.zeros(num_slots + 1, np.int32)
        self._on_host = next(iter(self._state.computed.devices())).platform == "cpu"
        self._compiled: dict[StepShape | str, Any] = {}

    # Compilation ------------------------------------------------------------------------------

    @property
    def _jobs(self) -> list[StepShape | str]:
        return ["join", "updates", *self.buckets.all]

    def fingerprint(self) -> str:
        """Identifies what this runner compiles: sources, model structure, shapes and settings."""
        parts = [
            source_digest("engine", "models", "pallas_kernels"),
            repr(self._config),
            str(self._treedef),
            *(str(_abstract(x)) for x in jax.tree.leaves((self._leaves, self._kv_pages))),
            *(str(_abstract(x)) for x in self._state),
            *(str(job) for job in self._jobs),
        ]
        return hashlib.blake2b("\n".join(parts).encode(), digest_size=16).hexdigest()

    def load_bundle(self, bundle: Bundle) -> None:
        """Takes every executable from a bundle. Raises BundleError, and then keeps none."""
        loaded = {job: bundle.load(_name(job)) for job in self._jobs}
        self._compiled.update(loaded)

    def write_bundle(self, path: pathlib.Path) -> None:
        """Writes the compiled steps. Raises OSError where the file cannot be written."""
        write_bundle(path, self.fingerprint(), {_name(k): c for k, c in self._compiled.items()})

    def warm_up(self, *, progress: bool = True) -> None:
        """Compiles what is not loaded, then runs each bucket once on padding.

        After this, serving compiles nothing.
        """
        jobs = [job for job in self._jobs if job not in self._compiled]
        with (
            without_jax_cache(),
            concurrent.futures.ThreadPoolExecutor(max(1, os.cpu_count() or 1)) as pool,
            tqdm(
                total=len(jobs), desc="Compiling", disable=not (progress and jobs), leave=False
            ) as bar,
        ):
            futures = {pool.submit(self._compile, job): job for job in jobs}
            for future in concurrent.futures.as_completed(futures):
                self._compiled[futures[future]] = future.result()
                bar.update()
        for shape in self.buckets.all:
            self._run_padding(shape)

    def _run_padding(self, shape: StepShape) -> None:
        empty = np.zeros(0, np.int32)
        packed = pack_step(
            shape,
            padding_slot=self._num_slots,
            need=Need.NONE,
            slots=empty,
            num_tokens=empty,
            samples=np.zeros(0, bool),
            num_decodes=0,
            updates=_NO_UPDATES,
        )
        jax.block_until_ready(self._run(shape, packed).tokens)

    def _executable(self, key: StepShape | str) -> Any:
        compiled = self._compiled.get(key)
        if compiled is None:
            with without_jax_cache():
                compiled = self._compiled[key] = self._compile(key)
        return compiled

    def _compile(self, key: StepShape | str) -> Any:
        def vector(size: int) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct((size,), np.int32)

        state = jax.tree.map(_abstract, self._state)
        if key == "join":
            size = 2 + state.tokens.shape[1] + state.block_table.shape[1] + int(Param.END)
            return jax.jit(apply_join, donate_argnums=0).lower(state, vector(size)).compile()
        if key == "updates":
            updates = jax.ShapeDtypeStruct((3, MAX_BULK_UPDATES), np.int32)
            return jax.jit(apply_updates, donate_argnums=0).lower(state, updates).compile()
        assert isinstance(key, StepShape)
        return self.compile_step(make_step(self._graphdef, self._treedef, self._config, key), key)

    def compile_step(self, step: StepFunction, shape: StepShape) -> Any:
        """Compiles a step function for this runner's arrays, KV pages and state donated."""
        state = jax.tree.map(_abstract, self._state)
        leaves = [_abstract(x) for x in self._leaves]
        kv_pages = jax.tree.map(_abstract, self._kv_pages)
        packed = jax.ShapeDtypeStruct((shape.input_size,), np.int32)
        # The fake step of a benchmark reads no weights; they are passed all the same.
        jitted = jax.jit(step, donate_argnums=(1, 2), keep_unused=True)
        return jitted.lower(leaves, kv_pages, state, packed).compile()

    # Dispatch ---------------------------------------------------------------------------------

    def dispatch(self, plan: SchedulerOutput, joins: Sequence[Join]) -> StepHandle:
        """Uploads what changed and starts the planned step; returns before it has run.

        Args:
          plan: with at least one row.
          joins: one for each of plan.joined.
        """
        for join in joins:
            self._need[join.slot] = join.need
            packed = pack_join(join.slot, join.computed, join.tokens, join.block_row, join.params)
            self._state = self._executable("join")(self._state, packed)
        n = len(plan.slots)
        shape = self.buckets.select(
            num_rows=n, num_tokens=plan.total_num_tokens, num_decodes=plan.num_decodes
        )
        updates = _NO_UPDATES
        if len(plan.new_block_ids):
            updates = np.stack([plan.new_block_slots, plan.new_block_index, plan.new_block_ids])
            updates = self._apply_bulk(updates, shape.max_updates)
        need = int(np.bitwise_or.reduce(self._need[plan.slots]))
        packed = pack_step(
            shape,
            padding_slot=self._num_slots,
            need=need,
            slots=plan.slots,
            num_tokens=plan.num_tokens,
            samples=plan.samples,
            num_decodes=plan.num_decodes,
            updates=updates,
            num_steps=plan.num_steps,
        )
        output = self._run(shape, packed)
        return StepHandle(output, n, plan.num_steps, need, on_host=self._on_host)

    def _apply_bulk(self, updates: NDArray[np.int32], most: int) -> NDArray[np.int32]:
        """Sends block updates beyond `most` ahead of the step; returns the rest."""
        while updates.shape[1] > most:
            chunk, updates = updates[:, :MAX_BULK_UPDATES], updates[:, MAX_BULK_UPDATES:]
            bulk = np.zeros((3, MAX_BULK_UPDATES), np.int32)
            bulk[0] = self._num_slots
            bulk[:, : chunk.shape[1]] = chunk
            self._state = self._executable("updates")(self._state, bulk)
        return updates

    def _run(self, shape: StepShape, packed: NDArray[np.int32]) -> StepOutput:
        self._kv_pages, self._state, output = self._executable(shape)(
            self._leaves, self._kv_pages, self._state, packed
        )
        return output

    @property
    def state(self) -> DeviceState:
        """The resident state, for tests and tools."""
        return self._state


def _name(job: StepShape | str) -> str:
    """The name of a job's entry in a bundle."""
    if isinstance(job, str):
        return job
    return f"{'decode' if job.decode else 'mixed'}-{job.num_tokens}x{job.num_rows}"


def _abstract(x: jax.Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype)
