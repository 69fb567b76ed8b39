"""A line of JSON per finished request: arrivals and lengths, to replay the load elsewhere."""

from __future__ import annotations

import json
import logging
import pathlib
import time
from typing import TextIO

logger = logging.getLogger(__name__)


class RequestLog:
    """Appends to a file. A disk that fills up costs the log, not the service."""

    def __init__(self, path: str | pathlib.Path):
        """Opens the file. Raises ValueError where that is impossible."""
        self._path = path
        self._start = time.monotonic()
        try:
            self._file: TextIO | None = open(path, "a", encoding="utf-8")  # noqa: SIM115
        except OSError as error:
            raise ValueError(
                f"the request log {path} cannot be written ({error.strerror}); change --request_log"
            ) from error

    def write(
        self,
        *,
        arrival: float,
        prompt_len: int,
        output_len: int,
        max_tokens: int | None,
        finish_reason: str,
    ) -> None:
        """Adds a line.

        Args:
          arrival: on the clock of time.monotonic; written as seconds since the server started.
          prompt_len, output_len, max_tokens: in tokens.
          finish_reason: "stop", "length", "abort" or "error".
        """
        if self._file is None:
            return
        line = {
            "arrival": round(arrival - self._start, 6),
            "prompt_len": prompt_len,
            "output_len": output_len,
            "max_tokens": max_tokens,
            "finish_reason": finish_reason,
        }
        try:
            self._file.write(json.dumps(line) + "\n")
            self._file.flush()
        except OSError as error:
            logger.warning("The request log %s ends here: %s", self._path, error.strerror)
            self._file = None

    def close(self) -> None:
        """Closes the file."""
        if self._file is not None:
            self._file.close()
            self._file = None
