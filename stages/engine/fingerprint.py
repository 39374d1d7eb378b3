"""What has to be equal before two processes may work on the same request, and the digest of it.

Names each part, so that a refusal can say which one differs. The probe is the digest of real logits: it catches
whatever the other parts do not know about, such as another build of a library.
"""

import hashlib
from dataclasses import dataclass

import numpy as np
import torch

from kv_store.codecs.base import Codec
from stages.engine.arithmetic import ARITHMETIC_VERSION
from stages.engine.batch import RowBatch, Run
from stages.engine.kv_cache import PagedKvCache, pages_for
from stages.engine.model import Model

_PROBE_TOKENS = 80  # crosses a page, and both a tile of rows and a rest of one
_PROBE_STRIDE = 7919  # a prime: spreads the probe's ids over any vocabulary


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """Named parts of what decides a request's bits."""

    model: str
    codec: str
    layout: str
    arithmetic: str
    instruction_set: str
    probe: str

    def parts(self) -> dict[str, str]:
        """Name to value, for the handshake."""
        return {name: getattr(self, name) for name in self.__slots__}

    def digest(self) -> bytes:
        """32 bytes that stand for all parts in blob headers and content addresses."""
        lines = "\n".join(f"{name}={value}" for name, value in sorted(self.parts().items()))
        return hashlib.sha256(lines.encode()).digest()


def fingerprint(model_digest: str, model: Model, codec: Codec) -> Fingerprint:
    """Fingerprint of an engine that is ready to run; `model_digest` is that of its file."""
    return Fingerprint(
        model=model_digest,
        codec=codec.name,
        layout=model.config.kv_layout.fingerprint(),
        arithmetic=str(ARITHMETIC_VERSION),
        instruction_set=torch.backends.cpu.get_cpu_capability(),
        probe=_probe(model, codec),
    )


def _probe(model: Model, codec: Codec) -> str:
    """Digest of the logits after a fixed prompt, computed in two chunks so that cached KV is part of it."""
    cache = PagedKvCache(model.config.kv_layout, codec, pages_for(_PROBE_TOKENS))
    token_ids = np.arange(1, _PROBE_TOKENS + 1) * _PROBE_STRIDE % model.config.vocab_size
    pages = cache.allocate(_PROBE_TOKENS)
    first = Run(token_ids[:-5].tolist(), 0, pages, 1)
    second = Run(token_ids[-5:].tolist(), _PROBE_TOKENS - 5, pages, 5)
    digest = hashlib.sha256()
    for run in (first, second):
        digest.update(model.logits(RowBatch.from_runs([run]), cache).tobytes())
    return digest.hexdigest()
