"""Batch files: one JSON line becomes one request, or one sentence about what is wrong with it.

Reads OpenAI's batch format line by line, so that a file of any size costs its longest allowed line and 16
bytes of digest per custom_id. A bad line never stops the file: it comes out as a BatchLineError in its
place. Owns the envelope (custom_id, method, url, body); the body is body.py's. Knows nothing about
queues or where results go.
"""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO, NoReturn, cast

from pipeline.batch.body import ENDPOINTS, Endpoint, parse_body
from pipeline.errors import InvalidRequest
from pipeline.messages import ChatMessage
from pipeline.params import SamplingParams, is_unicode, shown, unknown_name

MAX_LINE_BYTES = 1 << 20  # far above any prompt that fits a model here, far below what would hurt
MAX_CUSTOM_ID_CHARS = 512

_ENVELOPE = frozenset({"custom_id", "method", "url", "body"})
_SHOWN_FIELD_CHARS = 100
_BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True, slots=True)
class BatchLine:
    """One request of a batch; exactly one of prompt and messages is set, params.seed may be None."""

    line_number: int
    """From 1, blank lines counted."""
    custom_id: str
    endpoint: Endpoint
    model: str
    prompt: str | None
    messages: tuple[ChatMessage, ...] | None
    params: SamplingParams
    speculate: bool
    timeout_s: float | None = None
    """The time from its feeding until it is given up; None is no limit."""


@dataclass(frozen=True, slots=True)
class BatchLineError:
    """A line that cannot become a request; a value and not an exception, because the file goes on."""

    line_number: int
    custom_id: str | None
    code: str
    """invalid_json, line_too_long, invalid_line, duplicate_custom_id, wrong_model or invalid_request."""
    message: str
    """Begins with the field, where there is one."""
    field: str | None

    def __str__(self) -> str:
        """As a person wants to read it: where, then what."""
        named = "" if self.custom_id is None else f" ({shown(self.custom_id)})"
        return f"line {self.line_number}{named}: {self.message}"


class InvalidJson(InvalidRequest):
    """The line is not a JSON object in UTF-8."""

    code = "invalid_json"


class LineTooLong(InvalidRequest):
    """The line has more bytes than a line may have."""

    code = "line_too_long"


class InvalidLine(InvalidRequest):
    """The envelope around the body is wrong."""

    code = "invalid_line"


class DuplicateCustomId(InvalidRequest):
    """The custom_id stands on an earlier line, so results could not be told apart."""

    code = "duplicate_custom_id"


def read_batch(file: BinaryIO, model: str) -> Iterator[BatchLine | BatchLineError]:
    """Yield one request or error for each line that is not blank, in order.

    Args:
        file: opened in binary mode; read once, forward.
        model: the name that this stack serves; a line for another one is an error.
    """
    first_lines: dict[bytes, int] = {}
    for line_number, raw in _raw_lines(file):
        if raw is not None and not raw.strip():
            continue
        line = parse_line(line_number, raw, model)
        if line.custom_id is not None:
            digest = hashlib.blake2b(line.custom_id.encode(), digest_size=16).digest()
            first = first_lines.setdefault(digest, line_number)
            if first != line_number:
                line = parse_line(line_number, raw, model, first)
        yield line


def _raw_lines(file: BinaryIO) -> Iterator[tuple[int, bytes | None]]:
    """Yield numbered lines; None stands for one that is too long, which is skipped piece by piece."""
    line_number = 0
    while raw := file.readline(MAX_LINE_BYTES + 1):
        line_number += 1
        if len(raw) > MAX_LINE_BYTES:
            yield line_number, None
        else:
            yield line_number, without_bom(line_number, raw)
        while len(raw) > MAX_LINE_BYTES and not raw.endswith(b"\n"):
            raw = file.readline(MAX_LINE_BYTES + 1)


