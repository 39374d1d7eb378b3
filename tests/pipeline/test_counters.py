"""The tally of one process."""

import threading

import pytest

from pipeline import counters
from pipeline.counters import KV_MISSING, MEANINGS, TOKENS_REPLAYED, Counters


def test_what_was_taken_is_not_counted_again() -> None:
    tally = Counters()
    assert tally.take() == {}
    tally.add(KV_MISSING)
    tally.add(TOKENS_REPLAYED, 40)
    tally.add(TOKENS_REPLAYED, 2)
    tally.add(counters.DIVERGENCES, 0)
    assert tally.take() == {KV_MISSING: 1, TOKENS_REPLAYED: 42}
    assert tally.take() == {}
    tally.add(KV_MISSING, 3)
    assert tally.take() == {KV_MISSING: 3}


def test_a_name_that_nobody_declared_is_a_mistake() -> None:
    with pytest.raises(AssertionError, match="kv_mising is no counter"):
        Counters().add("kv_mising")


def test_threads_lose_no_count() -> None:
    tally, num_threads, num_each = Counters(), 4, 20_000

    def count() -> None:
        for _ in range(num_each):
            tally.add(KV_MISSING)

    threads = [threading.Thread(target=count) for _ in range(num_threads)]
    for thread in threads:
        thread.start()
    taken = 0
    while any(thread.is_alive() for thread in threads):
        taken += tally.take().get(KV_MISSING, 0)
    for thread in threads:
        thread.join()
    assert taken + tally.take().get(KV_MISSING, 0) == num_threads * num_each


def test_every_counter_has_a_meaning() -> None:
    declared = {value for name, value in vars(counters).items() if name.isupper() and isinstance(value, str)}
    assert declared == set(MEANINGS)
