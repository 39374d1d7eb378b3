"""Prepares a home for its first stack: `python -m stages.engine.warm MODEL WEIGHT_CACHE`.

Folds the weights into the cache and compiles every kernel once, so that no request waits for either. The compiled
code lands in numba's cache directory (kernel_cache.py), which all processes of a home share.
"""

import sys
from pathlib import Path

import numpy as np

from kv_store.codecs.registry import CODECS
from stages.engine.engine import load_model
from stages.engine.fingerprint import fingerprint
from stages.engine.sampling import SamplingSpec, TokenHistory, sample
from stages.gguf.errors import GgufError

# Together they pass through every loop of the sampler.
_SPECS = (
    SamplingSpec(seed=0, temperature=0.0, logprobs=2, logit_bias=((0, 1.0),)),
    SamplingSpec(seed=0, top_k=5, top_p=0.9, min_p=0.1, repetition_penalty=1.1, presence_penalty=0.1),
)


def main() -> None:
    """Load the model, compute its fingerprint with every codec, sample."""
    try:
        model, digest = load_model(Path(sys.argv[1]), Path(sys.argv[2]))
    except GgufError as error:
        sys.exit(str(error))
    for codec in CODECS:
        fingerprint(digest, model, codec)
    logits = np.linspace(0, 1, model.config.vocab_size, dtype=np.float32)
    for spec in _SPECS:
        sample(logits, spec, 0, TokenHistory.of((1, 2), (3,)))


if __name__ == "__main__":
    main()
