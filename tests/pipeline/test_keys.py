"""Key names."""

import pytest

from pipeline.keys import POOLED_STAGES, PRIORITIES, STAGES, Keys

KEYS = Keys("ns")


def test_streams_up_to_prefill_are_shared_by_all_hosts() -> None:
    assert KEYS.stream("tokenizer", "batch") == "ns:stream:tokenizer:batch"
    assert KEYS.stream("prefill", "interactive", "pool") == "ns:stream:prefill:interactive"


def test_streams_after_prefill_belong_to_a_pool() -> None:
    assert KEYS.stream("decode", "interactive", "pool") == "ns:stream:decode:pool:interactive"
    for stage in POOLED_STAGES:
        with pytest.raises(ValueError, match=f"stage {stage}"):
            KEYS.stream(stage, "batch")


def test_no_two_names_are_equal() -> None:
    streams = [KEYS.stream(stage, priority, "pool") for stage in STAGES for priority in PRIORITIES]
    names = [
        *streams,
        *(KEYS.claims(stream) for stream in streams),
        *(KEYS.tries(stream) for stream in streams),
        *(KEYS.dead(stage) for stage in STAGES),
        *(KEYS.process(stage, "c") for stage in STAGES),
        KEYS.request("r"),
        KEYS.results("r"),
        KEYS.chunks("r", 0),
        KEYS.chunks("r", 1),
        KEYS.processes(),
    ]
    assert len(set(names)) == len(names)
    assert all(name.startswith("ns:") for name in names)


def test_interactive_is_served_first() -> None:
    assert PRIORITIES == ("interactive", "batch")
