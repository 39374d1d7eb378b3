"""GPT-2's byte alphabet: one printable character per byte, in which byte-level BPE spells its tokens.

Knows nothing about any vocabulary. Source: bytes_to_unicode in GPT-2's encoder.py - printable Latin-1 stands
for itself, the 68 other bytes take the characters from U+0100 on, in order.
"""

from typing import Final

_PRINTABLE: Final = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))
_OTHERS: Final = tuple(byte for byte in range(0x100) if byte not in _PRINTABLE)

BYTE_OF: Final[dict[str, int]] = {chr(byte): byte for byte in _PRINTABLE} | {
    chr(0x100 + index): byte for index, byte in enumerate(_OTHERS)
}


def to_bytes(spelling: str) -> bytes:
    """Return the bytes a token stands for; a token with a foreign character stands for itself, as UTF-8."""
    try:
        return bytes([BYTE_OF[character] for character in spelling])
    except KeyError:
        return spelling.encode("utf-8")
