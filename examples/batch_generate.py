"""Answers a file of requests: OpenAI's batch format in, a line of JSON per request out.

    python examples/batch_generate.py --input=requests.jsonl --output=results.jsonl

Each line of the input is {"custom_id": ..., "method": "POST", "url": "/v1/chat/completions" or
"/v1/completions", "body": {...}}. Results are written as they finish, so their order may differ.
Started again with the same files, it leaves out what the output already holds. The engine's
settings are flags too, as in run_server.py.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import sys
import uuid
from collections.abc import Iterator, Sequence
from typing import Any, BinaryIO

from absl import flags
from tqdm import tqdm

from engine.config import EngineConfig
from engine.output_processor import OutputProcessor
from engine.outputs import RequestOutput
from engine.server.errors import ApiError, as_api_error
from engine.server.prepare import Prepared, Preparer
from engine.server.protocol import ChatRequest, CompletionRequest, check_body
from engine.server.responses import Usage
from engine.server.serve import check_model_path, default_model_name
from run_server import define_flags, fill, parse

_KINDS = {"/v1/chat/completions": ChatRequest, "/v1/completions": CompletionRequest}


class BadLine(ValueError):
    """A line of the input that is no request; the message is one sentence."""

    def __init__(self, code: str, message: str, custom_id: str | None = None):
        super().__init__(message)
        self.code = code
        self.custom_id = custom_id


@dataclasses.dataclass(frozen=True)
class BatchConfig:
    """Settings of a batch.

    Attributes:
      input: file of requests, one JSON object per line.
      output: file that results are appended to.
      served_model_name: names that requests may ask for; empty is the model's own name.
    """

    input: str = ""
    output: str = ""
    served_model_name: tuple[str, ...] = ()

    def validate(self) -> BatchConfig:
        """Returns self. Raises ValueError."""
        for name in ("input", "output"):
            if not getattr(self, name):
                raise ValueError(f"give the file of {name} lines by --{name}")
        if not pathlib.Path(self.input).is_file():
            raise ValueError(f"the input {self.input} does not exist; change --input")
        output = pathlib.Path(self.output)
        if output.exists() and output.samefile(self.input):
            raise ValueError("--input and --output name the same file")
        return self


@dataclasses.dataclass(frozen=True)
class Line:
    """A well-formed line of the input.

    Attributes:
      number: counted from 1.
      custom_id, url, body: as written.
    """

    number: int
    custom_id: str
    url: str
    body: dict[str, Any]


def read_line(raw: bytes, number: int) -> Line:
    """Reads one line of the input. Raises BadLine."""
    try:
        value = json.loads(raw.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise BadLine("invalid_json", f"line {number} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise BadLine("invalid_line", f"line {number} is not a JSON object")
    name = value.get("custom_id")
    if not isinstance(name, str) or not name:
        raise BadLine("invalid_line", f"line {number} has no custom_id (a string, not empty)")
    if value.get("method") != "POST":
        raise BadLine("invalid_method", f"line {number}: method must be POST", name)
    if value.get("url") not in _KINDS:
        known = ", ".join(_KINDS)
        raise BadLine("invalid_url", f"line {number}: url must be one of {known}", name)
    if not isinstance(value.get("body"), dict):
        raise BadLine("invalid_line", f"line {number}: body must be a JSON object", name)
    return Line(number, name, value["url"], value["body"])


def read_lines(path: str) -> Iterator[Line | tuple[int, BadLine]]:
    """Every line that is not blank; bad ones with their number."""
    seen: dict[str, int] = {}
    with open(path, "rb") as file:
        for number, raw in enumerate(file, 1):
            if not raw.strip():
                continue
            try:
                line = read_line(raw, number)
                first = seen.setdefault(line.custom_id, number)
                if first != number:
                    raise BadLine(
                        "duplicate_custom_id",
                        f"line {number}: custom_id {line.custom_id!r} was used in line {first}",
                        line.custom_id,
                    )
            except BadLine as error:
                yield number, error
            else:
                yield line


class Results:
    """The output file. A line is there whole, or the next start takes its beginning away."""

    def __init__(self, path: str):
        """Opens the file, cutting off an unfinished last line. Raises ValueError, OSError.

        Args:
          path: created if it does not exist.
        """
        self.done: dict[int, str | None] = {}
        self._file: BinaryIO = open(path, "a+b")  # noqa: SIM115
        self._file.seek(0)
        end = 0
        for number, raw in enumerate(self._file, 1):
            if not raw.endswith(b"\n"):
                break
            try:
                result = json.loads(raw)
                self.done[int(result["line"])] = result["custom_id"]
            except (ValueError, KeyError, TypeError) as error:
                raise ValueError(
                    f"line {number} of {path} is not a result of this program; move the file "
                    "away or change --output"
                ) from error
            end += len(raw)
        self._file.truncate(end)

    def write(
        self,
        number: int,
        custom_id: str | None,
        *,
        status: int = 200,
        body: dict[str, Any] | None = None,
        error: BadLine | None = None,
    ) -> None:
        """Adds the result of a line of the input. Raises OSError."""
        response = None
        if body is not None:
            response = {"status_code": status, "request_id": _new_id("req"), "body": body}
        failure = None if error is None else {"code": error.code, "message": str(error)}
        result = {
            "id": _new_id("batch_req"),
            "line": number,
            "custom_id": custom_id,
            "response": response,
            "error": failure,
        }
        self._file.write(json.dumps(result, ensure_ascii=False).encode() + b"\n")
        self._file.flush()
        self.done[number] = custom_id

    def close(self) -> None:
        """Makes sure that everything is on the disk. Raises OSError."""
        os.fsync(self._file.fileno())
        self._file.close()


def _new_id(kind: str) -> str:
    return f"{kind}_{uuid.uuid4().hex}"


class _Request:
    """One line in the engine: a request per prompt."""

    def __init__(self, line: Line, prepared: Prepared, prompts: Sequence[list[int]]):
        self.line = line
        self.prepared = prepared
        self.prompts = prompts
        self.outputs: dict[int, RequestOutput] = {}

    def answer(self) -> dict[str, Any]:
        usage = Usage([len(ids) for ids in self.prompts])
        outputs = [output for _, output in sorted(self.outputs.items())]
        for i, output in enumerate(outputs):
            usage.add(i, sum(len(o.token_ids) for o in output.outputs), output.metrics)
        return self.prepared.shape.whole(outputs, self.prepared.params.n, usage)


class Batch:
    """Runs lines through one engine, as many at a time as keep it busy."""

    def __init__(self, core: Any, preparer: Preparer, results: Results, window: int):
        """Args:
        core: an `engine.core.EngineCore`.
        preparer: checks requests.
        results: where answers go.
        window: most requests in the engine at once.
        """
        self._core = core
        self._preparer = preparer
        self._results = results
        self._window = window
        self._processor = OutputProcessor(core)
        self._owners: dict[str, tuple[_Request, int]] = {}
        self.num_failed = 0

    def run(self, lines: Iterator[Line], progress: Any) -> None:
        """Answers every line. Raises OSError where results cannot be written."""
        more = True
        while more or len(self._processor):
            while more and len(self._processor) < self._window:
                line = next(lines, None)
                more = line is not None
                if line is not None and not self._start(line):
                    progress.update()
            if self._core.has_unfinished():
                for output in self._processor.process(self._core.step()):
                    if self._take(output):
                        progress.update()

    def _start(self, line: Line) -> bool:
        """Puts a line into the engine; False where it is answered by a refusal already."""
        added: list[str] = []
        try:
            request = check_body(_KINDS[line.url], line.body)
            if request.stream:
                raise ApiError(400, "stream is not supported in a file", param="stream")
            prepared = self._preparer.prepare(request)
            prompts = [
                self._preparer.tokenize(p, prepared.add_special_tokens) for p in prepared.prompts
            ]
            owner = _Request(line, prepared, prompts)
            for i, ids in enumerate(prompts):
                name = f"{line.number}-{i}"
                self._processor.add_request(
                    name,
                    None,
                    ids,
                    prepared.params,
                    priority=prepared.priority,
                    cache_salt=prepared.cache_salt,
                )
                added.append(name)
                self._owners[name] = owner, i
        except (ApiError, ValueError) as error:
            for name in added:
                self._processor.abort(name)
                del self._owners[name]
            problem = as_api_error(error)
            self._fail(line, problem.status, problem.body)
            return False
        return True

    def _take(self, output: RequestOutput) -> bool:
        """Takes a finished prompt in; True where its line is complete."""
        request, index = self._owners.pop(output.request_id)
        request.outputs[index] = output
        if len(request.outputs) < len(request.prompts):
            return False
        self._results.write(request.line.number, request.line.custom_id, body=request.answer())
        return True

    def _fail(self, line: Line, status: int, body: dict[str, Any]) -> None:
        self.num_failed += 1
        tqdm.write(f"line {line.number}: {body['error']['message']}", file=sys.stderr)
        self._results.write(line.number, line.custom_id, status=status, body=body)


def run(batch: BatchConfig, config: EngineConfig, make_core: Any = None) -> int:
    """Answers what the output lacks; returns the exit code.

    Args:
      batch, config: settings.
      make_core: EngineConfig -> engine; None is the real one.

    Raises:
      ValueError: a setting is wrong; one sentence.
      OSError: a file cannot be read or written.
    """
    # How many wait in the engine is our own decision.
    config = dataclasses.replace(config, max_num_queued_reqs=None).validate()
    batch = batch.validate()
    check_model_path(config.model)
    results = Results(batch.output)
    todo, num_bad = 0, 0
    for item in read_lines(batch.input):
        number = item.number if isinstance(item, Line) else item[0]
        name = item.custom_id if isinstance(item, Line) else item[1].custom_id
        if results.done.get(number, name) != name:
            raise ValueError(
                f"{batch.output} has a result of {results.done[number]!r} for line {number}, which "
                f"is {name!r} in {batch.input}; change --output"
            )
        if isinstance(item, Line):
            todo += item.number not in results.done
            continue
        error = item[1]
        num_bad += 1
        print(error, file=sys.stderr)
        if number not in results.done:
            results.write(number, error.custom_id, error=error)
    if results.done:
        print(f"{len(results.done)} lines have their results already", file=sys.stderr)
    num_failed = 0
    if todo:
        num_failed = _answer(batch, config, results, todo, make_core or _real_core)
    results.close()
    print(f"{batch.output}: {len(results.done)} results", file=sys.stderr)
    return 2 if num_bad or num_failed else 0


def _real_core(config: EngineConfig) -> Any:
    # Here, because this imports jax.
    from engine.core import EngineCore

    return EngineCore(config)


def _answer(
    batch: BatchConfig, config: EngineConfig, results: Results, todo: int, make_core: Any
) -> int:
    core = make_core(config)
    limits = core.scheduler.config
    preparer = Preparer(
        core.tokenizer,
        model_names=batch.served_model_name or (default_model_name(config, core),),
        max_model_len=limits.max_model_len,
        priorities=config.scheduling_policy == "priority",
    )
    # Enough to keep every slot filled; the rest waits in the file, not in memory. n sequences or
    # several prompts of a line may exceed it.
    runner = Batch(core, preparer, results, window=2 * limits.max_num_seqs)
    lines = (
        item
        for item in read_lines(batch.input)
        if isinstance(item, Line) and item.number not in results.done
    )
    with tqdm(total=todo, desc="Answering", unit="line") as progress:
        runner.run(lines, progress)
    return runner.num_failed


def main(argv: Sequence[str], make_core: Any = None) -> int:
    """Runs a batch with these arguments; returns the exit code.

    0: every line has a good answer; 1: a setting or a file is at fault; 2: some lines were refused
    (the output says which); 130: interrupted, to be started again.
    """
    values = define_flags(BatchConfig, EngineConfig)
    try:
        parse(argv, values)
        if values["help"].value:
            print((__doc__ or "").strip(), values.get_help(), sep="\n\n")
            return 0
        return run(fill(BatchConfig, values), fill(EngineConfig, values), make_core)
    except OSError as error:
        where = f" {error.filename}" if error.filename else ""
        print(
            f"batch_generate.py: {error.strerror}{where}; finished results are kept, start again "
            "with the same files to go on",
            file=sys.stderr,
        )
        return 1
    except (flags.Error, ValueError) as error:
        print(f"batch_generate.py: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(
            "batch_generate.py: interrupted; start again with the same files to go on",
            file=sys.stderr,
        )
        return 130


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
