"""The row rule on the real model: what a row yields depends on its own sequence's tokens alone, bit for bit."""

from collections.abc import Sequence

import numba
import numpy as np
import pytest
import torch

from stages.engine.batch import RowBatch, Run
from stages.engine.kv_cache import PagedKvCache
from stages.engine.model import Model

PROMPT = (np.arange(1, 151) * 6007 % 49152).tolist()


def in_chunks(model: Model, cache: PagedKvCache, tokens: Sequence[int], lengths: Sequence[int]) -> np.ndarray:
    """Logits of every position, computed in chunks of those lengths."""
    pages, rows, start = cache.allocate(len(tokens)), [], 0
    for length in lengths:
        run = Run(tokens[start : start + length], start, pages, length)
        rows.append(model.logits(RowBatch.from_runs([run]), cache))
        start += length
    assert start == len(tokens)
    cache.free(pages)
    return np.concatenate(rows)


def spoil(cache: PagedKvCache) -> None:
    """Fill every slot with what must never be read."""
    rng = np.random.default_rng(7)
    for array in (cache.keys, cache.values):
        array.view(np.uint8)[:] = rng.integers(0, 255, array.view(np.uint8).shape[-1], np.uint8)
    cache.key_scales[:] = np.nan
    cache.value_scales[:] = np.nan


@pytest.mark.parametrize("lengths", [[64, 64, 22], [1, 149], [100, 33, 17], [15, 17, 16, 1, 101]])
def test_any_chunking_of_a_prompt_gives_the_same_bits(model, cache, lengths) -> None:
    whole = in_chunks(model, cache, PROMPT, [150])
    spoil(cache)
    assert np.array_equal(whole, in_chunks(model, cache, PROMPT, lengths))


def test_token_by_token_replay_gives_the_same_bits(model, cache) -> None:
    whole = in_chunks(model, cache, PROMPT[:70], [70])
    assert np.array_equal(whole, in_chunks(model, cache, PROMPT[:70], [1] * 70))


def test_one_and_two_threads_give_the_same_bits(model, cache) -> None:
    two = in_chunks(model, cache, PROMPT, [128, 22])
    torch.set_num_threads(1)
    numba.set_num_threads(1)
    assert np.array_equal(two, in_chunks(model, cache, PROMPT, [128, 22]))


def test_batch_mates_do_not_change_a_row(model, cache) -> None:
    rng = np.random.default_rng(3)
    alone = in_chunks(model, cache, PROMPT[:80], [79, 1])
    mates = [rng.integers(0, 49152, length).tolist() for length in (1, 20, 65, 130)]
    sequences = [*mates[:2], PROMPT[:79], *mates[2:]]
    tables = [cache.allocate(len(tokens) + 4) for tokens in sequences]
    runs = [Run(tokens, 0, table, len(tokens)) for tokens, table in zip(sequences, tables, strict=True)]
    together = model.logits(RowBatch.from_runs(runs), cache)
    first = len(mates[0]) + len(mates[1])
    assert np.array_equal(alone[:79], together[first : first + 79])
    # Then one step in which the others bring several rows each, as verification of drafts does.
    steps = [[5, 6, 7], [8], [PROMPT[79]], [9, 10], [11, 12, 13, 14]]
    runs = [
        Run(tokens, len(sequence), table, len(tokens))
        for tokens, sequence, table in zip(steps, sequences, tables, strict=True)
    ]
    logits = model.logits(RowBatch.from_runs(runs), cache)
    assert np.array_equal(alone[79], logits[4])


def test_overwritten_draft_slots_leave_no_trace(model, cache) -> None:
    clean = in_chunks(model, cache, PROMPT[:75], [70, 5])
    pages = cache.allocate(80)
    model.logits(RowBatch.from_runs([Run(PROMPT[:70], 0, pages, 0)]), cache)
    model.logits(RowBatch.from_runs([Run([1, 2, 3, 4, 5, 6], 70, pages, 6)]), cache)  # refused drafts
    again = model.logits(RowBatch.from_runs([Run(PROMPT[70:75], 70, pages, 5)]), cache)
    assert np.array_equal(clean[70:], again)


def test_another_token_changes_the_bits(model, cache) -> None:
    """The control: equality above would be worthless if nothing ever differed."""
    changed = [*PROMPT[:40], PROMPT[40] + 1, *PROMPT[41:]]
    before, after = in_chunks(model, cache, PROMPT, [150]), in_chunks(model, cache, changed, [150])
    assert np.array_equal(before[:40], after[:40])
    assert not np.array_equal(before[-1], after[-1])
