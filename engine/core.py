"""The engine's loop: schedule, dispatch, read the tokens of the step before, account.

Single-threaded: one thread calls every method. `LLM` calls it directly, the server through
`engine.async_engine`.
"""

from __future__ import annotations

import collections
import dataclasses
import logging
import pathlib
import time
from collections.abc import Sequence

import jax
import numpy as np
from numpy.typing import NDArray

from engine.aot_bundle import Bundle, BundleError
from engine.buckets import Buckets
from engine.compile_cache import prepare_cache_dir
from engine.config import EngineConfig
from engine.device_state import MAX_EOS_IDS, Need, pack_params
from engine.outputs import Logprob, RequestMetrics, TokenOutput
from engine.runner import FetchedLogprobs, Join, ModelRunner, StepHandle
from engine.sampling_params import SamplingParams
from engine.sizing import GIB, decide_sizes
from engine.step import StepConfig
from engine.tokenizer import Tokenizer
from models import load_model
from pallas_kernels import KVCacheSpec, cpu_build, resolve_implementation
from scheduler import Request, RequestStatus, Scheduler, SchedulerOutput

logger = logging.getLogger(__name__)

# A run of decode steps is planned to take at most this long, so that who arrives during one hardly
# waits: slow devices run single steps, fast ones as many as hide the host's work.
_DECODE_RUN_S = 0.02


@dataclasses.dataclass(eq=False, slots=True)
class _Active:
    """What the engine keeps of an unfinished request beside the scheduler's record."""

    request: Request
    params: SamplingParams
    packed: NDArray[np.int32]
    need: Need
    first_token_time: float | None = None
    metrics: RequestMetrics = dataclasses.field(default_factory=RequestMetrics)


@dataclasses.dataclass(frozen=True, slots=True)
class _InFlight:
    plan: SchedulerOutput
    handle: StepHandle
    dispatched: float


