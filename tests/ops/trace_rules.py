"""What the Trace Event Format asks of a file, as far as Sluice uses it; viewers drop or misplace what breaks it."""

import json
from collections import defaultdict
from typing import Any

Json = dict[str, Any]
KEYS = {
    "M": {"ph", "name", "pid", "args"},
    "X": {"ph", "name", "cat", "ts", "dur", "pid", "tid", "args"},
    "s": {"ph", "name", "cat", "id", "ts", "pid", "tid"},
    "f": {"ph", "name", "cat", "id", "ts", "pid", "tid", "bp"},
    "C": {"ph", "name", "ts", "pid", "args"},
}
METADATA = {
    "process_name": "name",
    "process_sort_index": "sort_index",
    "thread_name": "name",
    "thread_sort_index": "sort_index",
}


def check_trace(document: Json) -> None:
    """Fail where a viewer would."""
    assert json.loads(json.dumps(document)) == document
    assert document["displayTimeUnit"] == "ms"
    events: list[Json] = document["traceEvents"]
    for event in events:
        _check_fields(event)
    timed = [event for event in events if event["ph"] != "M"]
    assert [event["ts"] for event in timed] == sorted(event["ts"] for event in timed)
    _check_names(events)
    slices: dict[tuple[int, int], list[Json]] = defaultdict(list)
    for event in timed:
        if event["ph"] == "X":
            slices[event["pid"], event["tid"]].append(event)
    for some in slices.values():
        _check_nesting(some)
    _check_arrows(timed, slices)


def _check_fields(event: Json) -> None:
    assert set(event) - {"tid"} == KEYS[event["ph"]] - {"tid"}, event
    assert type(event["pid"]) is int
    assert isinstance(event["name"], str)
    if event["ph"] != "M":
        assert type(event["ts"]) is int
        assert event["ts"] >= 0
    if event["ph"] in "Xsf":
        assert type(event["tid"]) is int
    if event["ph"] == "X":
        assert type(event["dur"]) is int
        assert event["dur"] >= 0
    if event["ph"] == "C":
        assert event["args"]
        assert all(type(value) is int for value in event["args"].values())
    if event["ph"] == "M":
        assert list(event["args"]) == [METADATA[event["name"]]]
        assert ("tid" in event) == event["name"].startswith("thread")


def _check_names(events: list[Json]) -> None:
    """Every process and lane has one name and one place, and no two processes share a name."""
    named = [(event["name"], event["pid"], event.get("tid")) for event in events if event["ph"] == "M"]
    assert len(named) == len(set(named))
    processes = [event["args"]["name"] for event in events if event["name"] == "process_name"]
    assert len(processes) == len(set(processes))
    for event in events:
        if event["ph"] == "M":
            continue
        assert ("process_name", event["pid"], None) in named
        assert ("process_sort_index", event["pid"], None) in named
        if "tid" in event:
            assert ("thread_name", event["pid"], event["tid"]) in named


def _check_nesting(slices: list[Json]) -> None:
    """Slices of one lane lie apart or within each other, and one that holds others comes first."""
    open_until: list[int] = []
    for event in slices:
        while open_until and open_until[-1] <= event["ts"]:
            open_until.pop()
        end = event["ts"] + event["dur"]
        assert not open_until or end <= open_until[-1], event
        open_until.append(end)


def _check_arrows(timed: list[Json], slices: dict[tuple[int, int], list[Json]]) -> None:
    begun: dict[object, Json] = {}
    ended: set[object] = set()
    for event in timed:
        if event["ph"] not in {"s", "f"}:
            continue
        around = [
            one for one in slices[event["pid"], event["tid"]] if one["ts"] <= event["ts"] < one["ts"] + one["dur"]
        ]
        assert around, f"no slice to bind to: {event}"
        if event["ph"] == "s":
            assert event["id"] not in begun
            begun[event["id"]] = event
            continue
        assert event["bp"] == "e"
        source = begun[event["id"]]
        assert (source["name"], source["cat"]) == (event["name"], event["cat"])
        assert source["ts"] <= event["ts"]
        assert event["id"] not in ended
        ended.add(event["id"])
    assert ended == set(begun)
