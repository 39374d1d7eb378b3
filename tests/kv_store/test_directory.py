import errno
import os
import socket
import stat
import threading
from pathlib import Path

import pytest

from kv_store.directory import PrivateDirectory, find_fault
from kv_store.errors import PoolBusy, PoolRefused, PoolUnavailable


def _open(path: Path, lock_timeout_s: float = 5.0) -> PrivateDirectory:
    return PrivateDirectory.open(path, lock_timeout_s)


def test_directory_is_created_for_its_owner_alone(pool_directory: Path) -> None:
    before = os.umask(0)
    try:
        _open(pool_directory / "deep").close()
    finally:
        os.umask(before)

    assert stat.S_IMODE((pool_directory / "deep").stat().st_mode) == 0o700


@pytest.mark.parametrize("mode", [0o750, 0o705, 0o701, 0o1777])
def test_directory_open_to_others_is_refused(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "loose"
    path.mkdir()
    path.chmod(mode)

    with pytest.raises(PoolRefused) as refusal:
        _open(path)

    assert (refusal.value.path, refusal.value.field) == (str(path), "mode")
    assert refusal.value.actual == f"{mode:04o}"


def test_directory_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "theirs"
    path.mkdir(mode=0o700)
    owner = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)

    with pytest.raises(PoolRefused, match=f"owner is uid {owner}, expected uid {owner + 1}"):
        _open(path)


def test_link_to_a_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to(tmp_path / "real")

    with pytest.raises(PoolRefused, match="type"):
        _open(tmp_path / "link")


def test_link_to_nowhere_is_refused_and_not_followed(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "target")

    with pytest.raises(PoolRefused, match="type"):
        _open(tmp_path / "link")

    assert not (tmp_path / "target").exists()


def test_file_in_place_of_the_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()

    with pytest.raises(PoolRefused, match="type"):
        _open(tmp_path / "file")


def test_directory_that_cannot_be_created_is_unavailable(tmp_path: Path) -> None:
    (tmp_path / "file").touch()

    with pytest.raises(PoolUnavailable) as refusal:
        _open(tmp_path / "file" / "below")

    assert refusal.value.errno == errno.ENOTDIR


def test_deleted_directory_is_unavailable(tmp_path: Path) -> None:
    directory = _open(tmp_path / "pool")
    (tmp_path / "pool").rmdir()

    with pytest.raises(PoolUnavailable, match="No such file"), directory.temporary(1):
        pass
    directory.close()


def test_closed_directory_refuses_and_closes_again(tmp_path: Path) -> None:
    directory = _open(tmp_path / "pool")
    directory.close()
    directory.close()

    with pytest.raises(PoolUnavailable) as refusal:
        directory.files()

    assert refusal.value.errno == errno.EBADF


def test_waiting_for_the_lock_ends(pool_directory: Path) -> None:
    holder, waiter = _open(pool_directory), _open(pool_directory, lock_timeout_s=0.02)

    with holder.locked(), pytest.raises(PoolBusy) as busy, waiter.locked():
        pass
    with waiter.locked():
        pass

    assert (busy.value.path, busy.value.waited_s) == (str(pool_directory), 0.02)
    holder.close()
    waiter.close()


def test_lock_excludes_threads_that_share_one_directory(pool_directory: Path) -> None:
    directory = _open(pool_directory)
    inside = 0
    seen: list[int] = []

    def enter() -> None:
        nonlocal inside
        for _ in range(20):
            with directory.locked():
                inside += 1
                seen.append(inside)
                inside -= 1

    threads = [threading.Thread(target=enter) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)

    assert seen == [1] * 80
    directory.close()


def test_lock_is_free_after_an_error(pool_directory: Path) -> None:
    directory = _open(pool_directory, lock_timeout_s=0.02)

    with pytest.raises(ZeroDivisionError), directory.locked():
        raise ZeroDivisionError

    with directory.locked():
        pass
    directory.close()


