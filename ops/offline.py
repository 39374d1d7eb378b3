"""An engine inside a measuring process, without queues: the model and the file it came from.

Importing it loads torch and numba, so it comes after `prepare_environment`. Knows nothing about measurements.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numba
import torch

from stages.engine.arithmetic import ARITHMETIC_VERSION
from stages.engine.config import ModelConfig, open_gguf
from stages.engine.gguf_weights import GgufWeights
from stages.engine.model import Model
from stages.engine.weights import load_weights


@dataclass(frozen=True, slots=True)
class Offline:
    """What a measurement computes with."""

    config: ModelConfig
    source: GgufWeights
    model: Model

    @classmethod
    def load(cls, path: Path, num_threads: int, on_layer: Callable[[int, int], None] | None = None) -> "Offline":
        """Load the model for this thread, which is the one that may compute.

        Raises:
            UnsupportedModelError: the file holds a model the engine cannot run.
        """
        torch.set_num_threads(num_threads)
        numba.set_num_threads(min(num_threads, numba.get_num_threads()))
        reader = open_gguf(path)
        config = ModelConfig.from_gguf(reader)
        source = GgufWeights(reader, config)
        return cls(config, source, Model(load_weights(source, config, on_layer)))

    @staticmethod
    def arithmetic() -> dict[str, object]:
        """Return what decides bits and speed, for a record."""
        return {
            "arithmetic_version": ARITHMETIC_VERSION,
            "instruction_set": torch.backends.cpu.get_cpu_capability(),
            "num_threads": torch.get_num_threads(),
        }
