"""What tells one model file from another, whatever they are called: processes of a stack must agree on it."""

import hashlib
from pathlib import Path


def file_digest(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal; reads all of it."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