def test_listing_from_threads_misses_nothing(pool_directory: Path) -> None:
    directory = _open(pool_directory)
    names = {f"file_{index:04}" for index in range(300)}
    for name in names:
        (pool_directory / name).touch(0o600)
    counts: list[int] = []

    def count() -> None:
        counts.extend(len({name for name, _ in directory.files()} & names) for _ in range(10))

    threads = [threading.Thread(target=count) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)

    assert counts == [300] * 40
    directory.close()


def test_listing_holds_regular_files_only(tmp_path: Path) -> None:
    directory = _open(tmp_path / "pool")
    (tmp_path / "pool" / "file").write_bytes(b"12345")
    (tmp_path / "pool" / "link").symlink_to("file")
    (tmp_path / "pool" / "below").mkdir()
    os.mkfifo(tmp_path / "pool" / "fifo")

    assert [(name, status.st_size) for name, status in directory.files()] == [("file", 5)]
    directory.close()


def test_temporary_file_reserves_its_size_at_once_and_goes_when_not_sealed(pool_directory: Path) -> None:
    directory = _open(pool_directory)

    with directory.temporary(4096) as temporary:
        assert [(name, status.st_size) for name, status in directory.files()] == [(temporary.name, 4096)]

    assert directory.files() == []
    directory.close()


def test_sealed_file_keeps_its_bytes_and_is_the_owners_alone(pool_directory: Path) -> None:
    directory = _open(pool_directory)

    before = os.umask(0)
    try:
        with directory.temporary(6) as temporary:
            temporary.fill([memoryview(b"abc"), memoryview(b"def")])
            directory.seal(temporary, "sealed_1")
    finally:
        os.umask(before)

    path = pool_directory / "sealed_1"
    assert path.read_bytes() == b"abcdef"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [name for name, _ in directory.files()] == ["sealed_1"]
    directory.close()


@pytest.mark.parametrize("most_bytes", [1, 3, 4, 1000])
def test_short_writes_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most_bytes: int) -> None:
    directory = _open(tmp_path / "pool")

    def write_some(fd: int, views: list[memoryview], offset: int) -> int:
        return os.pwrite(fd, b"".join(views)[:most_bytes], offset)

    monkeypatch.setattr(os, "pwritev", write_some)
    with directory.temporary(10) as temporary:
        temporary.fill([memoryview(part) for part in (b"012", b"3", b"", b"456789")])
        directory.seal(temporary, "sealed_1")

    assert (tmp_path / "pool" / "sealed_1").read_bytes() == b"0123456789"
    directory.close()


def test_file_of_more_views_than_one_call_takes_is_written_whole(tmp_path: Path) -> None:
    directory = _open(tmp_path / "pool")
    parts = [index.to_bytes(4, "little") for index in range(3000)]

    with directory.temporary(12000) as temporary:
        temporary.fill([memoryview(part) for part in parts])
        directory.seal(temporary, "sealed_1")

    assert (tmp_path / "pool" / "sealed_1").read_bytes() == b"".join(parts)
    directory.close()


def test_file_system_without_a_limit_has_no_free_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = _open(tmp_path / "pool")
    assert directory.free_bytes() is not None

    unlimited = os.statvfs_result((4096, 4096, 0, 0, 0, 0, 0, 0, 0, 255))
    monkeypatch.setattr(os, "fstatvfs", lambda fd: unlimited)

    assert directory.free_bytes() is None
    directory.close()


def test_fault_says_what_lies_there_instead(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("nowhere")
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "below").mkdir()
    with socket.socket(socket.AF_UNIX) as server:
        here = Path.cwd()
        os.chdir(tmp_path)  # a socket's path may not be longer than 107 bytes
        try:
            server.bind("socket")
        finally:
            os.chdir(here)

    faults = [find_fault((tmp_path / name).lstat(), stat.S_IFREG) for name in ("link", "fifo", "below", "socket")]

    assert [fault.actual for fault in faults if fault] == [
        "a symbolic link",
        "a fifo",
        "a directory",
        "a socket or a device",
    ]
