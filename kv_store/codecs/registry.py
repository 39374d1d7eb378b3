"""Codec by name or by number. A new codec is one file beside this one and one line here."""

from kv_store.codecs.base import Codec
from kv_store.codecs.fp8_e4m3 import Fp8E4m3
from kv_store.codecs.int8 import Int8
from kv_store.codecs.raw import Raw

CODECS: tuple[Codec, ...] = (Raw(), Fp8E4m3(), Int8())


class UnknownCodecError(ValueError):
    """No codec has that name or number; the message lists those there are."""


def codec_named(name: str) -> Codec:
    """Codec `name`.

    Raises:
        UnknownCodecError: No such codec.
    """
    for codec in CODECS:
        if codec.name == name:
            return codec
    raise UnknownCodecError(f"KV codec {name!r} is unknown; known are {', '.join(c.name for c in CODECS)}")


def codec_numbered(codec_id: int) -> Codec:
    """Codec with that number in a blob header.

    Raises:
        UnknownCodecError: No such codec.
    """
    for codec in CODECS:
        if codec.codec_id == codec_id:
            return codec
    raise UnknownCodecError(f"KV codec number {codec_id} is unknown; known are {[c.codec_id for c in CODECS]}")
