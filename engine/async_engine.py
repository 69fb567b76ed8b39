"""The engine behind an asyncio program: a thread runs the steps, streams carry the texts."""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import queue
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Protocol

from engine.metrics import EngineMetrics
from engine.output_processor import Core, OutputProcessor
from engine.outputs import RequestOutput, TokenOutput
from engine.sampling_params import SamplingParams

logger = logging.getLogger(__name__)


class EngineDeadError(RuntimeError):
    """The engine failed and serves nothing any more."""


class EngineDrainingError(RuntimeError):
    """The server is stopping: it takes no new requests and ended this one if it ran too long."""


class SteppingCore(Core, Protocol):
    """`engine.core.EngineCore` as seen from here."""

    def step(self) -> list[TokenOutput]: ...

    def has_unfinished(self) -> bool: ...


class RequestStream:
    """Deltas of one request, for one reader.

    Holds one delta at most: what a slow reader has not taken yet is merged, so that its memory is
    bounded by the request's own length and the engine never waits for it.
    """

    def __init__(self, engine: AsyncEngine, request_id: str, wake: asyncio.Event):
        """Args:
        engine: whose request this is.
        request_id: of the request.
        wake: set when something has arrived; streams of one reader may share it.
        """
        self.request_id = request_id
        self.wake = wake
        self.finished = False
        self._engine = engine
        self._pending: RequestOutput | None = None
        self._error: Exception | None = None

    def take(self) -> RequestOutput | None:
        """What has arrived since the last call, or None.

        Raises:
          EngineDeadError, EngineDrainingError: the request ended that way.
        """
        with self._engine._lock:
            output, self._pending = self._pending, None
            error = self._error
        if output is not None:
            self.finished = output.finished
            return output
        if error is not None and not self.finished:
            self.finished = True
            raise error
        return None

    def close(self) -> None:
        """Aborts the request unless it has finished. Call it in any case."""
        self._engine._close_stream(self)

    async def __aiter__(self) -> AsyncIterator[RequestOutput]:
        """Yields deltas until the request has finished."""
        while not self.finished:
            self.wake.clear()
            output = self.take()
            if output is None:
                await self.wake.wait()
            else:
                yield output

    # Called by the engine, under its lock.

    def _put(self, output: RequestOutput) -> None:
        if self._pending is None:
            self._pending = output
        else:
            self._pending.append(output)

    def _fail(self, error: Exception) -> None:
        self._error = error


