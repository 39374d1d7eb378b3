"""An engine inside a measuring process, without queues: the model, and the file it came from.

Importing it loads torch and numba, so it comes after `prepare_environment`. Knows nothing about measurements.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numba
import torch

from stages.engine.arithmetic import ARITHMETIC_VERSION
from stages.engine.config import ModelConfig
from stages.engine.engine import load_model
from stages.engine.gguf_weights import GgufWeights
from stages.engine.model import Model
from stages.gguf.file import GgufFile


@dataclass(frozen=True, slots=True)
class Offline:
    """What a measurement computes with; `source` has the weights as the file gives them."""

    config: ModelConfig
    source: GgufWeights
    model: Model
    model_sha256: str


@contextmanager
def offline(path: Path, weight_cache: Path, num_threads: int) -> Iterator[Offline]:
    """Load the model for this thread, which is the one that may compute; the file is open until the end.

    Raises:
        GgufError: the file cannot be read, or holds a model the engine cannot run.
    """
    torch.set_num_threads(num_threads)
    numba.set_num_threads(min(num_threads, numba.get_num_threads()))
    model, digest = load_model(path, weight_cache)
    with GgufFile.open(path) as file:
        yield Offline(model.config, GgufWeights(file, model.config), model, digest)


def arithmetic() -> dict[str, object]:
    """Return what decides bits and speed of this process's engine, for a record."""
    return {
        "arithmetic_version": ARITHMETIC_VERSION,
        "instruction_set": torch.backends.cpu.get_cpu_capability(),
        "num_threads": torch.get_num_threads(),
    }