def parse_line(
    line_number: int, raw: bytes | None, model: str, first_line: int | None = None
) -> BatchLine | BatchLineError:
    """Return one request, or what is wrong with it.

    Args:
        line_number: from 1.
        raw: the line's bytes; None stands for one that is too long.
        model: the name that this stack serves.
        first_line: number of an earlier line with the same custom_id, if there is one.
    """
    custom_id: str | None = None
    try:
        line = _json_object(raw)
        custom_id = _custom_id(line)
        if first_line is not None:
            raise DuplicateCustomId("custom_id", f"{shown(custom_id)} is already on line {first_line}")
        endpoint = _endpoint(line)
        body = parse_body(endpoint, _body(line), model)
    except InvalidRequest as error:
        return _line_error(line_number, custom_id, error)
    return BatchLine(
        line_number=line_number,
        custom_id=custom_id,
        endpoint=endpoint,
        model=model,
        prompt=body.prompt,
        messages=body.messages,
        params=body.params,
        speculate=body.speculate,
        timeout_s=body.timeout_s,
    )


def custom_id_of(raw: bytes) -> str | None:
    """Return a line's custom_id; None where it has none, which is an error of that line's own."""
    try:
        return _custom_id(_json_object(raw))
    except InvalidRequest:
        return None


def without_bom(line_number: int, raw: bytes) -> bytes:
    """Return a line's bytes without the mark that some editors begin a file with."""
    return raw.removeprefix(_BOM) if line_number == 1 else raw


def _line_error(line_number: int, custom_id: str | None, error: InvalidRequest) -> BatchLineError:
    field = _printable(error.field)[:_SHOWN_FIELD_CHARS] or None
    message = _printable(error.message)
    return BatchLineError(
        line_number=line_number,
        custom_id=custom_id,
        code=error.code,
        message=f"{field}: {message}" if field else message,
        field=field,
    )


def _printable(text: str) -> str:
    """Escape what cannot be written as UTF-8; a field's name is its author's and may be anything."""
    return text.encode("utf-8", "backslashreplace").decode()


def _json_object(raw: bytes | None) -> dict[str, object]:
    if raw is None:
        raise LineTooLong("", f"has more than {MAX_LINE_BYTES} bytes")
    try:
        value: object = json.loads(raw.decode("utf-8"), parse_constant=_refuse_constant)
    except UnicodeDecodeError as error:
        raise InvalidJson("", f"is not UTF-8 at byte {error.start + 1}") from None
    except json.JSONDecodeError as error:
        raise InvalidJson("", f"is not JSON: {error.msg} at column {error.colno}") from None
    except RecursionError:
        raise InvalidJson("", "is not usable JSON: nested too deeply") from None
    except ValueError as error:  # a number of thousands of digits, or NaN
        raise InvalidJson("", f"is not usable JSON: {error}") from None
    if not isinstance(value, dict):
        raise InvalidJson("", f"must be a JSON object, got {shown(value)}")
    return cast("dict[str, object]", value)


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _custom_id(line: dict[str, object]) -> str:
    value = line.get("custom_id")
    if value is None:
        raise InvalidLine("custom_id", "is missing")
    if not isinstance(value, str) or not 1 <= len(value) <= MAX_CUSTOM_ID_CHARS or not is_unicode(value):
        raise InvalidLine("custom_id", f"must be a string of 1 to {MAX_CUSTOM_ID_CHARS} characters, got {shown(value)}")
    return value


def _endpoint(line: dict[str, object]) -> Endpoint:
    for name in line:
        if name not in _ENVELOPE:
            raise InvalidLine(name, unknown_name(name, _ENVELOPE))
    for name in ("method", "url", "body"):
        if line.get(name) is None:
            raise InvalidLine(name, "is missing")
    if (method := line.get("method")) != "POST":
        raise InvalidLine("method", f"must be POST, got {shown(method)}")
    for endpoint in ENDPOINTS:
        if line.get("url") == endpoint:
            return endpoint
    raise InvalidLine("url", f"must be {' or '.join(ENDPOINTS)}, got {shown(line.get('url'))}")


def _body(line: dict[str, object]) -> dict[str, object]:
    body = line.get("body")
    if not isinstance(body, dict):
        raise InvalidLine("body", f"must be an object, got {shown(body)}")
    return cast("dict[str, object]", body)
