"""From the stamps of one request to durations: pure functions of what it carried.

Owns the phases and spans of a request's life; boundaries.py draws it. Knows nothing about where stamps come from.

Stamps come from the clocks of several processes, and a request that was taken over may hold stamps of an earlier
holder. So nothing here relies on their order: time only ever moves forward, and never beyond the end.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from types import MappingProxyType
from typing import Final

from pipeline.boundaries import (
    CHUNK_COMPUTED,
    CHUNK_WRITTEN,
    COMPRESSOR_CLAIMED,
    DECODE_CLAIMED,
    FINISHED,
    FIRST_TOKEN,
    KV_LOADED,
    PREFILL_CLAIMED,
    SEALED,
    SUBMITTED,
    TOKENIZED,
    TOKENIZER_CLAIMED,
)
from pipeline.messages import Stamp

PHASES: Final[Mapping[str, str]] = MappingProxyType(
    {
        TOKENIZER_CLAIMED: "queue_tokenizer",
        TOKENIZED: "tokenizer",
        PREFILL_CLAIMED: "queue_prefill",
        FIRST_TOKEN: "prefill",
        CHUNK_WRITTEN: "write",  # of the last chunk: the others were written while prefill computed
        COMPRESSOR_CLAIMED: "queue_compressor",  # likewise
        SEALED: "compressor",
        DECODE_CLAIMED: "queue_decode",
        KV_LOADED: "load",
        FINISHED: "decode",
    }
)
"""The boundaries that divide a request's life, in their order, and the phase that ends with each."""

_ENDED_IN: Final[Mapping[str, str]] = MappingProxyType(
    {
        SUBMITTED: "queue_tokenizer",
        TOKENIZER_CLAIMED: "tokenizer",
        TOKENIZED: "queue_prefill",
        PREFILL_CLAIMED: "prefill",
        FIRST_TOKEN: "prefill",  # it ended with token 0
        CHUNK_WRITTEN: "queue_compressor",
        COMPRESSOR_CLAIMED: "compressor",
        SEALED: "queue_decode",
        DECODE_CLAIMED: "load",
        KV_LOADED: "decode",
    }
)
"""Where a request was when it ended, by the last boundary before."""


_REQUEST_SPANS: Final = (
    ("tokenizer", "queue", SUBMITTED, TOKENIZER_CLAIMED),
    ("tokenizer", "tokenize", TOKENIZER_CLAIMED, TOKENIZED),
    ("prefill", "queue", TOKENIZED, PREFILL_CLAIMED),
    ("prefill", "prefill", PREFILL_CLAIMED, FIRST_TOKEN),
    ("decode", "queue", SEALED, DECODE_CLAIMED),
    ("decode", "load", DECODE_CLAIMED, KV_LOADED),
    ("decode", "decode", KV_LOADED, FINISHED),
)
_CHUNK_SPANS: Final = (
    ("prefill", "write", CHUNK_COMPUTED, CHUNK_WRITTEN),
    ("compressor", "queue", CHUNK_WRITTEN, COMPRESSOR_CLAIMED),
    ("compressor", "seal", COMPRESSOR_CLAIMED, SEALED),
)
"""Stage, name, and the boundaries between which it happens."""


@dataclass(frozen=True, slots=True)
class Span:
    """A piece of a request's life: a stage worked on it, or it waited for the stage (`queue`)."""

    stage: str
    name: str
    start_us: int
    end_us: int
    by: str | None = None
    """The process that worked; None for a queue, which belongs to all of a stage's processes."""
    chunk: int | None = None


def phases_us(stamps: Iterable[Stamp]) -> dict[str, int]:
    """Return how long a request was in each phase, in the order of its life; they add up to finished - submitted.

    Each moment belongs to one phase: what prefill and compressor did at the same time counts as prefill. Phases that
    a request did not reach are missing; one that ended early was in the last one until it ended. Without stamps there
    are no phases, and those of a request that goes on add up to what is known.
    """
    passed_us = _passed(stamps)
    known = [boundary for boundary in (SUBMITTED, *PHASES) if boundary in passed_us]
    if not known:
        return {}
    limit_us = passed_us.get(FINISHED, max(passed_us.values()))
    at_us = min(passed_us[known[0]], limit_us)
    phases: dict[str, int] = {}
    for last, boundary in pairwise(known):
        phase = _ENDED_IN[last] if boundary == FINISHED else PHASES[boundary]
        next_us = min(max(at_us, passed_us[boundary]), limit_us)
        phases[phase] = phases.get(phase, 0) + next_us - at_us
        at_us = next_us
    return phases


