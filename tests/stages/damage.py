"""What may happen to a blob between its writer and its reader."""

from collections.abc import Callable
from pathlib import Path

Damage = Callable[[Path, str, str], None]
"""Called with the pool's directory, the blob to damage, and another one."""


def delete(pool: Path, name: str, _: str) -> None:
    (pool / name).unlink()


def truncate(pool: Path, name: str, _: str) -> None:
    data = (pool / name).read_bytes()
    replace(pool / name, data[: len(data) // 2])


def swap(pool: Path, name: str, other: str) -> None:
    first, second = (pool / name).read_bytes(), (pool / other).read_bytes()
    replace(pool / name, second)
    replace(pool / other, first)


def flip_a_bit_of_the_payload(pool: Path, name: str, _: str) -> None:
    data = bytearray((pool / name).read_bytes())
    data[-len(data) // 3] ^= 0x10
    replace(pool / name, bytes(data))


def flip_a_bit_of_the_header(pool: Path, name: str, _: str) -> None:
    data = bytearray((pool / name).read_bytes())
    data[20] ^= 1
    replace(pool / name, bytes(data))


def replace(path: Path, data: bytes) -> None:
    """Put other bytes in the place of a file, as another file: mapped readers keep the old one."""
    path.unlink()
    path.write_bytes(data)
    path.chmod(0o600)


DAMAGES = (delete, truncate, swap, flip_a_bit_of_the_payload, flip_a_bit_of_the_header)
