"""A quality measurement from a model's file to its record: loads, measures, and says what came out.

Owns the record's fields and the table. Importing it loads torch and numba, so it comes after
`prepare_environment`.
"""

import hashlib
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from kv_store.codecs.base import Codec
from ops.downloads.datasets import SHAREGPT, token_windows
from ops.measuring import markdown_table, measured_on
from ops.offline import Offline, arithmetic, offline
from ops.quality.divergence import BOOTSTRAP_SEED, LEVEL, RESAMPLES, Summary
from ops.quality.measure import measure
from stages.engine.reference import ReferenceModel
from stages.text.tokenizer import Tokenizer
from stages.text.vocabulary import Vocabulary

WINDOW_TOKENS = 512


@dataclass(frozen=True, slots=True)
class Plan:
    """What to measure."""

    model_name: str
    model_path: Path
    weight_cache: Path
    dataset_path: Path
    codecs: Sequence[Codec]
    num_tokens: int
    num_threads: int


def run(plan: Plan) -> tuple[dict[str, object], str]:
    """Measure, and return the record and the table."""
    tokenizer = Tokenizer(Vocabulary.from_gguf(plan.model_path))
    windows = token_windows(plan.dataset_path, tokenizer, plan.num_tokens, WINDOW_TOKENS)
    with offline(plan.model_path, plan.weight_cache, plan.num_threads) as engine:
        summaries = _measure(plan, engine, windows)
    return _record(plan, engine, windows, summaries), table(summaries)


def table(summaries: dict[str, Summary]) -> str:
    """Return the figures of each codec as a table."""
    header = ("weights + KV", "mean KL", "95 % interval", "p99 KL", "top-1 agreement", "tokens")
    rows = [
        (
            "int8 + exact KV" if name == "raw" else f"int8 + {name}",
            f"{found.mean_kl:.4f}",
            f"{found.mean_kl_low:.4f} to {found.mean_kl_high:.4f}",
            f"{found.p99_kl:.4f}",
            f"{100 * found.top1_agreement:.1f} %",
            f"{found.num_tokens}",
        )
        for name, found in summaries.items()
    ]
    return markdown_table(header, rows)


def _measure(plan: Plan, engine: Offline, windows: list[list[int]]) -> dict[str, Summary]:
    reference = ReferenceModel(engine.source, engine.config)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(file=sys.stderr)) as progress:
        task = progress.add_task(f"windows of {WINDOW_TOKENS} tokens", total=len(windows))
        found = measure(reference, engine.model, plan.codecs, windows, lambda: progress.advance(task))
    return {name: Summary.of(divergences) for name, divergences in found.items()}


def _record(plan: Plan, engine: Offline, windows: list[list[int]], summaries: dict[str, Summary]) -> dict[str, object]:
    token_ids = np.array(windows, "<i4").tobytes()
    return {
        "model": plan.model_name,
        "model_sha256": engine.model_sha256,
        "reference": "the file's weights in fp32, no cache",
        "dataset": {
            "requirement": SHAREGPT.requirement,
            "wheel_sha256": SHAREGPT.wheel_sha256,
            "num_tokens": sum(map(len, windows)),
            "window_tokens": WINDOW_TOKENS,
            "token_ids_sha256": hashlib.sha256(token_ids).hexdigest(),
        },
        "interval": {"level": LEVEL, "resampled": "windows", "resamples": RESAMPLES, "seed": BOOTSTRAP_SEED},
        "measured_on": measured_on(),
        "engine": arithmetic(),
        "codecs": {name: asdict(summary) for name, summary in summaries.items()},
    }
