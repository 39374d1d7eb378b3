"""Traces of made-up requests: the format's rules hold, everything is where it belongs, and no text gets in."""

import json
import random
from collections.abc import Iterable, Sequence
from typing import Any

import pytest

from ops.tracing.trace import TracedRequest, trace_of
from pipeline.boundaries import (
    DECODE_CLAIMED,
    FINISHED,
    KV_LOADED,
    PREFILL_CLAIMED,
    SEALED,
    SUBMITTED,
    TOKENIZER_CLAIMED,
)
from pipeline.messages import Failure, Stamp, Terminal, Usage
from pipeline.queue_state import QueueState
from pipeline.samples import Sample
from tests.ops.trace_rules import check_trace
from tests.pipeline.test_timeline import BEGINNING, TWO_CHUNKS

Event = dict[str, Any]


def shifted(stamps: Iterable[Stamp], by_us: int) -> tuple[Stamp, ...]:
    return tuple(stamp.model_copy(update={"at_us": stamp.at_us + by_us}) for stamp in stamps)


def request(request_id: str = "r", stamps: Sequence[Stamp] = TWO_CHUNKS, **changes: Any) -> TracedRequest:
    usage = Usage(prompt_tokens=400, completion_tokens=4, draft_tokens=3, accepted_tokens=2)
    fields: dict[str, Any] = {"finish_reason": "stop", "text": "secret", "usage": usage, "stamps": tuple(stamps)}
    return TracedRequest(request_id, Terminal.model_validate(fields | changes))


def sample(at_us: int, pool_id: str = "pool", **queues: tuple[int, int]) -> Sample:
    found = tuple(QueueState(stage, "batch", entries, held, 1, 0.0) for stage, (entries, held) in queues.items())
    return Sample(BEGINNING + at_us, pool_id, 500, 1_000, 2, found)


def events(document: dict[str, object], kind: str) -> list[Event]:
    found: Any = document["traceEvents"]
    return [event for event in found if event["ph"] == kind]


def process_names(document: dict[str, object]) -> list[str]:
    """In the order in which a viewer shows them."""
    ranks = {
        one["pid"]: one["args"]["sort_index"] for one in events(document, "M") if one["name"] == "process_sort_index"
    }
    names = [one for one in events(document, "M") if one["name"] == "process_name"]
    return [one["args"]["name"] for one in sorted(names, key=lambda one: ranks[one["pid"]])]


def test_one_request_from_queue_to_queue() -> None:
    document = trace_of([request()], [])
    check_trace(document)
    assert process_names(document) == [
        "waiting for tokenizer",
        "tokenizer",
        "waiting for prefill",
        "prefill",
        "waiting for compressor",
        "compressor",
        "waiting for decode",
        "decode",
    ]
    slices = {(one["cat"], one["name"]): (one["ts"], one["dur"]) for one in events(document, "X")}
    assert slices["tokenizer", "queue"] == (0, 100)
    assert slices["prefill", "chunk 1"] == (3_000, 2_000)
    assert slices["compressor", "seal 0"] == (3_300, 700)
    assert slices["decode", "decode"] == (8_500, 11_500)
    assert len(slices) == 15


def test_arrows_lead_from_stage_to_stage() -> None:
    document = trace_of([request()], [])
    slices = events(document, "X")

    def around(end: Event) -> str:
        """The innermost slice, as a viewer binds it."""
        return [
            f"{one['cat']} {one['name']}"
            for one in slices
            if (one["pid"], one["tid"]) == (end["pid"], end["tid"]) and one["ts"] <= end["ts"] < one["ts"] + one["dur"]
        ][-1]

    targets = {end["id"]: end for end in events(document, "f")}
    hops = [(around(source), around(targets[source["id"]])) for source in events(document, "s")]
    assert sorted(hops) == sorted(
        [
            ("tokenizer queue", "tokenizer tokenize"),
            ("tokenizer tokenize", "prefill queue"),
            ("prefill queue", "prefill chunk 0"),
            ("prefill chunk 0", "prefill write 0"),
            ("prefill write 0", "compressor queue 0"),
            ("compressor queue 0", "compressor seal 0"),
            ("compressor seal 0", "decode queue"),
            ("prefill chunk 1", "prefill write 1"),
            ("prefill write 1", "compressor queue 1"),
            ("compressor queue 1", "compressor seal 1"),
            ("compressor seal 1", "decode queue"),
            ("decode queue", "decode load"),
        ]
    )


def test_requests_at_the_same_time_get_lanes_of_their_own_and_lanes_are_used_again() -> None:
    at_once = [request(f"a{number}", shifted(TWO_CHUNKS, 10 * number)) for number in range(3)]
    later = request("later", shifted(TWO_CHUNKS, 50_000))
    document = trace_of([*at_once, later], [])
    check_trace(document)
    lanes = {one["args"]["request_id"]: one["tid"] for one in events(document, "X") if one["name"] == "decode"}
    assert lanes == {"a0": 1, "a1": 2, "a2": 3, "later": 1}


def test_every_replica_is_a_process() -> None:
    boundaries = {DECODE_CLAIMED, KV_LOADED, FINISHED}
    elsewhere = [s.model_copy(update={"by": "host:77:x"}) if s.boundary in boundaries else s for s in TWO_CHUNKS]
    document = trace_of([request("a"), request("b", shifted(elsewhere, 10))], [])
    check_trace(document)
    assert [name for name in process_names(document) if name.startswith("decode")] == [
        "decode 1",
        "decode 2 (process 77)",
    ]


