"""Where the time of a request went, as the benchmarks name it: milliseconds, and shares of the whole.

Owns the labels. Knows nothing about boundaries; the phases are pipeline/timeline.py's.
"""

from collections.abc import Iterable, Mapping
from types import MappingProxyType

from pipeline.messages import Stamp
from pipeline.timeline import phases_us

PHASES: Mapping[str, str] = MappingProxyType(
    {
        "queue_tokenizer": "tokenizer queue",
        "tokenizer": "tokenizing",
        "queue_prefill": "prefill queue",
        "prefill": "prefill",
        "write": "blob writing",
        "queue_compressor": "compressor queue",
        "compressor": "packing",
        "queue_decode": "decode slot",
        "load": "KV loading",
        "decode": "decode",
    }
)
"""Phase to its label, in the order in which a request meets them."""

HAND_OVER = ("blob writing", "compressor queue", "packing", "KV loading")
"""What disaggregation costs a request; waiting for a decode slot would be there without it, and is apart."""
SLOT = "decode slot"


def phases_ms(stamps: Iterable[Stamp]) -> dict[str, float]:
    """Return the length of each phase that a request went through, by label; their sum is its whole time."""
    return {PHASES[phase]: duration_us / 1000 for phase, duration_us in phases_us(stamps).items()}


def share(phases: Mapping[str, float], names: Iterable[str]) -> float:
    """Return which part of a request's time those phases took."""
    total = sum(phases.values())
    return sum(phases.get(name, 0.0) for name in names) / total if total else 0.0
