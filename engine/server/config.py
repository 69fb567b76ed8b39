"""Settings of the HTTP server."""

from __future__ import annotations

import dataclasses
import math
import pathlib


@dataclasses.dataclass(frozen=True)
class ServerConfig:
    """How the engine is offered to clients.

    Attributes:
      host, port: where to listen; port 0 takes a free one.
      api_key: keys of which a client must send one as bearer token for /v1; empty lets all in.
      served_model_name: names under which requests may ask for the model; empty is its own name.
      shutdown_timeout_s: seconds that running requests get after SIGTERM.
      max_body_mib: largest request body in MiB.
      chat_template: file with a Jinja chat template to use instead of the model's.
      request_log: file to which a JSON line per finished request is appended; None is off.
      log_level: of Python's logging.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    api_key: tuple[str, ...] = ()
    served_model_name: tuple[str, ...] = ()
    shutdown_timeout_s: float = 30.0
    max_body_mib: float = 32.0
    chat_template: str | None = None
    request_log: str | None = None
    log_level: str = "info"

    def validate(self) -> ServerConfig:
        """Returns self. Raises ValueError with one sentence."""
        if not 0 <= self.port <= 65535:
            raise ValueError(f"port={self.port} is not between 0 and 65535; change --port")
        for name in ("shutdown_timeout_s", "max_body_mib"):
            value = getattr(self, name)
            if not math.isfinite(value) or value < 0:
                raise ValueError(f"{name}={value} is not a number of at least 0; change --{name}")
        if self.log_level not in ("debug", "info", "warning", "error"):
            raise ValueError(
                f"log_level={self.log_level!r} is not one of: debug, info, warning, error"
            )
        if self.chat_template is not None and not pathlib.Path(self.chat_template).is_file():
            raise ValueError(
                f"the chat template {self.chat_template} does not exist; change --chat_template"
            )
        if not all(self.api_key) or not all(self.served_model_name):
            raise ValueError("--api_key and --served_model_name must not be empty strings")
        return self