class EngineCore:
    """One model on one device (or mesh), its scheduler and its runner."""

    def __init__(self, config: EngineConfig, *, progress: bool = True):
        """Loads the model, sizes and allocates the KV pool, compiles every step.

        Args:
          config: checked here. Raises ValueError with one sentence.
          progress: show progress bars on standard error.
        """
        started = time.monotonic()
        self.config = config = config.validate()
        self._cache_dir = prepare_cache_dir(config.compile_cache_dir)
        device = jax.devices()[0]
        cpu_build.set_mode(config.cpu_kernels)
        loaded = load_model(
            config.model,
            dtype=_dtype(config.dtype, device.platform),
            quantization=config.quantization,
            load_format=config.load_format,
            seed=config.seed,
            progress=progress,
        )
        self.model_config = loaded.config
        self.model_name = str(loaded.source_path)
        self.tokenizer = Tokenizer.load(config.tokenizer or loaded.tokenizer_source)
        self._eos_ids = _eos_ids(loaded.config.eos_token_ids, self.tokenizer.eos_token_ids)
        self.vocab_size = loaded.config.vocab_size

        dtype = _dtype(config.dtype, device.platform)
        kv_dtype = dtype if config.kv_cache_dtype == "auto" else config.kv_cache_dtype
        spec = KVCacheSpec(
            2, config.block_size or 16, self.model_config.num_kv_heads, self.model_config.head_dim,
            kv_dtype,
        )  # fmt: skip
        implementation = config.attention_implementation or resolve_implementation(spec)
        self.sizes = sizes = decide_sizes(
            config,
            self.model_config,
            kv_dtype=kv_dtype,
            implementation=implementation,
            device=device,
        )
        spec = dataclasses.replace(spec, num_pages=sizes.num_blocks, page_size=sizes.block_size)
        self.scheduler = Scheduler(
            config.scheduler_config(
                num_blocks=sizes.num_blocks,
                block_size=sizes.block_size,
                max_model_len=sizes.max_model_len,
                max_num_seqs=sizes.max_num_seqs,
                max_num_batched_tokens=sizes.max_num_batched_tokens,
            )
        )
        self.runner = ModelRunner(
            loaded.model,
            StepConfig(spec, implementation, config.batch_invariant, config.max_decode_steps),
            num_layers=self.model_config.num_layers,
            num_slots=sizes.max_num_seqs,
            max_model_len=sizes.max_model_len,
            max_blocks=self.scheduler.config.max_blocks_per_seq,
            buckets=Buckets(
                sizes.max_num_seqs,
                sizes.max_num_batched_tokens,
                # Fewer rows take kernels that sum in another order.
                least=8 if config.batch_invariant else 1,
            ),
        )
        if config.warmup:
            self._warm_up(progress)
        self._active: dict[str, _Active] = {}
        self._num_with_logprobs = 0
        self._in_flight: collections.deque[_InFlight] = collections.deque()
        self._depth = self.scheduler.config.overlap_depth
        self._last_read = 0.0
        self._decode_step_s = 0.0  # of recent decode steps; 0 while there were none
        self._seeds = np.random.default_rng(config.seed)
        self._device = device
        self._implementation = implementation
        self._dtype_name = np.dtype(dtype).name
        self.startup_seconds = time.monotonic() - started

    def _warm_up(self, progress: bool) -> None:
        """Gets every compiled step: from the named bundle, the cache folder, or the compiler."""
        runner = self.runner
        named = self.config.aot_bundle
        if named is not None and (path := pathlib.Path(named)).exists():
            runner.load_bundle(Bundle(path, runner.fingerprint()))
            runner.warm_up(progress=progress)
            return
        cached = self._cache_dir and self._cache_dir / f"steps-{runner.fingerprint()}.zip"
        found = False
        if cached and cached.exists():
            try:
                runner.load_bundle(Bundle(cached, runner.fingerprint()))
                found = True
            except BundleError as error:
                logger.warning("%s; compiling anew.", error)
        runner.warm_up(progress=progress)
        if named is not None:
            try:
                runner.write_bundle(pathlib.Path(named))
            except OSError as error:
                raise ValueError(
                    f"AOT bundle {named} cannot be written: {error.strerror}; change --aot_bundle"
                ) from error
        if cached and not found:
            try:
                runner.write_bundle(cached)
            except OSError as error:
                logger.warning("Compile cache %s cannot be written: %s.", cached, error.strerror)

    # Requests ---------------------------------------------------------------------------------

    def add_request(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        *,
        priority: int = 0,
        arrival_time: float | None = None,
        cache_salt: str | None = None,
    ) -> None:
        """Queues one sequence (`params.n` is fanned out by the caller).

        Raises:
          ValueError: the request is wrong or can never fit; one sentence with the numbers.
          scheduler.QueueFullError: too many wait.
        """
        if request_id in self._active:
            raise ValueError(f"request id {request_id!r} is in use")
        prompt = self._check_prompt(prompt_token_ids)
        params.check_vocabulary(self.vocab_size)
        limit = self.sizes.max_model_len
        if len(prompt) > limit - 1:
            raise ValueError(
                f"the prompt has {len(prompt)} tokens; with max_model_len={limit} at most "
                f"{limit - 1} leave room for one token of output"
            )
        seed = params.seed if params.seed is not None else int(self._seeds.integers(2**32))
        stops = () if params.ignore_eos else self._eos_ids
        packed, need = pack_params(params, prompt_len=len(prompt), seed=seed, eos_ids=stops)
        request = Request(
            request_id=request_id,
            prompt_token_ids=prompt,
            max_tokens=params.max_tokens or limit - len(prompt),
            stop_token_ids=(*stops, *(params.stop_token_ids or ())),
            ignore_eos=params.ignore_eos,
            priority=priority,
            arrival_time=arrival_time,
            cache_salt=cache_salt,
        )
        self.scheduler.add(request)
        self._active[request_id] = _Active(request, params, packed, need)
        self._num_with_logprobs += params.logprobs is not None

    def _check_prompt(self, prompt_token_ids: Sequence[int]) -> NDArray[np.int32]:
        if len(prompt_token_ids) == 0:
            raise ValueError("the prompt is empty: it needs at least one token")
        prompt = np.asarray(prompt_token_ids)
        if prompt.ndim != 1 or prompt.dtype.kind not in "iu":
            raise ValueError("prompt token ids must be a flat list of integers")
        low, high = int(prompt.min()), int(prompt.max())
        if low < 0 or high >= self.vocab_size:
            wrong = low if low < 0 else high
            raise ValueError(
                f"prompt token id {wrong} is outside the vocabulary of {self.vocab_size} tokens"
            )
        return prompt.astype(np.int32)

    def abort(self, request_id: str) -> bool:
        """Ends a request at once and frees its blocks; False where it is unknown."""
        self._forget(request_id)
        return self.scheduler.abort(request_id)

    def finish(self, request_id: str, stop_reason: str) -> None:
        """Ends a request whose text reached a stop string."""
        if self._forget(request_id):
            self.scheduler.finish(
                request_id, RequestStatus.FINISHED_STOPPED, stop_reason=stop_reason
            )

    def _forget(self, request_id: str) -> bool:
        active = self._active.pop(request_id, None)
        if active is None:
            return False
        self._num_with_logprobs -= active.params.logprobs is not None
        return True

    def has_unfinished(self) -> bool:
        """Whether `step` has anything left to do."""
        return self.scheduler.has_unfinished() or bool(self._in_flight)

    # The loop ---------------------------------------------------------------------------------

    def step(self) -> list[TokenOutput]:
        """Plans and dispatches one step, and reads the one that is due. May return nothing."""
        outputs: list[TokenOutput] = []
        plan = self.scheduler.schedule(self._max_steps())
        self._report_preemptions(plan)
        outputs += self._ended_without_token(plan)
        if len(plan.slots):
            handle = self.runner.dispatch(plan, self._joins(plan))
            self._in_flight.append(_InFlight(plan, handle, time.monotonic()))
        if self._in_flight and (len(self._in_flight) > self._depth or not len(plan.slots)):
            outputs += self._read(self._in_flight.popleft())
        return outputs

    def _max_steps(self) -> int:
        """Decode steps that may run in a row now."""
        if self._num_with_logprobs or not self._decode_step_s:
            return 1  # a run reports no log-probabilities; its length needs a measured step
        return max(1, min(self.config.max_decode_steps, int(_DECODE_RUN_S / self._decode_step_s)))

    def _joins(self, plan: SchedulerOutput) -> list[Join]:
        joins = []
        scheduler = self.scheduler
        for slot in plan.joined.tolist():
            request: Request = scheduler.slot_requests.item(slot)
            active = self._active[request.request_id]
            start = int(plan.start[np.flatnonzero(plan.slots == slot)[0]])
            joins.append(
                Join(
                    slot,
                    start,
                    scheduler.token_ids[slot],
                    scheduler.block_table[slot],
                    active.packed,
                    active.need,
                )
            )
        return joins

    def _read(self, step: _InFlight) -> list[TokenOutput]:
        """Waits for a step's tokens and turns them into outputs."""
        plan = step.plan
        tokens = step.handle.tokens()
        now = time.monotonic()
        begun = max(step.dispatched, self._last_read)
        self._last_read = now
        decodes = plan.num_decodes
        step_s = (now - begun) / plan.num_steps
        if plan.total_num_tokens == decodes:
            # Follows the fastest recent step: a slow one may have been compiled or held up.
            mean = 0.75 * self._decode_step_s + 0.25 * step_s
            self._decode_step_s = min(mean, step_s) if self._decode_step_s else step_s
        self.scheduler.observe_step(
            step_s,
            num_prefill_tokens=plan.total_num_tokens - decodes,
            num_decodes=decodes,
            context_tokens=int(plan.start.sum()) + plan.total_num_tokens,
        )
        result = self.scheduler.update(plan, tokens)
        logprobs = step.handle.logprobs()
        ended = {request.request_id for request in result.finished}
        actives = self._active
        outputs: list[TokenOutput] = []
        # Python per row is the host's largest cost: plain ints, and all that is rare set aside.
        rows = zip(result.requests.tolist(), result.tokens.tolist(), result.rows.tolist())
        last_row = -1
        for request, token, row in rows:
            if row == last_row:  # one more of a run of steps; its output is there already
                outputs[-1].token_ids.append(token)
                continue
            request_id = request.request_id
            active = actives.get(request_id)
            if active is None or active.request is not request:
                continue
            last_row = row
            if active.first_token_time is None:
                active.first_token_time = now
                active.metrics = _metrics(active)
            if logprobs is None and request_id not in ended:
                outputs.append(
                    TokenOutput(request_id, [token], None, None, None, active.metrics, None)
                )
            else:
                outputs.append(self._output(active, [token], logprobs, row))
        return outputs

    def _ended_without_token(self, plan: SchedulerOutput) -> list[TokenOutput]:
        """Requests that the scheduler ended while planning (for example: the pool ran out)."""
        return [
            self._output(active, [], None, 0)
            for request_id in plan.finished_request_ids
            if (active := self._active.get(request_id)) is not None
        ]

    def _output(
        self, active: _Active, tokens: list[int], logprobs: FetchedLogprobs | None, row: int
    ) -> TokenOutput:
        request = active.request
        reported = None
        if logprobs is not None and active.params.logprobs is not None and tokens:
            reported = [_logprobs(logprobs, row, tokens[0], active.params.logprobs)]
        finish_reason = stop_reason = None
        if request.status >= RequestStatus.FINISHED_STOPPED:
            self._forget(request.request_id)
            finish_reason = request.status.finish_reason
            stop_reason = self._stop_reason(request)
            active.metrics = _metrics(active)
        return TokenOutput(
            request.request_id,
            tokens,
            reported,
            finish_reason,
            stop_reason,
            active.metrics,
            request.warning,
        )

    def _stop_reason(self, request: Request) -> int | str | None:
        """The stop id the user named; ending by end-of-sequence has no reason to report."""
        return None if request.stop_reason in self._eos_ids else request.stop_reason

    def _report_preemptions(self, plan: SchedulerOutput) -> None:
        for p in plan.preemptions:
            if (active := self._active.get(p.request.request_id)) is not None:
                active.metrics = _metrics(active)
            logger.info(
                "preempted request=%s cause=%s reason=%s blocks_freed=%d tokens_to_recompute=%d "
                "num_preemptions=%d",
                p.request.request_id,
                p.cause,
                p.reason,
                p.num_blocks_freed,
                p.num_tokens_to_recompute,
                p.request.num_preemptions,
            )

    # Reports ----------------------------------------------------------------------------------

    def check_integrity(self) -> None:
        """Raises AssertionError where the scheduler's books do not balance."""
        self.scheduler.check_integrity()

    def summary(self) -> str:
        """What was sized at start-up and why, a line each."""
        sizes = self.sizes
        watermark = self.config.watermark
        if watermark == "auto":
            kept = "auto (break-even admission)"
        else:
            blocks = self.scheduler.config.watermark_blocks
            kept = f"{watermark:g} ({blocks} blocks kept free at admission)"
        pool = sizes.num_blocks * sizes.page_bytes / GIB
        cache = self._cache_dir or "off"
        lines = [
            f"Model {self.model_name}: {self._dtype_name}"
            + (f", {self.config.quantization}" if self.config.quantization else ""),
            f"Device {self._device.device_kind} ({self._device.platform}), attention "
            f"{self._implementation}",
            *sizes.arithmetic,
            f"KV cache: {sizes.num_blocks - 1} usable blocks x {sizes.block_size} = "
            f"{(sizes.num_blocks - 1) * sizes.block_size} tokens in {pool:.2f} GiB",
            f"Watermark: {kept}",
            f"Limits: max_model_len {sizes.max_model_len}, max_num_seqs {sizes.max_num_seqs}, "
            f"max_num_batched_tokens {sizes.max_num_batched_tokens}",
            f"Compile cache: {cache}",
            f"Ready after {self.startup_seconds:.1f} s",
        ]
        return "\n".join(lines)


