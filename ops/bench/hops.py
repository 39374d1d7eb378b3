"""How long a message lies in a queue before the next stage has it, from the stamps of requests.

Owns what counts as the latency of a hop: only entries that nothing stood before. Whoever waits for a stage that is busy
with another request, for a slot or for room waits for work to be done and not for the queue. Knows nothing about how
stamps come about. All stamps are of one host, so their clocks are the same.

    tokenizer    submitted          -> tokenizer_claimed      prefill   tokenized      -> prefill_claimed
    compressor   chunk_written i    -> compressor_claimed i   decode    last sealed    -> decode_claimed
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from pipeline.boundaries import (
    CHUNK_WRITTEN,
    COMPRESSOR_CLAIMED,
    DECODE_CLAIMED,
    FINISHED,
    KV_LOADED,
    PREFILL_CLAIMED,
    SEALED,
    SUBMITTED,
    TOKENIZED,
    TOKENIZER_CLAIMED,
)
from pipeline.messages import Stamp

HOPS = ("tokenizer", "prefill", "compressor", "decode")
"""By the stage that takes the message."""


@dataclass(frozen=True, slots=True)
class Passage:
    """One message's way through one queue; times in epoch microseconds."""

    queued_us: int
    claimed_us: int
    done_us: int
    """When the stage was free for the next one."""


@dataclass(frozen=True, slots=True)
class Hop:
    """All messages of one queue: how many there were, and the latencies of those that nothing stood before."""

    num_messages: int
    latencies_ms: tuple[float, ...]


def hops_of(requests: Iterable[Sequence[Stamp]], num_slots: int) -> dict[str, Hop]:
    """Return each hop, from the stamps of all requests that were under way at the time.

    Args:
        requests: stamps of each; all of them, because one may have stood before another.
        num_slots: requests that decode works on at a time.
    """
    requests = list(requests)
    passages: dict[str, list[Passage]] = {hop: [] for hop in HOPS}
    decoding: list[tuple[int, int]] = []
    for stamps in requests:
        for hop, passage in _passages(stamps):
            passages[hop].append(passage)
        at_us = {stamp.boundary: stamp.at_us for stamp in stamps}
        if DECODE_CLAIMED in at_us and FINISHED in at_us:
            decoding.append((at_us[DECODE_CLAIMED], at_us[FINISHED]))
    found: dict[str, Hop] = {}
    for hop, ways in passages.items():
        free = [way for way in ways if not _is_kept_waiting(way, ways)]
        if hop == "decode":
            free = [way for way in free if _num_at(decoding, way.queued_us) < num_slots]
        latencies_ms = tuple(max(way.claimed_us - way.queued_us, 0) / 1000 for way in free)
        found[hop] = Hop(len(ways), latencies_ms)
    return found


def _passages(stamps: Sequence[Stamp]) -> Iterable[tuple[str, Passage]]:
    last_us: dict[str, int] = {}
    chunks: dict[int, dict[str, int]] = {}
    for stamp in stamps:
        last_us[stamp.boundary] = max(stamp.at_us, last_us.get(stamp.boundary, 0))
        if stamp.chunk is not None:
            chunks.setdefault(stamp.chunk, {})[stamp.boundary] = stamp.at_us
    ways = [
        ("tokenizer", last_us, (SUBMITTED, TOKENIZER_CLAIMED, TOKENIZED)),
        ("prefill", last_us, (TOKENIZED, PREFILL_CLAIMED, CHUNK_WRITTEN)),
        *(("compressor", chunk, (CHUNK_WRITTEN, COMPRESSOR_CLAIMED, SEALED)) for chunk in chunks.values()),
        ("decode", last_us, (SEALED, DECODE_CLAIMED, KV_LOADED)),
    ]
    for hop, at_us, boundaries in ways:
        if all(boundary in at_us for boundary in boundaries):
            yield hop, Passage(*(at_us[boundary] for boundary in boundaries))


def _is_kept_waiting(way: Passage, ways: Iterable[Passage]) -> bool:
    """Whether the stage worked on another message at any moment between arrival and claim."""
    return any(
        other is not way and other.claimed_us < way.claimed_us and other.done_us > way.queued_us for other in ways
    )


def _num_at(spans: Iterable[tuple[int, int]], at_us: int) -> int:
    return sum(begins <= at_us < ends for begins, ends in spans)
