"""Keeps folded weights on disk, because folding them takes ten times as long as reading them back.

One safetensors file per model and arithmetic version. It appears complete or not at all; one that cannot be read is
made again. Owns the files under its directory.
"""

import os
import tempfile
from pathlib import Path

import numpy as np
import structlog
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from stages.engine.arithmetic import ARITHMETIC_VERSION
from stages.engine.config import ModelConfig
from stages.engine.gguf_weights import GgufWeights
from stages.engine.weights import ModelWeights

log = structlog.get_logger("engine")


def load_or_fold(source: GgufWeights, config: ModelConfig, model_digest: str, directory: Path) -> ModelWeights:
    """Weights of the model with that SHA-256, folded now if they are not in the directory yet."""
    path = directory / f"{model_digest[:32]}-{ARITHMETIC_VERSION}.safetensors"
    if path.exists():
        try:
            return ModelWeights.from_arrays(dict(load_file(path)), config.num_layers)
        except (SafetensorError, KeyError, OSError) as error:
            log.warning("weight_cache_unreadable", path=str(path), reason=str(error))
    weights = ModelWeights.fold(source, config)
    try:
        _save(weights, path)
    except OSError as error:
        log.warning("weight_cache_not_written", path=str(path), reason=str(error))  # a full disk only costs time
    return weights


def _save(weights: ModelWeights, path: Path) -> None:
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=".tmp-")
    os.close(descriptor)
    temporary = Path(name)
    try:
        save_file({name: np.ascontiguousarray(array) for name, array in weights.arrays().items()}, temporary)
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    model_digest = path.name.rsplit("-", 1)[0]
    for old in path.parent.glob(f"{model_digest}-*.safetensors"):
        if old != path:
            old.unlink(missing_ok=True)  # of an earlier arithmetic version
