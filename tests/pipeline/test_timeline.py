"""Durations from stamps: every microsecond of a request belongs to one phase, and spans stay within its life."""

import random

import pytest

from pipeline import boundaries
from pipeline.boundaries import (
    CHUNK_COMPUTED,
    CHUNK_WRITTEN,
    COMPRESSOR_CLAIMED,
    DECODE_CLAIMED,
    FINISHED,
    FIRST_TOKEN,
    KV_LOADED,
    OF_A_CHUNK,
    PREFILL_CLAIMED,
    SEALED,
    SUBMITTED,
    TOKENIZED,
    TOKENIZER_CLAIMED,
)
from pipeline.messages import Stamp
from pipeline.timeline import Span, phases_us, spans, tpot_ms, ttft_ms

BEGINNING = 1_700_000_000_000_000


def stamp(boundary: str, at_us: int, by: str | None = None, chunk: int | None = None) -> Stamp:
    return Stamp(boundary=boundary, at_us=BEGINNING + at_us, by=by, chunk=chunk)


# A prompt of two chunks; the first is sealed while the second is computed.
TWO_CHUNKS = (
    stamp(SUBMITTED, 0),
    stamp(TOKENIZER_CLAIMED, 100, "tok"),
    stamp(TOKENIZED, 300, "tok"),
    stamp(PREFILL_CLAIMED, 1_000, "pre"),
    stamp(FIRST_TOKEN, 5_000, "pre"),
    stamp(CHUNK_COMPUTED, 3_000, "pre", 0),
    stamp(CHUNK_WRITTEN, 3_200, "pre", 0),
    stamp(COMPRESSOR_CLAIMED, 3_300, "com", 0),
    stamp(SEALED, 4_000, "com", 0),
    stamp(CHUNK_COMPUTED, 5_000, "pre", 1),
    stamp(CHUNK_WRITTEN, 5_400, "pre", 1),
    stamp(COMPRESSOR_CLAIMED, 5_500, "com", 1),
    stamp(SEALED, 6_100, "com", 1),
    stamp(DECODE_CLAIMED, 8_000, "dec"),
    stamp(KV_LOADED, 8_500, "dec"),
    stamp(FINISHED, 20_000, "dec"),
)


def span(stage: str, name: str, start: int, end: int, by: str | None = None, chunk: int | None = None) -> Span:
    return Span(stage, name, BEGINNING + start, BEGINNING + end, by, chunk)


def until(boundary: str, finished: int) -> list[Stamp]:
    """The request's own stamps up to a boundary, then its end: what one that failed there carries."""
    own = [stamp for stamp in TWO_CHUNKS if stamp.chunk is None]
    names = [stamp.boundary for stamp in own]
    return [*own[: names.index(boundary) + 1], stamp(FINISHED, finished)]


def test_the_phases_of_a_request_in_the_order_of_its_life() -> None:
    assert list(phases_us(TWO_CHUNKS).items()) == [
        ("queue_tokenizer", 100),
        ("tokenizer", 200),
        ("queue_prefill", 700),
        ("prefill", 4_000),
        ("write", 400),
        ("queue_compressor", 100),
        ("compressor", 600),
        ("queue_decode", 1_900),
        ("load", 500),
        ("decode", 11_500),
    ]


def test_phases_add_up_to_the_whole_whatever_the_clocks_and_holders_did() -> None:
    numbers = random.Random(7)
    for _ in range(300):
        kept = [s for s in TWO_CHUNKS if s.boundary in {SUBMITTED, FINISHED} or numbers.random() < 0.8]
        shifted = [s.model_copy(update={"at_us": s.at_us + numbers.randrange(-3_000, 3_000)}) for s in kept]
        numbers.shuffle(shifted)
        [begun] = [s.at_us for s in shifted if s.boundary == SUBMITTED]
        [ended] = [s.at_us for s in shifted if s.boundary == FINISHED]
        assert sum(phases_us(shifted).values()) == ended - begun
        assert min(phases_us(shifted).values()) >= 0
        for piece in spans(shifted):
            assert begun <= piece.start_us <= piece.end_us <= ended


