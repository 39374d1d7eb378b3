"""One engine call: ragged rows of several sequences, without padding.

Rows of a sequence are neighbours in ascending position. Their KV is written before any of them attends, so one call
may hold a prompt chunk, the single next tokens of many sequences, and several drafted tokens to verify, all mixed.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Run:
    """Consecutive tokens of one sequence.

    Attributes:
        token_ids: Tokens to compute.
        start: Position of the first of them.
        block_table: Pages of the sequence, covering the last of them.
        num_logits: For how many of the last tokens logits are wanted.
    """

    token_ids: Sequence[int]
    start: int
    block_table: Sequence[int]
    num_logits: int


@dataclass(frozen=True, slots=True)
class RowBatch:
    """Runs laid out as rows. Shapes: token_ids, positions, sequences [R]; block_tables [S, pages]; logit_rows [n]."""

    token_ids: NDArray[np.int64]
    positions: NDArray[np.int64]
    sequences: NDArray[np.int64]
    block_tables: NDArray[np.int64]
    logit_rows: NDArray[np.int64]

    @classmethod
    def from_runs(cls, runs: Sequence[Run]) -> "RowBatch":
        """Lay runs out one after the other; logits come back in the same order."""
        lengths = [len(run.token_ids) for run in runs]
        ends = np.cumsum(lengths)
        tables = np.zeros((len(runs), max(len(run.block_table) for run in runs)), np.int64)
        for table, run in zip(tables, runs, strict=True):
            table[: len(run.block_table)] = run.block_table
        return cls(
            token_ids=np.concatenate([np.asarray(run.token_ids, np.int64) for run in runs]),
            positions=np.concatenate(
                [np.arange(run.start, run.start + n) for run, n in zip(runs, lengths, strict=True)]
            ),
            sequences=np.repeat(np.arange(len(runs)), lengths),
            block_tables=tables,
            logit_rows=np.concatenate(
                [np.arange(end - run.num_logits, end) for run, end in zip(runs, ends, strict=True)]
            ).astype(np.int64),
        )
