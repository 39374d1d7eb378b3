"""Model files: from a name or a path to a GGUF file, and whether that file can be served at all.

Owns the list of known models and the header check. Knows nothing about downloads, tensors or tokenizers:
it reads a header in milliseconds and no weight, so that a wrong file is refused before any process starts.
"""

import re
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Literal

from pipeline.errors import SluiceError
from pipeline.gguf_header import GgufHeader, HeaderError, read_header

ARCHITECTURES = ("llama",)
TENSOR_TYPES = ("F32", "Q4_1", "Q8_0")  # those the engine's weight loader reads


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
    size = _regular_size(path)
    try:
        with path.open("rb") as file:
            header = read_header(file, size)
        _check_tensors(header, size)
    except HeaderError as error:
        raise ModelFileError(path, str(error)) from error
    except OSError as error:
        raise ModelFileError(path, f"cannot be read: {error.strerror}") from error
    return GgufSummary(header.architecture or "", len(header.tensors), size)


def _check_tensors(header: GgufHeader, file_bytes: int) -> None:
    if header.architecture not in ARCHITECTURES:
        raise HeaderError(
            f"holds a model of architecture {header.architecture!r}; only {', '.join(ARCHITECTURES)} can be served"
        )
    if not header.tensors:
        raise HeaderError("holds no tensors")
    for tensor in header.tensors:
        if tensor.type_name not in TENSOR_TYPES:
            raise HeaderError(
                f"tensor {tensor.name} is {tensor.type_name}; only {', '.join(TENSOR_TYPES)} can be served"
            )
        end = header.data_offset + tensor.offset + tensor.num_bytes()
        if end > file_bytes:
            raise HeaderError(f"is cut short: it has {file_bytes} bytes, tensor {tensor.name} ends at byte {end}")


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
    try:
        status = path.stat()
    except OSError as error:
        raise ModelFileError(path, f"cannot be read: {error.strerror}") from error
    if not stat.S_ISREG(status.st_mode):
        raise ModelFileError(path, "is not a file")
    return status.st_size
