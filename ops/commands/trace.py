"""`sluice trace`: what happened to requests, when and in which process, for a page that draws it."""

import json
import os
import sys
from pathlib import Path
from typing import Annotated, ClassVar

import typer

from ops.commands.common import execute
from ops.finding import find_stack
from ops.sampled import read_samples
from ops.tracing.trace import TracedRequest, trace_of
from pipeline.connect import open_transport
from pipeline.errors import InvalidRequest, SluiceError, UnknownRequest, WireError
from pipeline.keys import MAX_FINISHED
from pipeline.messages import Terminal
from pipeline.samples import Sample
from pipeline.settings import Settings, load_settings
from pipeline.transport import AFTER_ALL, Transport
from pipeline.wire import unpack

EXAMPLES = """\b
Examples:
  sluice trace --last 100 -o trace.json        open it in https://ui.perfetto.dev
  sluice trace req_x2k5... -o trace.json
  sluice trace --last 16 -o - | gzip > trace.json.gz
"""

AROUND_US = 1_000_000  # samples of an idle stack come once a second, and one should stand before the first request


class NotFinished(SluiceError):  # noqa: N818 - reads as the fact it states
    """A request whose trace is not complete yet."""

    retryable: ClassVar[bool] = True
    code: ClassVar[str] = "not_finished"


def trace(
    request_id: Annotated[str | None, typer.Argument(metavar="[ID]", help="A request that has ended.")] = None,
    *,
    last: Annotated[
        int | None,
        typer.Option(min=1, max=MAX_FINISHED, metavar="N", help="Instead of one request, the last N that ended."),
    ] = None,
    target: Annotated[Path, typer.Option("-o", "--output", help="Where the trace goes; - is standard output.")],
) -> None:
    """Write what happened to requests as a trace for Perfetto (or chrome://tracing).

    Shows stages and their processes, how long each request waited for and was in each of them, and how long queues
    were and how full the KV pool was. It holds no text of prompts or outputs.
    """
    execute(_trace(request_id, last, target))


async def _trace(request_id: str | None, last: int | None, target: Path) -> int:
    if (request_id is None) == (last is None):
        raise InvalidRequest("trace", "give either the id of a request, or --last N")
    found = await find_stack(load_settings())
    transport = await open_transport(found.settings)
    try:
        requests = [await _one(transport, request_id)] if request_id is not None else await _last(transport, last or 1)
    finally:
        await transport.close()
    samples = await _samples(found.settings, requests)
    _write(json.dumps(trace_of(requests, samples), separators=(",", ":")), target)
    print(f"{len(requests)} requests, {len(samples)} samples", file=sys.stderr)
    return 0


async def _one(transport: Transport, request_id: str) -> TracedRequest:
    try:
        entries = await transport.read_results(request_id, AFTER_ALL, 0)
    except UnknownRequest:
        raise InvalidRequest(
            "request", f"{request_id} is not known: there was none with this id, or its results have expired"
        ) from None
    if not entries:
        raise NotFinished(f"request {request_id} is not finished; its trace is complete when it has ended")
    return TracedRequest(request_id, unpack(entries[-1].data, Terminal))


async def _last(transport: Transport, num: int) -> list[TracedRequest]:
    ended: list[TracedRequest] = []
    num_unreadable = 0
    for one in await transport.finished(num):
        try:
            ended.append(TracedRequest(one.request_id, unpack(one.terminal, Terminal)))
        except WireError:
            num_unreadable += 1  # of another version of ours: it has ended, and that is all it says
    left_out = f"{num_unreadable} of another version cannot be read" if num_unreadable else ""
    if not ended:
        raise InvalidRequest("--last", "; ".join(filter(None, ("no request has ended here lately", left_out))))
    if left_out:
        print(left_out, file=sys.stderr)
    return ended


async def _samples(settings: Settings, requests: list[TracedRequest]) -> list[Sample]:
    begins = [request.first_us for request in requests if request.first_us is not None]
    ends = [request.last_us for request in requests if request.last_us is not None]
    if not begins:
        return []
    return await read_samples(settings, max(0, min(begins) - AROUND_US), max(ends) + AROUND_US)


def _write(text: str, target: Path) -> None:
    if str(target) == "-":
        print(text)
        return
    descriptor = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(text + "\n")
