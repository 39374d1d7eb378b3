"""Folded weights on disk: the same bits, whole or not at all."""

import numpy as np
import pytest

from stages.engine.weight_cache import load_or_fold
from stages.engine.weights import ModelWeights

DIGEST = "ab" * 32


class CountingSource:
    """The real file, counting what is read from it."""

    def __init__(self, source) -> None:
        self._source, self.reads = source, 0

    def __getattr__(self, name: str):
        self.reads += 1
        return getattr(self._source, name)


def equal(one: ModelWeights, other: ModelWeights) -> bool:
    ours, theirs = one.arrays(), other.arrays()
    return ours.keys() == theirs.keys() and all(np.array_equal(ours[name], theirs[name]) for name in ours)


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return tmp_path_factory.mktemp("weights")


def test_a_second_load_gives_the_same_weights_without_the_model_file(source, directory) -> None:
    weights, config = source
    first = load_or_fold(weights, config, DIGEST, directory)
    counting = CountingSource(weights)
    assert equal(first, load_or_fold(counting, config, DIGEST, directory))  # type: ignore[arg-type]
    assert counting.reads == 0


def test_a_truncated_cache_is_made_again(source, directory) -> None:
    weights, config = source
    first = load_or_fold(weights, config, DIGEST, directory)
    [path] = directory.glob("*.safetensors")
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    assert equal(first, load_or_fold(weights, config, DIGEST, directory))
    assert [file.name for file in directory.iterdir()] == [path.name]
