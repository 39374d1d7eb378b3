"""Settings: read once from SLUICE_* variables in `__main__`, then passed on as a value.

Owns names, defaults, units and bounds. Knows nothing about who uses them. A variable that is not known
stops the start: a typo must not silently mean the default.
"""

import difflib
import hashlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import Field, ValidationError, field_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from pipeline.errors import SettingsError
from pipeline.keys import LEASE_S, MAX_QUEUE, RESULT_TTL_S
from pipeline.logs import LogLevel

PREFIX = "SLUICE_"
GIB = 1024**3


class Settings(BaseSettings):
    """All settings of all processes; the name of a variable is SLUICE_ and the field in capitals."""

    model_config: ClassVar[SettingsConfigDict] = SettingsConfigDict(
        env_prefix=PREFIX, env_ignore_empty=True, extra="forbid", frozen=True
    )

    home: Annotated[
        Path,
        Field(description="Directory for models, caches, logs and the embedded server's data."),
    ] = Path("~/.sluice")
    redis_url: Annotated[
        str | None,
        Field(description="redis://, rediss:// or unix:// address; without one a server is embedded."),
    ] = None
    namespace: Annotated[
        str,
        Field(pattern=r"^[A-Za-z0-9_-]{1,64}$", description="Prefix of all keys; two stacks differ in it."),
    ] = "sluice"
    model: Annotated[str, Field(min_length=1, description="Name of a model, or path to a GGUF file.")] = (
        "smollm2-135m-instruct"
    )
    kv_codec: Annotated[
        Literal["fp8_e4m3", "int8", "raw"],
        Field(description="How KV rows are stored; fixed for the whole stack."),
    ] = "fp8_e4m3"
    chunk_tokens: Annotated[
        int, Field(ge=64, le=512, multiple_of=64, description="Tokens of a prompt that one blob holds.")
    ] = 256
    kv_pool_dir: Annotated[
        Path | None,
        Field(description="Directory of KV blobs, in memory; without one a directory in /dev/shm per home."),
    ] = None
    kv_pool_bytes: Annotated[
        int, Field(ge=1024**2, description="Most bytes of KV blobs at a time; prefill waits when it is full.")
    ] = 2 * GIB
    zstd_kv: Annotated[bool, Field(description="Compress sealed blobs with zstd where it pays.")] = False
    seal_in_prefill: Annotated[
        bool, Field(description="Let prefill seal its blobs itself, without the compressor's hop.")
    ] = False
    max_model_len: Annotated[
        int | None,
        Field(ge=2, description="Most tokens of prompt and output together; without it the model's own."),
    ] = None
    max_num_seqs: Annotated[
        int, Field(ge=1, le=1024, description="Requests that one decode process steps at a time.")
    ] = 16
    num_pages: Annotated[int, Field(ge=2, description="Pages of 64 tokens in the KV cache of one decode process.")] = (
        640
    )
    num_speculative_tokens: Annotated[
        int, Field(ge=0, le=64, description="Most tokens a drafter proposes per step; 0 turns it off.")
    ] = 4
    engine_threads: Annotated[
        int, Field(ge=1, le=256, description="Threads of one engine; all engines together: at most the cores.")
    ] = 1
    default_max_tokens: Annotated[
        int, Field(ge=1, description="Output tokens of a request that does not say how many.")
    ] = 256
    lease_s: Annotated[
        float, Field(ge=0.05, le=3600, description="Seconds after which a dead process loses its work.")
    ] = LEASE_S
    result_ttl_s: Annotated[int, Field(ge=1, description="Seconds that a result stays readable after its end.")] = (
        RESULT_TTL_S
    )
    durability: Annotated[
        Literal["everysec", "strict"],
        Field(
            description="When a request counts as accepted: everysec when the server has it, whose crash may take the "
            "last second's; strict when its disk has it."
        ),
    ] = "everysec"
    max_queue: Annotated[int, Field(ge=1, description="Requests of one priority that may wait for prefill.")] = (
        MAX_QUEUE
    )
    max_decode_queue: Annotated[
        int,
        Field(
            ge=1,
            le=4096,
            description="Requests between prefill and their end in decode; at most twice what decode has slots.",
        ),
    ] = 64
    keep_kv: Annotated[
        bool,
        Field(
            description="Keep a request's KV blobs until it ends, and add to them, so that whoever takes it over need "
            "not compute it again."
        ),
    ] = True
    log_level: Annotated[LogLevel, Field(description="Least severe event that is logged.")] = "info"
    fault: Annotated[
        str | None, Field(description="For tests: faults that processes inject into themselves (pipeline/faults.py).")
    ] = None
    fault_dir: Annotated[
        Path | None, Field(description="For tests: directory in which faults that were injected are counted.")
    ] = None

    @field_validator("home", "kv_pool_dir", "fault_dir")
    @classmethod
    def _absolute(cls, path: Path | None) -> Path | None:
        return None if path is None else path.expanduser().absolute()

    @property
    def pool_dir(self) -> Path:
        """The directory of KV blobs: `kv_pool_dir`, or one per user and home in shared memory."""
        if self.kv_pool_dir is not None:
            return self.kv_pool_dir
        digest = hashlib.sha256(os.fsencode(self.home)).hexdigest()[:12]
        return Path(f"/dev/shm/sluice-{os.getuid()}-{digest}")  # noqa: S108 - the pool checks owner and mode

    @property
    def weight_cache(self) -> Path:
        """The directory of weights as the engine multiplies with them."""
        return self.home / "cache" / "weights"

    def environment(self) -> dict[str, str]:
        """Return the variables that give a child process exactly these settings."""
        values = self.model_dump(mode="json", exclude_none=True)
        return {variable(name): str(value) for name, value in values.items()}


def load_settings(**overrides: object) -> Settings:
    """Return the settings of this process's environment, with overrides (from a command line) on top.

    Raises:
        SettingsError: an unknown SLUICE_* variable, or a value outside its bounds; names the variable.
    """
    refuse_unknown(os.environ)
    try:
        return Settings(**overrides)  # pyright: ignore[reportArgumentType] - validated right here
    except ValidationError as error:
        wrong = error.errors(include_url=False, include_context=False)[0]
    name = variable(str(wrong["loc"][0])) if wrong["loc"] else "settings"
    raise SettingsError(f"{name}={wrong['input']!r}: {wrong['msg']}")


def refuse_unknown(environ: Mapping[str, str]) -> None:
    """Raise SettingsError for the first SLUICE_* variable that no setting has."""
    known = [variable(field) for field in Settings.model_fields]
    for name in sorted(environ):
        if not name.upper().startswith(PREFIX) or name.upper() in known:
            continue
        near = difflib.get_close_matches(name.upper(), known, n=1, cutoff=0)
        raise SettingsError(f"{name} is not a setting; the nearest one is {near[0]}")


def variable(field: str) -> str:
    """Return the environment variable of a field."""
    return PREFIX + field.upper()
