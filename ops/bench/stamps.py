"""Where the time of a request went, from the stamps it carries.

Owns the phases, one between each boundary and the one before it. A boundary that every chunk passes counts when
the last chunk passed it, because that is what decode waits for.

    submitted | tokenizer queue | tokenizing | prefill queue | prefill | blob writing | compressor queue | packing
              | decode slot | KV loading | decode | finished
"""

from collections.abc import Iterable, Mapping
from types import MappingProxyType

from pipeline.messages import Stamp

PHASES: Mapping[str, str] = MappingProxyType(
    {
        "tokenizer_claimed": "tokenizer queue",
        "tokenized": "tokenizing",
        "prefill_claimed": "prefill queue",
        "prefill_computed": "prefill",
        "chunk_written": "blob writing",
        "compressor_claimed": "compressor queue",
        "sealed": "packing",
        "decode_claimed": "decode slot",
        "kv_loaded": "KV loading",
        "finished": "decode",
    }
)
"""Boundary to the phase that ends with it, in the order in which a request meets them."""

HAND_OVER = ("blob writing", "compressor queue", "packing", "KV loading")
"""What disaggregation costs a request; waiting for a decode slot would be there without it, and is apart."""
SLOT = "decode slot"


def phases_ms(stamps: Iterable[Stamp]) -> dict[str, float]:
    """Return the length of each phase that a request went through; their sum is first to last boundary.

    The first stamp of all, whatever its name, is the beginning. A clock that stepped back makes a phase empty,
    never negative.
    """
    passed_us: dict[str, int] = {}
    for stamp in stamps:
        passed_us[stamp.boundary] = max(stamp.at_us, passed_us.get(stamp.boundary, 0))
    at_us = min(passed_us.values(), default=0)
    phases: dict[str, float] = {}
    for boundary, phase in PHASES.items():
        if boundary in passed_us:
            next_us = max(at_us, passed_us[boundary])
            phases[phase] = (next_us - at_us) / 1000
            at_us = next_us
    return phases


def share(phases: Mapping[str, float], names: Iterable[str]) -> float:
    """Return which part of a request's time those phases took."""
    total = sum(phases.values())
    return sum(phases.get(name, 0.0) for name in names) / total if total else 0.0
