"""Requests and samples as a trace that Perfetto and Chrome's tracing page open.

Owns what is shown: slices, arrows, counters. Knows nothing about where requests and samples come from, nor how a
trace is drawn. No text of prompts or outputs gets in.

The Trace Event Format, as far as it is used here; times are microseconds since the first request was submitted:

    M  process_name, process_sort_index, thread_name, thread_sort_index
    X  a slice: ts, dur; those of one thread lie apart or within each other
    s  an arrow leaves the slice around its ts; `f` with bp=e reaches the slice around its ts; both have the same id
    C  a counter's value from ts on
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

from ops.tracing.lanes import Gauges, Lanes, Place, Queue, Replica
from pipeline.boundaries import SUBMITTED
from pipeline.keys import STAGES
from pipeline.messages import Terminal
from pipeline.samples import Sample
from pipeline.timeline import Span, spans, tpot_ms, ttft_ms

Event = dict[str, object]
"""One object of the format, as JSON has it."""

_HOST: Final = {"chunk": "prefill", "decode": "load"}
"""Spans that share the lane of another one: within it, or behind it."""
_PATH: Final = (("tokenizer", "queue"), ("tokenizer", "tokenize"), ("prefill", "queue"), ("prefill", "prefill"))
_CHUNK_PATH: Final = (("prefill", "chunk"), ("prefill", "write"), ("compressor", "queue"), ("compressor", "seal"))
_DECODE_PATH: Final = (("decode", "queue"), ("decode", "load"))
"""What the arrows connect: a request's way to prefill, each of its chunks' to the compressor, and on to decode."""


@dataclass(frozen=True, slots=True)
class TracedRequest:
    """A request that has ended."""

    request_id: str
    terminal: Terminal

    @property
    def first_us(self) -> int | None:
        """When it was submitted, or first seen; None where nothing is known of it."""
        stamps = self.terminal.stamps
        submitted = [stamp.at_us for stamp in stamps if stamp.boundary == SUBMITTED]
        return min(submitted or [stamp.at_us for stamp in stamps], default=None)

    @property
    def last_us(self) -> int | None:
        """When it ended."""
        return max((stamp.at_us for stamp in self.terminal.stamps), default=None)

    def args(self) -> dict[str, object]:
        """Return what is shown beside its slices."""
        terminal = self.terminal
        shown: dict[str, object] = {"request_id": self.request_id, "finish_reason": terminal.finish_reason}
        if terminal.failure is not None:
            shown |= {"failed_in": terminal.failure.stage, "failure": terminal.failure.code}
        if terminal.usage is not None:
            shown |= terminal.usage.model_dump()
        num_tokens = terminal.usage.completion_tokens if terminal.usage is not None else 0
        times_ms = {"ttft_ms": ttft_ms(terminal.stamps), "tpot_ms": tpot_ms(terminal.stamps, num_tokens)}
        return shown | {name: round(value, 3) for name, value in times_ms.items() if value is not None}


@dataclass(slots=True)
class _Block:
    """Spans that share a lane, the first of them the one that holds or precedes the others."""

    spans: list[Span]
    end_us: int

    @property
    def first(self) -> Span:
        return self.spans[0]

    def take(self, span: Span) -> bool:
        """Add a span that lies within the first one or behind them all; return whether it does."""
        if span.end_us > self.first.end_us and span.start_us < self.end_us:
            return False
        self.spans.append(span)
        self.end_us = max(self.end_us, span.end_us)
        return True


@dataclass(frozen=True, slots=True)
class _Slice:
    """A span, and where it is shown."""

    span: Span
    place: Place


def trace_of(requests: Sequence[TracedRequest], samples: Iterable[Sample]) -> dict[str, object]:
    """Return the trace of requests, and of what queues and pool held meanwhile, as a JSON object."""
    epoch_us = min((request.first_us for request in requests if request.first_us is not None), default=0)
    lanes = Lanes()
    timed: list[Event] = []
    num_arrows = 0
    for request, slices in zip(requests, _placed(requests, lanes), strict=True):
        args = request.args()
        timed += [_slice_event(one, args) for one in slices]
        for source, target in _hops(slices):
            arrow = list(_arrow(source, target, num_arrows + 1))
            num_arrows += bool(arrow)
            timed += arrow
    timed += [event for sample in _shown(samples, epoch_us) for event in _counters(sample, lanes)]
    for event in timed:
        event["ts"] = max(0, int(str(event["ts"])) - epoch_us)
    return {
        # Slices come before the arrows that begin or end in them.
        "traceEvents": [*lanes.names(), *sorted(timed, key=lambda event: (event["ts"], event["ph"] != "X"))],
        "displayTimeUnit": "ms",
        "otherData": {"program": "sluice", "epoch_us": epoch_us, "num_requests": len(requests)},
    }


def _placed(requests: Sequence[TracedRequest], lanes: Lanes) -> list[list[_Slice]]:
    """The slices of each request; lanes are given out in the order of time, over all requests."""
    blocks = [(number, block) for number, request in enumerate(requests) for block in _blocks(request)]
    placed: list[list[_Slice]] = [[] for _ in requests]
    for number, block in sorted(blocks, key=lambda numbered: numbered[1].first.start_us):
        first = block.first
        track = Queue(first.stage) if first.name == "queue" else Replica(first.stage, first.by or "")
        kind = "write" if first.name == "write" else "work"
        place = lanes.place(track, kind, first.start_us, block.end_us)
        placed[number] += [_Slice(span, place) for span in block.spans]
    return placed


def _blocks(request: TracedRequest) -> list[_Block]:
    """What needs lanes; a wait that took no time is not shown."""
    blocks: list[_Block] = []
    hosts: dict[tuple[str, str | None], _Block] = {}
    for span in spans(request.terminal.stamps):
        if span.name == "queue" and span.start_us == span.end_us:
            continue
        host = hosts.get((_HOST.get(span.name, ""), span.by))
        if host is None or not host.take(span):
            block = _Block([span], span.end_us)
            blocks.append(block)
            hosts.setdefault((span.name, span.by), block)
    return blocks


def _slice_event(one: _Slice, args: Mapping[str, object]) -> Event:
    span = one.span
    chunk = {} if span.chunk is None else {"chunk": span.chunk}
    return {
        "ph": "X",
        "name": span.name if span.chunk is None else f"{span.name} {span.chunk}",
        "cat": span.stage,
        "ts": span.start_us,
        "dur": span.end_us - span.start_us,
        "pid": one.place.pid,
        "tid": one.place.tid,
        "args": {**args, **chunk},
    }


def _hops(slices: Sequence[_Slice]) -> Iterator[tuple[_Slice, _Slice]]:
    """From where to where a request and its chunks went; slices that took no time can hold no end of an arrow."""
    found = {
        (one.span.stage, one.span.name, one.span.chunk): one for one in slices if one.span.start_us < one.span.end_us
    }

    def path(names: Iterable[tuple[str, str]], chunk: int | None = None) -> list[_Slice]:
        return [found[stage, name, chunk] for stage, name in names if (stage, name, chunk) in found]

    to_decode = path(_DECODE_PATH)
    ways = [path(_PATH), to_decode]
    chunks = sorted({one.span.chunk for one in slices if one.span.chunk is not None})
    ways += [path(_CHUNK_PATH, chunk) + to_decode[:1] for chunk in chunks]
    for way in ways:
        yield from pairwise(way)


def _arrow(source: _Slice, target: _Slice, number: int) -> Iterator[Event]:
    """Both ends, or nothing where clocks disagree so much that it would point into the past."""
    leaves_us = source.span.end_us - 1  # the last moment that is still within the slice
    arrives_us = max(target.span.start_us, leaves_us)
    if arrives_us >= target.span.end_us:
        return
    shared = {"name": "request", "cat": "arrow", "id": number}
    yield {"ph": "s", **shared, "ts": leaves_us, "pid": source.place.pid, "tid": source.place.tid}
    yield {"ph": "f", "bp": "e", **shared, "ts": arrives_us, "pid": target.place.pid, "tid": target.place.tid}


def _shown(samples: Iterable[Sample], epoch_us: int) -> list[Sample]:
    """Those from the first request on, and of each pool the newest one before it: how it stood in the beginning."""
    ordered = sorted(samples, key=lambda sample: sample.at_us)
    before = {sample.pool_id: sample for sample in ordered if sample.at_us < epoch_us}
    return [*before.values(), *(sample for sample in ordered if sample.at_us >= epoch_us)]


def _counters(sample: Sample, lanes: Lanes) -> Iterator[Event]:
    pid = lanes.pid(Gauges(sample.pool_id))

    def event(name: str, values: dict[str, int]) -> Event:
        return {"ph": "C", "name": name, "ts": sample.at_us, "pid": pid, "args": values}

    for stage in STAGES:
        yield event(f"{stage} queue", {"waiting": sample.num_waiting(stage), "in work": sample.num_held(stage)})
    yield event("KV pool", {"bytes": sample.kv_used_bytes})
    yield event("KV blobs", {"blobs": sample.num_blobs})
