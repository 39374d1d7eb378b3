"""Compiles every kernel once, so that no request waits for a compiler: `python -m stages.engine.warm MODEL`.

The compiled code lands in numba's cache directory (NUMBA_CACHE_DIR), which all processes of a home share.
"""

import sys
from pathlib import Path

import numpy as np

from kv_store.codecs.registry import CODECS
from stages.engine.config import ModelConfig, open_gguf
from stages.engine.fingerprint import fingerprint
from stages.engine.gguf_weights import GgufWeights
from stages.engine.model import Model
from stages.engine.sampling import SamplingSpec, TokenHistory, sample
from stages.engine.weights import load_weights

# Together they pass through every loop of the sampler.
_SPECS = (
    SamplingSpec(seed=0, temperature=0.0, logprobs=2, logit_bias=((0, 1.0),)),
    SamplingSpec(seed=0, top_k=5, top_p=0.9, min_p=0.1, repetition_penalty=1.1, presence_penalty=0.1),
)


def main() -> None:
    """Load the model, compute its fingerprint with every codec, sample."""
    reader = open_gguf(Path(sys.argv[1]))
    config = ModelConfig.from_gguf(reader)
    model = Model(load_weights(GgufWeights(reader, config), config))
    for codec in CODECS:
        fingerprint(Path(sys.argv[1]), model, codec)
    logits = np.linspace(0, 1, config.vocab_size, dtype=np.float32)
    for spec in _SPECS:
        sample(logits, spec, 0, TokenHistory.of((1, 2), (3,)))


if __name__ == "__main__":
    main()
