"""Runs one engine behind HTTP until it is told to stop or fails."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import pathlib
import signal
import socket
import sys
from collections.abc import Iterator
from typing import Any

from engine.config import EngineConfig
from engine.server.config import ServerConfig

logger = logging.getLogger(__name__)

# Seconds for which a failed server still answers /health with 503 before it exits.
_FAILED_GRACE_S = 1.0
# Seconds that connections get to take their last bytes.
_LAST_BYTES_S = 5
FAILED = 1


def serve(config: EngineConfig, server_config: ServerConfig) -> int:
    """Loads the engine and serves it.

    Args:
      config, server_config: checked here, before anything slow is imported.

    Returns:
      The exit code: 0 after SIGTERM or SIGINT, 1 after a failure of the engine.

    Raises:
      ValueError: a setting is wrong; one sentence.
    """
    config = config.validate()
    server_config = server_config.validate()
    check_model_path(config.model)
    logging.basicConfig(
        level=server_config.log_level.upper(),
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
    )
    with open_socket(server_config.host, server_config.port) as listener:
        # Here, because this imports jax.
        from engine.core import EngineCore

        core = EngineCore(config, progress=sys.stderr.isatty())
        print(core.summary(), file=sys.stderr, flush=True)
        return run(core, config, server_config, listener)


def check_model_path(model: str | None) -> None:
    """Refuses what can only be a path and does not exist, without importing a loader."""
    if model is None:
        return
    path = pathlib.Path(model).expanduser()
    is_path = model.startswith(("/", ".", "~")) or model.endswith(".gguf") or model.count("/") > 1
    if is_path and not path.exists():
        raise ValueError(f"the model {model} does not exist; change --model")


@contextlib.contextmanager
def open_socket(host: str, port: int) -> Iterator[socket.socket]:
    """Takes the port before the model is loaded. Raises ValueError where it is in use."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except OSError as error:
        raise ValueError(f"host={host!r} is not known ({error}); change --host") from error
    listener = socket.socket(family, kind, protocol)
    with listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(address)
            # A bound port that does not listen could be bound again by a second server.
            listener.listen(1)
        except OSError as error:
            raise ValueError(
                f"port {port} on {host} cannot be used ({error.strerror}); change --port"
            ) from error
        yield listener


def run(
    core: Any, config: EngineConfig, server_config: ServerConfig, listener: socket.socket
) -> int:
    """Serves a loaded engine on a bound socket; see `serve`."""
    return asyncio.run(_Server(core, config, server_config, listener).run())


class _Server:
    def __init__(
        self,
        core: Any,
        config: EngineConfig,
        server_config: ServerConfig,
        listener: socket.socket,
    ):
        self._core = core
        self._config = config
        self._settings = server_config
        self._listener = listener
        self._stopping: asyncio.Task[None] | None = None
        self._exit_code = 0

    async def run(self) -> int:
        """Serves until stopped."""
        import uvicorn

        from engine.async_engine import AsyncEngine
        from engine.metrics import EngineMetrics
        from engine.server.app import build_app
        from engine.server.prepare import Preparer
        from engine.server.request_log import RequestLog
        from engine.server.serving import Serving

        settings, core = self._settings, self._core
        names = settings.served_model_name or (default_model_name(self._config, core),)
        shown = {
            **dataclasses.asdict(core.scheduler.config),
            "dtype": self._config.dtype,
            "kv_cache_dtype": self._config.kv_cache_dtype,
        }
        metrics = EngineMetrics(core.scheduler, model_name=names[0], config=shown)
        self._engine = AsyncEngine(core, metrics=metrics, on_error=self._on_engine_error)
        log = RequestLog(settings.request_log) if settings.request_log else None
        template = settings.chat_template
        preparer = Preparer(
            core.tokenizer,
            model_names=names,
            max_model_len=core.scheduler.config.max_model_len,
            priorities=self._config.scheduling_policy == "priority",
            chat_template=pathlib.Path(template).read_text(encoding="utf-8") if template else None,
        )
        app = build_app(
            Serving(self._engine, preparer, request_log=log),
            metrics,
            api_keys=settings.api_key,
            max_body_bytes=int(settings.max_body_mib * 2**20),
        )
        self._uvicorn = _uvicorn_server(
            uvicorn.Config(
                app,
                lifespan="off",
                ws="none",
                log_config=None,
                access_log=False,
                timeout_graceful_shutdown=_LAST_BYTES_S,
            )
        )
        self._engine.start()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal, number)
        host, port = self._listener.getsockname()[:2]
        shown_host = f"[{host}]" if ":" in host else host
        print(f"Serving {names[0]} on http://{shown_host}:{port}", file=sys.stderr, flush=True)
        try:
            await self._uvicorn.serve(sockets=[self._listener])
            if self._stopping is not None:
                await self._stopping
        finally:
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.remove_signal_handler(number)
            await self._engine.close()
            if log is not None:
                log.close()
        if self._engine.errored is None:
            self._check_books()
        return self._exit_code

    def _check_books(self) -> None:
        """A leaked block would be a fault of ours: say so, and exit with it."""
        try:
            self._core.check_integrity()
        except AssertionError as error:
            logger.error("The scheduler's books do not balance: %s", error)
            self._exit_code = FAILED
            return
        pool = self._core.scheduler.pool
        logger.info("KV pool: %d of %d blocks free", pool.num_free, pool.num_usable)

    def _on_signal(self, number: int) -> None:
        if self._stopping is not None:  # the second time is meant
            self._uvicorn.force_exit = True
            self._engine.abort_all(_stop_error())
            self._uvicorn.should_exit = True
            return
        timeout = self._settings.shutdown_timeout_s
        logger.info(
            "%s: %d requests get %g s to finish",
            signal.Signals(number).name,
            self._engine.num_unfinished,
            timeout,
        )
        self._stopping = asyncio.ensure_future(self._drain(timeout))

    async def _drain(self, timeout_s: float) -> None:
        complete = await self._engine.drain(timeout_s)
        logger.info("All requests finished" if complete else "Some requests were cut off")
        self._uvicorn.should_exit = True

    def _on_engine_error(self, error: BaseException) -> None:
        self._exit_code = FAILED
        print(f"The engine failed: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
        self._failing = asyncio.ensure_future(self._exit_soon())

    async def _exit_soon(self) -> None:
        await asyncio.sleep(_FAILED_GRACE_S)
        self._uvicorn.should_exit = True


def _stop_error() -> Exception:
    from engine.async_engine import EngineDrainingError

    return EngineDrainingError("the server was stopped")


def default_model_name(config: EngineConfig, core: Any) -> str:
    """The name that clients see: as given, or that of the default model's file."""
    if config.model is not None:
        return config.model
    return pathlib.Path(core.model_name).stem


def _uvicorn_server(config: Any) -> Any:
    import uvicorn

    class Server(uvicorn.Server):
        """uvicorn without signal handlers: stopping is our business."""

        @contextlib.contextmanager
        def capture_signals(self) -> Iterator[None]:
            yield

    return Server(config)