def _dtype(name: str, platform: str) -> str:
    """The dtype that "auto" stands for on a platform."""
    if name != "auto":
        return name
    return "float32" if platform == "cpu" else "bfloat16"


def _eos_ids(*sources: Sequence[int]) -> tuple[int, ...]:
    ids = tuple(sorted({i for source in sources for i in source}))
    if len(ids) > MAX_EOS_IDS:
        raise ValueError(f"the model names {len(ids)} end-of-sequence ids; at most {MAX_EOS_IDS}")
    return ids


def _logprobs(fetched: FetchedLogprobs, row: int, token: int, most: int) -> dict[int, Logprob]:
    """The `most` likeliest tokens of a row and the drawn one, the drawn one first."""
    found = {token: Logprob(float(fetched.chosen[row]), int(fetched.rank[row]), None)}
    for rank in range(most):
        other = int(fetched.top_ids[row, rank])
        if other >= 0 and other not in found:
            found[other] = Logprob(float(fetched.top_values[row, rank]), rank + 1, None)
    return found


def _metrics(active: _Active) -> RequestMetrics:
    request = active.request
    arrival = request.arrival_time or 0.0
    first = request.first_scheduled_time
    token = active.first_token_time
    return RequestMetrics(
        num_preemptions=request.num_preemptions,
        num_recomputed_tokens=request.num_recomputed_tokens,
        num_cached_tokens=request.num_cached_tokens,
        queue_s=first - arrival if first is not None else None,
        ttft_s=token - arrival if token is not None else None,
    )