@pytest.mark.parametrize(
    ("last", "phase"),
    [
        (SUBMITTED, "queue_tokenizer"),
        (TOKENIZER_CLAIMED, "tokenizer"),
        (TOKENIZED, "queue_prefill"),
        (PREFILL_CLAIMED, "prefill"),
        (FIRST_TOKEN, "prefill"),
        (DECODE_CLAIMED, "load"),
        (KV_LOADED, "decode"),
    ],
)
def test_a_request_that_ended_early_was_in_its_last_phase_until_then(last: str, phase: str) -> None:
    stamps = until(last, 30_000)
    phases = phases_us(stamps)
    assert list(phases)[-1] == phase
    assert sum(phases.values()) == 30_000
    final = spans(stamps)[-1]
    assert final.end_us == BEGINNING + 30_000
    assert phase.removeprefix("queue_") in {final.stage, final.name}


def test_without_a_compressor_nobody_waits_for_one() -> None:
    stamps = [s for s in TWO_CHUNKS if s.boundary not in {COMPRESSOR_CLAIMED, SEALED}]
    stamps += [stamp(SEALED, 3_200, "pre", 0), stamp(SEALED, 5_400, "pre", 1)]
    phases = phases_us(stamps)
    assert "queue_compressor" not in phases
    assert phases["compressor"] == 0
    assert phases["queue_decode"] == 2_600
    assert sum(phases.values()) == 20_000
    assert {piece.stage for piece in spans(stamps)} == {"tokenizer", "prefill", "decode"}


def test_a_request_that_goes_on_has_the_phases_it_has_finished() -> None:
    phases = phases_us(TWO_CHUNKS[:4])
    assert phases == {"queue_tokenizer": 100, "tokenizer": 200, "queue_prefill": 700}


def test_what_was_before_the_first_stamp_is_not_guessed() -> None:
    assert list(phases_us(TWO_CHUNKS[2:5])) == ["queue_prefill", "prefill"]


def test_without_stamps_there_is_nothing() -> None:
    assert phases_us([]) == {}
    assert phases_us([stamp(FINISHED, 7)]) == {}
    assert phases_us([stamp("of a later version", 7)]) == {}
    assert spans([]) == []
    assert ttft_ms([]) is None
    assert tpot_ms([], 9) is None


def test_the_spans_of_a_request() -> None:
    assert spans(TWO_CHUNKS) == [
        span("tokenizer", "queue", 0, 100),
        span("tokenizer", "tokenize", 100, 300, "tok"),
        span("prefill", "queue", 300, 1_000),
        span("prefill", "prefill", 1_000, 5_000, "pre"),
        span("prefill", "chunk", 1_000, 3_000, "pre", 0),
        span("prefill", "chunk", 3_000, 5_000, "pre", 1),
        span("prefill", "write", 3_000, 3_200, "pre", 0),
        span("compressor", "queue", 3_200, 3_300, None, 0),
        span("compressor", "seal", 3_300, 4_000, "com", 0),
        span("prefill", "write", 5_000, 5_400, "pre", 1),
        span("compressor", "queue", 5_400, 5_500, None, 1),
        span("compressor", "seal", 5_500, 6_100, "com", 1),
        span("decode", "queue", 6_100, 8_000),
        span("decode", "load", 8_000, 8_500, "dec"),
        span("decode", "decode", 8_500, 20_000, "dec"),
    ]


def test_a_chunk_that_an_earlier_holder_computed_keeps_its_time_and_its_maker() -> None:
    taken_over = [
        s.model_copy(update={"by": "killed", "at_us": BEGINNING + 500}) if s == TWO_CHUNKS[5] else s for s in TWO_CHUNKS
    ]
    chunks = [piece for piece in spans(taken_over) if piece.name == "chunk"]
    assert chunks == [span("prefill", "chunk", 500, 500, "killed", 0), span("prefill", "chunk", 1_000, 5_000, "pre", 1)]


def test_the_time_to_the_first_token_and_between_tokens() -> None:
    assert ttft_ms(TWO_CHUNKS) == 5.0
    assert tpot_ms(TWO_CHUNKS, 4) == 5.0
    assert tpot_ms(TWO_CHUNKS, 1) is None
    assert ttft_ms(until(PREFILL_CLAIMED, 9_000)) is None
    assert tpot_ms(TWO_CHUNKS[:-1], 4) is None


def test_every_boundary_has_a_name_of_its_own() -> None:
    names = [value for name, value in vars(boundaries).items() if name.isupper() and isinstance(value, str)]
    assert len(names) == len(set(names)) == 12
    assert set(names) >= OF_A_CHUNK