def test_figures_stand_beside_the_slices_and_text_does_not() -> None:
    document = trace_of([request()], [])
    [decode] = [one for one in events(document, "X") if one["name"] == "decode"]
    assert decode["args"] == {
        "request_id": "r",
        "finish_reason": "stop",
        "prompt_tokens": 400,
        "completion_tokens": 4,
        "draft_tokens": 3,
        "accepted_tokens": 2,
        "recomputed_tokens": 0,
        "ttft_ms": 5.0,
        "tpot_ms": 5.0,
    }
    assert "secret" not in json.dumps(document)


def test_a_failed_request_ends_where_it_failed() -> None:
    stamps = [*TWO_CHUNKS[:4], Stamp(boundary=FINISHED, at_us=BEGINNING + 2_000, by="pre")]
    failure = Failure(stage="prefill", code="kv_pool_full", message="a sentence", retryable=True)
    document = trace_of([request("r", stamps, finish_reason="error", usage=None, failure=failure)], [])
    check_trace(document)
    last = events(document, "X")[-1]
    assert (last["name"], last["ts"] + last["dur"]) == ("prefill", 2_000)
    assert last["args"] == {
        "request_id": "r",
        "finish_reason": "error",
        "failed_in": "prefill",
        "failure": "kv_pool_full",
    }


@pytest.mark.parametrize("stamps", [(), (Stamp(boundary=FINISHED, at_us=BEGINNING),)])
def test_a_request_of_which_nothing_is_known_is_not_shown(stamps: tuple[Stamp, ...]) -> None:
    document = trace_of([request("r", stamps), request("known", shifted(TWO_CHUNKS, 7))], [])
    check_trace(document)
    assert {one["args"]["request_id"] for one in events(document, "X")} == {"known"}
    check_trace(trace_of([request("r", stamps)], []))


def test_samples_become_counters_that_begin_with_the_first_request() -> None:
    samples = [
        sample(-900_000, prefill=(9, 9)),
        sample(-100_000, prefill=(3, 1)),
        sample(5_000, prefill=(2, 1), decode=(4, 4)),
    ]
    document = trace_of([request()], samples)
    check_trace(document)
    values = [(one["name"], one["ts"], one["args"]) for one in events(document, "C")]
    assert [value for value in values if value[0] == "prefill queue"] == [
        ("prefill queue", 0, {"waiting": 2, "in work": 1}),
        ("prefill queue", 5_000, {"waiting": 1, "in work": 1}),
    ]
    assert ("decode queue", 5_000, {"waiting": 0, "in work": 4}) in values
    assert ("KV pool", 5_000, {"bytes": 500}) in values
    assert ("KV blobs", 5_000, {"blobs": 2}) in values
    assert process_names(document)[-1] == "queues and KV"


def test_two_pools_have_counters_of_their_own() -> None:
    document = trace_of([request()], [sample(1, "one"), sample(2, "two")])
    check_trace(document)
    assert process_names(document)[-2:] == ["queues and KV of pool one", "queues and KV of pool two"]


def test_the_rules_hold_whatever_clocks_and_takeovers_did() -> None:
    numbers = random.Random(11)
    kept_always = {SUBMITTED, TOKENIZER_CLAIMED, PREFILL_CLAIMED, FINISHED}
    for _ in range(100):
        requests: list[TracedRequest] = []
        for number in range(numbers.randrange(1, 9)):
            kept = [s for s in TWO_CHUNKS if s.boundary in kept_always or numbers.random() < 0.9]
            moved = [s.model_copy(update={"at_us": s.at_us + numbers.randrange(-2_000, 2_000)}) for s in kept]
            seen = [s.model_copy(update={"by": numbers.choice(["a", "b"])}) if s.by else s for s in moved]
            requests.append(request(f"r{number}", shifted(seen, numbers.randrange(0, 30_000))))
        check_trace(trace_of(requests, [sample(1_000), sample(2_000, decode=(1, 0))]))


def test_a_chunk_that_was_sealed_in_prefill_leads_to_decode() -> None:
    stamps = [s for s in TWO_CHUNKS if s.boundary not in {"compressor_claimed", SEALED}]
    for chunk, at_us in ((0, 3_200), (1, 5_400)):
        stamps.append(Stamp(boundary=SEALED, at_us=BEGINNING + at_us, by="pre", chunk=chunk))
    document = trace_of([request("r", stamps)], [])
    check_trace(document)
    assert not any(one["cat"] == "compressor" for one in events(document, "X"))
    assert len(events(document, "s")) == 8


def test_figures_are_worked_out_once_a_request(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    args = TracedRequest.args

    def counted(traced: TracedRequest) -> dict[str, object]:
        asked.append(traced.request_id)
        return args(traced)

    monkeypatch.setattr(TracedRequest, "args", counted)
    trace_of([request("a"), request("b", shifted(TWO_CHUNKS, 10))], [])
    assert asked == ["a", "b"]


def test_a_span_that_overlaps_its_host_gets_a_lane_of_its_own() -> None:
    late = [s.model_copy(update={"at_us": BEGINNING + 5_600}) if s.chunk == 1 else s for s in TWO_CHUNKS]
    document = trace_of([request("r", late)], [])
    check_trace(document)
    lanes = {one["name"]: one["tid"] for one in events(document, "X") if one["cat"] == "prefill"}
    assert lanes["chunk 0"] == lanes["prefill"]
    assert lanes["chunk 1"] != lanes["prefill"]
