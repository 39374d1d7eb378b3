"""The fp32 path against an independent implementation, and the int8 path against the fp32 one."""

from pathlib import Path

import numpy as np
import pytest

from stages.engine.batch import RowBatch, Run
from stages.engine.reference import ReferenceModel

VALUES = Path(__file__).parents[2] / "reference" / "logits.npz"


@pytest.fixture(scope="module")
def reference(source) -> ReferenceModel:
    return ReferenceModel(*source)


@pytest.mark.parametrize("prompt", [0, 1, 2])
def test_fp32_logits_equal_those_of_transformers_within_a_thousandth(reference, prompt: int) -> None:
    with np.load(VALUES, allow_pickle=False) as values:
        token_ids, expected = values[f"token_ids_{prompt}"], values[f"logits_{prompt}"]
        vocabulary_ids, argmax = values["vocabulary_ids"], values[f"argmax_{prompt}"]
        normaliser = values[f"logsumexp_{prompt}"]
    logits = reference.logits(token_ids.astype(np.int64))[-2:]
    assert np.abs(logits[:, vocabulary_ids] - expected).max() < 1e-3
    assert logits.argmax(-1).tolist() == argmax.tolist()
    assert np.log(np.exp(logits.astype(np.float64)).sum(-1)) == pytest.approx(normaliser, abs=1e-3)


def test_int8_stays_close_to_fp32(reference, model, cache) -> None:
    """A coarse bound: the measured mean is 0.005 to 0.009 (docs/quality.md); a wrong kernel gives whole numbers."""
    with np.load(VALUES, allow_pickle=False) as values:
        token_ids = np.concatenate([values[f"token_ids_{prompt}"] for prompt in range(3)]).astype(np.int64)
    pages = cache.allocate(len(token_ids))
    logits = model.logits(RowBatch.from_runs([Run(token_ids.tolist(), 0, pages, len(token_ids))]), cache)
    cache.free(pages)
    expected, actual = log_softmax(reference.logits(token_ids)), log_softmax(logits)
    divergence = (np.exp(expected) * (expected - actual)).sum(-1)
    assert divergence.mean() < 0.03
    assert (expected.argmax(-1) == actual.argmax(-1)).mean() > 0.85


def log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits.astype(np.float64) - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
