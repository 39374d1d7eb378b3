"""Model files: from a name or a path to a GGUF file, and whether that file can be served at all.

Owns the list of known models. Knows nothing about downloads, tensors or tokenizers: it reads a header in
milliseconds and no weight, so that a wrong file is refused before any process starts. What it raises belongs to
pipeline's errors, so the engine, which knows nothing of pipeline, opens files by itself.
"""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Literal

from pipeline.errors import SluiceError
from stages.gguf.errors import GgufError
from stages.gguf.file import GgufFile, regular_size
from stages.gguf.supported import require_supported


@dataclass(frozen=True, slots=True)
class KnownModel:
    """A model that has a name; the digest is of the GGUF file."""

    name: str
    sha256: str
    size_bytes: int


KNOWN_MODELS: Mapping[str, KnownModel] = MappingProxyType(
    {
        model.name: model
        for model in (
            KnownModel(
                name="smollm2-135m-instruct",
                sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
                size_bytes=98_362_432,
            ),
        )
    }
)


class ModelFileError(SluiceError):
    """A model file is missing, damaged, or of a kind that cannot be served; says which and why."""

    code = "model_file"

    def __init__(self, path: Path, problem: str) -> None:
        super().__init__(f"{path}: {problem}")
        self.path = path
        self.problem = problem


class UnknownModel(SluiceError):  # noqa: N818 - reads as the fact it states
    """A name is neither a known model nor a file; lists the names there are."""

    code = "unknown_model"

    def __init__(self, name: str, known: tuple[str, ...]) -> None:
        super().__init__(
            f"model {name!r} is not known; known: {', '.join(known)}. "
            f"A path to a GGUF file works as well (with a / or ending in .gguf)"
        )
        self.name = name
        self.known = known


@dataclass(frozen=True, slots=True)
class ModelEntry:
    """One line of the list of models."""

    name: str
    path: Path
    state: Literal["ready", "missing", "damaged"]
    size_bytes: int


@dataclass(frozen=True, slots=True)
class GgufSummary:
    """What the header says."""

    architecture: str
    num_tensors: int
    size_bytes: int


def model_path(name: str, home: Path) -> Path:
    """Return where the file of a named model lies, or will lie."""
    return home / "models" / f"{name}.gguf"


def resolve(name_or_path: str, home: Path) -> Path:
    """Return the file of a model: a bare word is a name, anything with a / or ending in .gguf is a path.

    A file that someone put into home/models is known by its name. Looks at the file's size only; the header
    is `check_gguf`'s, the digest is checked when the file is pulled.

    Raises:
        UnknownModel: no such name.
        ModelFileError: the file is not there, or not as long as it must be.
    """
    if "/" in name_or_path or name_or_path.endswith(".gguf"):
        path = Path(name_or_path).expanduser()
        _regular_size(path)
        return path
    path = model_path(name_or_path, home)
    known = KNOWN_MODELS.get(name_or_path)
    if known is None:
        if not _is_name(name_or_path) or not path.is_file():
            raise UnknownModel(name_or_path, tuple(entry.name for entry in list_models(home)))
        return path
    if not path.exists():
        raise ModelFileError(path, f"is not there yet; run `sluice models pull {known.name}`")
    if (size := _regular_size(path)) != known.size_bytes:
        raise ModelFileError(
            path, f"has {size} bytes instead of {known.size_bytes}; run `sluice models pull {known.name}`"
        )
    return path


def list_models(home: Path) -> list[ModelEntry]:
    """Return the known models and the files someone put into home/models, by name; judged by size alone."""
    names = set(KNOWN_MODELS) | {path.stem for path in (home / "models").glob("*.gguf") if _is_name(path.stem)}
    return [_entry(name, home) for name in sorted(names)]


def check_gguf(path: Path) -> GgufSummary:
    """Refuse a file that cannot be served, from its header alone: foreign, cut short, or of another kind.

    Raises:
        ModelFileError: with the path and what is wrong.
    """
    with _explained(), GgufFile.open(path) as file:
        return GgufSummary(require_supported(file), len(file.tensors), regular_size(path))


def _entry(name: str, home: Path) -> ModelEntry:
    path = model_path(name, home)
    known = KNOWN_MODELS.get(name)
    if not path.is_file():
        return ModelEntry(name, path, "missing", known.size_bytes if known else 0)
    size = path.stat().st_size
    damaged = known is not None and size != known.size_bytes
    return ModelEntry(name, path, "damaged" if damaged else "ready", size)


def _is_name(text: str) -> bool:
    return re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}", text) is not None


def _regular_size(path: Path) -> int:
    with _explained():
        return regular_size(path)


@contextmanager
def _explained() -> Iterator[None]:
    try:
        yield
    except GgufError as error:
        raise ModelFileError(error.path, error.problem) from error
