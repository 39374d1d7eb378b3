"""Where compiled kernels are kept: a directory per state of their sources.

Numba looks only at the file of the function it compiled, not at what that function calls, so a changed helper would go
on being used in its old form. The name therefore holds a digest of every source that can reach a kernel. Imports
neither numba nor torch: the directory must be in the environment (NUMBA_CACHE_DIR) before numba is.
"""

import hashlib
from pathlib import Path

_ENGINE = Path(__file__).parent
_SOURCES = (_ENGINE, _ENGINE.parents[1] / "kv_store")


def kernel_cache(home: Path) -> Path:
    """The directory for this state of the sources, under a home."""
    digest = hashlib.sha256()
    for root in _SOURCES:
        for source in sorted(root.rglob("*.py")):
            digest.update(source.relative_to(root.parent).as_posix().encode() + b"\0" + source.read_bytes() + b"\0")
    return home / "cache" / "numba" / digest.hexdigest()[:16]
