"""Marks of stacks at a pool: of processes that live, whatever processes they are."""

import errno
import fcntl
import subprocess
import sys
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from kv_store.errors import PoolUnavailable
from kv_store.pool import FilePool
from stages.common.pool_mark import MARKS_FILE, PoolMark

QUOTA_BYTES = 1 << 20
HOLDER = """
import sys
from pathlib import Path
from stages.common.pool_mark import PoolMark
with PoolMark(Path(sys.argv[1]), sys.argv[2]):
    print("set", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    FilePool.open(tmp_path / "pool", QUOTA_BYTES).close()
    return tmp_path / "pool"


def test_processes_of_one_stack_are_alone_together(directory: Path) -> None:
    with PoolMark(directory, "a") as first, PoolMark(directory, "a") as second:
        assert first.is_alone()
        assert second.is_alone()


def test_another_stack_is_seen_for_as_long_as_it_has_a_mark(directory: Path) -> None:
    with PoolMark(directory, "a") as ours:
        with PoolMark(directory, "b") as theirs:
            assert not ours.is_alone()
            assert not theirs.is_alone()
        assert ours.is_alone()


def test_a_mark_ends_with_its_process(directory: Path) -> None:
    with PoolMark(directory, "a") as ours:
        other = subprocess.Popen(
            [sys.executable, "-c", HOLDER, str(directory), "b"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=Path(__file__).parents[3],
        )
        assert other.stdout is not None
        assert other.stdin is not None
        assert other.stdout.readline() == b"set\n"
        assert not ours.is_alone()
        other.kill()
        other.wait(20)
        assert ours.is_alone()
        other.stdin.close()
        other.stdout.close()


def test_the_file_is_no_blob_and_takes_no_quota(directory: Path) -> None:
    with FilePool.open(directory, QUOTA_BYTES) as pool, PoolMark(directory, "a"):
        assert (directory / MARKS_FILE).stat().st_mode & 0o777 == 0o600
        assert pool.names() == []
        assert pool.usage().used_bytes == 0


def test_without_such_locks_nobody_is_alone(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(fcntl, "fcntl", refuse)
    with capture_logs() as lines, PoolMark(directory, "a") as ours:
        assert not ours.is_alone()
    assert [line["event"] for line in lines] == ["pool_not_marked"]


def test_a_link_in_its_place_is_refused(directory: Path, tmp_path: Path) -> None:
    (directory / MARKS_FILE).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(PoolUnavailable, match=MARKS_FILE):
        PoolMark(directory, "a")
    assert not (tmp_path / "elsewhere").exists()