class AsyncEngine:
    """Feeds one engine from an asyncio loop.

    The engine's thread alone touches the engine. Everything else reaches it as a command that the
    thread carries out between two steps.

    Attributes:
      errored: what ended the engine, None while it lives.
      draining: no new request is taken.
    """

    def __init__(
        self,
        core: SteppingCore,
        *,
        metrics: EngineMetrics | None = None,
        on_error: Callable[[BaseException], None] | None = None,
    ):
        """Args:
        core: the engine; nobody else may use it from now on.
        metrics: fed after each step.
        on_error: called in the loop when the engine has failed.
        """
        self._core = core
        self._processor = OutputProcessor(core, delta=True)
        self._metrics = metrics
        self._on_error = on_error
        self._lock = threading.Lock()
        # A command is called with None, or with the error that keeps it from being carried out.
        self._commands: queue.SimpleQueue[Callable[[Exception | None], None] | None] = (
            queue.SimpleQueue()
        )
        self._streams: dict[str, RequestStream] = {}
        self._to_wake: set[asyncio.Event] = set()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._closed = False
        self.errored: BaseException | None = None
        self.draining = False

    def start(self) -> None:
        """Starts the thread. Call it in the loop that will use the engine."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    @property
    def num_unfinished(self) -> int:
        """Requests whose streams are open."""
        return len(self._streams)

    # The loop's side --------------------------------------------------------------------------

    async def add_request(
        self,
        request_id: str,
        prompt: str | None,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        *,
        priority: int = 0,
        arrival_time: float | None = None,
        cache_salt: str | None = None,
        wake: asyncio.Event | None = None,
    ) -> RequestStream:
        """Queues a request and returns its stream, once the engine has accepted it.

        Args:
          request_id: unique.
          prompt, prompt_token_ids, params, priority, cache_salt: see `OutputProcessor`.
          arrival_time: on the clock of time.monotonic; None is now.
          wake: event to set on arrivals; None makes one.

        Raises:
          ValueError, scheduler.QueueFullError: the engine refused it.
          EngineDeadError, EngineDrainingError: no engine to take it.
        """
        if self.draining:
            raise EngineDrainingError("the server is shutting down")
        arrival = time.monotonic() if arrival_time is None else arrival_time
        stream = RequestStream(self, request_id, wake or asyncio.Event())
        accepted: concurrent.futures.Future[None] = concurrent.futures.Future()

        def add(refusal: Exception | None) -> None:
            if not accepted.set_running_or_notify_cancel():
                return
            try:
                if refusal is not None:
                    raise refusal
                self._processor.add_request(
                    request_id,
                    prompt,
                    prompt_token_ids,
                    params,
                    priority=priority,
                    arrival_time=arrival,
                    cache_salt=cache_salt,
                )
            except Exception as error:
                accepted.set_exception(error)
                return
            if self._metrics is not None:
                self._metrics.on_add(request_id, arrival, n=params.n, max_tokens=params.max_tokens)
            accepted.set_result(None)

        with self._lock:
            if self._closed:
                raise EngineDeadError(f"the engine has failed: {self.errored}")
            if request_id in self._streams:
                raise ValueError(f"request id {request_id!r} is in use")
            self._streams[request_id] = stream
            self._commands.put(add)
        try:
            await asyncio.wrap_future(accepted)
        except BaseException:
            self._close_stream(stream)
            raise
        return stream

    def _close_stream(self, stream: RequestStream) -> None:
        with self._lock:
            if self._streams.pop(stream.request_id, None) is None:
                return
            if stream.finished or self._closed:
                return
            self._commands.put(lambda refusal: self._abort(stream.request_id))

    def abort_all(self, error: Exception) -> None:
        """Ends every open request; their streams raise `error`."""
        with self._lock:
            if not self._closed:
                self._commands.put(lambda refusal: self._fail_all(error))

    async def drain(self, timeout_s: float) -> bool:
        """Takes no new requests, lets the others finish, and ends what is left in time.

        Returns:
          True where everything finished by itself.
        """
        self.draining = True
        deadline = time.monotonic() + timeout_s
        while self._streams and not self._closed:
            if time.monotonic() >= deadline:
                self.abort_all(
                    EngineDrainingError(
                        f"the server is shutting down; the request did not finish in {timeout_s:g} s"
                    )
                )
                return False
            await asyncio.sleep(0.02)
        return not self._closed

    async def close(self, timeout_s: float = 10.0) -> None:
        """Stops the thread after the step it is in."""
        with self._lock:
            if not self._closed:
                self._commands.put(None)
        if self._thread.is_alive():
            await asyncio.to_thread(self._thread.join, timeout_s)

    # The engine's thread ----------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while self._carry_out_commands():
                if not self._core.has_unfinished():
                    continue
                outputs = self._processor.process(self._core.step())
                if self._metrics is not None:
                    self._metrics.on_step(outputs)
                if outputs:
                    self._deliver(outputs)
            self._end(EngineDrainingError("the engine was stopped"))
        except BaseException as error:
            logger.exception("The engine failed")
            self.errored = error
            self._end(EngineDeadError(f"the engine failed: {type(error).__name__}: {error}"))
            if self._on_error is not None:
                self._call_in_loop(self._on_error, error)

    def _carry_out_commands(self) -> bool:
        """Waits for a command if there is nothing else to do. False is the order to stop."""
        wait = not self._core.has_unfinished()
        while True:
            try:
                command = self._commands.get(block=wait)
            except queue.Empty:
                return True
            if command is None:
                return False
            command(None)
            wait = False

    def _abort(self, request_id: str) -> None:
        if self._closed:
            return
        if self._processor.abort(request_id) and self._metrics is not None:
            self._metrics.on_abort(request_id)

    def _fail_all(self, error: Exception) -> None:
        if self._closed:
            return
        for request_id in self._processor.abort_all():
            if self._metrics is not None:
                self._metrics.on_abort(request_id)
        with self._lock:
            self._fail_streams(error)
        self._call_in_loop(self._wake)

    def _end(self, error: Exception) -> None:
        """Nothing will be carried out any more: every stream and every waiting command fails."""
        with self._lock:
            self._closed = True
            self._fail_streams(error)
        self._call_in_loop(self._wake)
        while not self._commands.empty():
            command = self._commands.get()
            if command is not None:
                command(error)

    def _fail_streams(self, error: Exception) -> None:
        for stream in self._streams.values():
            stream._fail(error)
            self._to_wake.add(stream.wake)

    def _deliver(self, outputs: Sequence[RequestOutput]) -> None:
        with self._lock:
            # A wake-up is under way whenever the set is not empty.
            idle = not self._to_wake
            for output in outputs:
                stream = self._streams.get(output.request_id)
                if stream is not None:
                    stream._put(output)
                    self._to_wake.add(stream.wake)
        if idle:
            self._call_in_loop(self._wake)

    def _call_in_loop(self, function: Callable[..., None], *args: object) -> None:
        assert self._loop is not None
        try:
            self._loop.call_soon_threadsafe(function, *args)
        except RuntimeError:  # the loop has been closed: nobody reads any more
            logger.debug("The event loop is closed")

    def _wake(self) -> None:
        with self._lock:
            events, self._to_wake = self._to_wake, set()
        for event in events:
            event.set()


async def merge(streams: Sequence[RequestStream]) -> AsyncIterator[tuple[int, RequestOutput]]:
    """Yields (which stream, delta) of streams that share one event, as deltas arrive."""
    open_streams = dict(enumerate(streams))
    wake = streams[0].wake
    while open_streams:
        wake.clear()
        moved = False
        for index, stream in list(open_streams.items()):
            output = stream.take()
            if output is not None:
                moved = True
                yield index, output
            if stream.finished:
                del open_streams[index]
        if not moved and open_streams:
            await wake.wait()
