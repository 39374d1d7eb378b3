"""What a message carries instead of KV: the name of a blob and how to recognise it.

It owns the rule for blob names. It knows nothing about files, and is all that most of the pipeline needs of
this package.
"""

import re
from typing import Final

from pydantic import BaseModel, ConfigDict, Field

from kv_store.errors import InvalidValue

# No dot and no slash: a name can neither leave the pool's directory nor reach the files the pool keeps there
# for itself.
NAME_PATTERN: Final = r"^[a-z0-9_]{8,80}$"
POOL_ID_PATTERN: Final = r"^[a-z0-9_-]{1,64}$"

_NAME: Final = re.compile(NAME_PATTERN)


class BlobRef(BaseModel):
    """Where one sealed blob lies, and which bytes it must have.

    `size_bytes` is the size of the whole file, header included. `crc32` is the checksum of the header, which
    holds the checksum of the payload: it tells a blob from any other, even from one with an equal payload.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    pool_id: str = Field(pattern=POOL_ID_PATTERN)
    name: str = Field(pattern=NAME_PATTERN)
    size_bytes: int = Field(gt=0, lt=2**63)
    crc32: int = Field(ge=0, lt=2**32)


def check_name(name: str) -> None:
    """Raise InvalidValue unless `name` may name a blob."""
    if not is_name(name):
        raise InvalidValue("name", name, f"a name that matches {NAME_PATTERN}")


def is_name(name: str) -> bool:
    """Whether `name` may name a blob."""
    return _NAME.fullmatch(name) is not None