def spans(stamps: Iterable[Stamp]) -> list[Span]:
    """Return what happened to a request, by the time of its beginning; pieces may overlap and lie within others.

        tokenizer   queue, tokenize
        prefill     queue, prefill; within it chunk 0, 1, ...; beside them write 0, 1, ...
        compressor  queue and seal 0, 1, ...
        decode      queue, load, decode

    None is shorter than zero or sticks out of the request's life. What was not finished when the request ended
    ends with it.
    """
    stamps = list(stamps)
    passed_us = _passed(stamps)
    if not passed_us:
        return []
    by = {stamp.boundary: stamp.by for stamp in stamps}
    found = [*_request_spans(passed_us, by), *_chunk_spans(stamps, passed_us)]
    first_us, end_us = min(passed_us.values()), max(passed_us.values())
    first_us, end_us = passed_us.get(SUBMITTED, first_us), passed_us.get(FINISHED, end_us)
    return sorted((_within(span, first_us, end_us) for span in found), key=lambda span: (span.start_us, -span.end_us))


def _request_spans(passed_us: Mapping[str, int], by: Mapping[str, str | None]) -> Iterator[Span]:
    ended_us = passed_us.get(FINISHED)
    starts_us = dict(passed_us)
    if DECODE_CLAIMED in passed_us and FIRST_TOKEN in passed_us:
        starts_us.setdefault(SEALED, passed_us[FIRST_TOKEN])  # of one whose chunks are not known
    last = max((n for n, (*_, begins, _) in enumerate(_REQUEST_SPANS) if begins in passed_us), default=None)
    for number, (stage, name, begins, ends) in enumerate(_REQUEST_SPANS):
        end_us = ended_us if number == last and ended_us is not None else passed_us.get(ends)
        if begins in starts_us and end_us is not None:
            yield Span(stage, name, starts_us[begins], end_us, None if name == "queue" else by[begins])


def _chunk_spans(stamps: Iterable[Stamp], passed_us: Mapping[str, int]) -> Iterator[Span]:
    chunks: dict[int, dict[str, Stamp]] = {}
    for stamp in stamps:
        if stamp.chunk is not None:
            chunks.setdefault(stamp.chunk, {})[stamp.boundary] = stamp
    since_us = passed_us.get(PREFILL_CLAIMED, 0)
    for chunk, crossed in sorted(chunks.items()):
        if computed := crossed.get(CHUNK_COMPUTED):
            yield Span("prefill", "chunk", min(since_us, computed.at_us), computed.at_us, computed.by, chunk)
            since_us = max(since_us, computed.at_us)
        for stage, name, begins, ends in _CHUNK_SPANS:
            if begins in crossed and ends in crossed:
                by = None if name == "queue" else crossed[begins].by
                yield Span(stage, name, crossed[begins].at_us, crossed[ends].at_us, by, chunk)


def _within(span: Span, first_us: int, end_us: int) -> Span:
    start = min(max(span.start_us, first_us), end_us)
    return replace(span, start_us=start, end_us=min(max(span.end_us, start), end_us))


def ttft_ms(stamps: Iterable[Stamp]) -> float | None:
    """Return the time from submission to token 0, queues included; None where there was no token."""
    passed_us = _passed(stamps)
    if SUBMITTED not in passed_us or FIRST_TOKEN not in passed_us:
        return None
    return max(0, passed_us[FIRST_TOKEN] - passed_us[SUBMITTED]) / 1000


def tpot_ms(stamps: Iterable[Stamp], num_tokens: int) -> float | None:
    """Return the time per output token after the first, waiting for decode included; None below two tokens."""
    passed_us = _passed(stamps)
    if num_tokens < 2 or FIRST_TOKEN not in passed_us or FINISHED not in passed_us:
        return None
    return max(0, passed_us[FINISHED] - passed_us[FIRST_TOKEN]) / 1000 / (num_tokens - 1)


def _passed(stamps: Iterable[Stamp]) -> dict[str, int]:
    """When each boundary was crossed; one that every chunk crosses counts when the last one did."""
    passed_us: dict[str, int] = {}
    for stamp in stamps:
        passed_us[stamp.boundary] = max(stamp.at_us, passed_us.get(stamp.boundary, 0))
    return passed_us
