"""The directory of a batch: it appears and goes in one moment, never changes hands, and leaves nothing behind."""

import asyncio
import fcntl
from pathlib import Path

import pytest

from pipeline.batch.directory import BatchDirectory, alone, clear_up, new_batch_id, spool, temporary_output
from pipeline.batch.errors import BatchFilesDamaged, BatchFilesGone, BatchLocked
from pipeline.batch.record import is_batch_id
from tests.pipeline.batch.files import new_directory, new_manifest


def names_in(path: Path) -> set[str]:
    return {child.name for child in path.iterdir()}


def test_a_manifest_comes_back_as_it_was_written(tmp_path: Path) -> None:
    manifest = new_manifest(tmp_path, target=tmp_path / "ö ü.jsonl")
    directory = new_directory(tmp_path, manifest)
    assert directory.manifest() == manifest
    moved = manifest.model_copy(update={"options": manifest.options.model_copy(update={"source": tmp_path / "b"})})
    directory.replace_manifest(moved)
    assert directory.manifest() == moved
    assert names_in(directory.path) == {"manifest.json"}


def test_files_of_a_batch_are_nobody_elses(tmp_path: Path) -> None:
    directory = new_directory(tmp_path)
    assert directory.path.stat().st_mode & 0o777 == 0o700
    assert (directory.path / "manifest.json").stat().st_mode & 0o777 == 0o600


def test_without_a_manifest_there_is_no_batch(tmp_path: Path) -> None:
    directory = BatchDirectory(tmp_path / "one")
    assert directory.manifest() is None
    directory.path.mkdir()
    directory.finished_lines.write_bytes(b"of a batch that was half removed")
    assert directory.manifest() is None
    with alone(tmp_path):
        directory.create(new_manifest(tmp_path))
    assert names_in(directory.path) == {"manifest.json"}


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"batch_id": "batch_1"}', b"\xff"])
def test_a_manifest_that_cannot_be_read_is_said_so(tmp_path: Path, content: bytes) -> None:
    directory = new_directory(tmp_path)
    (directory.path / "manifest.json").write_bytes(content)
    with pytest.raises(BatchFilesDamaged, match=r"manifest\.json is no manifest.*--restart"):
        directory.manifest()


def test_ids_are_told_from_those_of_requests() -> None:
    ids = {new_batch_id() for _ in range(100)}
    assert len(ids) == 100
    assert all(is_batch_id(batch_id) for batch_id in ids)
    assert not any(is_batch_id(f"{batch_id}-3") for batch_id in ids)
    assert not is_batch_id("req_abc")


def test_one_at_a_time_writes_the_files(tmp_path: Path) -> None:
    manifest = new_manifest(tmp_path)
    directory = new_directory(tmp_path, manifest)
    with directory.locked(manifest.batch_id):
        with pytest.raises(BatchLocked), BatchDirectory(directory.path).locked(manifest.batch_id):
            pass
        directory.check(manifest.batch_id)  # looking is free
    with directory.locked(manifest.batch_id):
        pass


def test_what_goes_wrong_under_the_lock_is_not_taken_for_the_lock(tmp_path: Path) -> None:
    manifest = new_manifest(tmp_path)
    with pytest.raises(BlockingIOError), new_directory(tmp_path, manifest).locked(manifest.batch_id):
        raise BlockingIOError


def test_files_of_another_batch_are_not_touched(tmp_path: Path) -> None:
    ours, theirs = new_manifest(tmp_path), new_manifest(tmp_path)
    directory = new_directory(tmp_path, theirs)
    with pytest.raises(BatchFilesGone, match="gave it up"):
        directory.check(ours.batch_id)
    with pytest.raises(BatchFilesGone), directory.locked(ours.batch_id):
        pass


def test_a_directory_that_is_gone_is_said_so(tmp_path: Path) -> None:
    directory = BatchDirectory(tmp_path / "gone")
    with pytest.raises(BatchFilesGone):
        directory.check("batch_1")
    with pytest.raises(BatchFilesGone), directory.locked("batch_1"):
        pass
    directory.remove()  # nothing to do


def test_whoever_still_writes_to_a_removed_batch_does_not_write_to_its_successor(tmp_path: Path) -> None:
    first, second = new_manifest(tmp_path), new_manifest(tmp_path)
    directory = new_directory(tmp_path, first)
    with directory.locked(first.batch_id), directory.finished_lines.open("ab") as late:
        directory.remove()
        with alone(directory.path.parent):
            directory.create(second)
        late.write(b"too late")
        late.flush()
        with directory.locked(second.batch_id):  # the old lock went with the old files
            assert not directory.finished_lines.exists()
    assert directory.manifest() == second
    assert names_in(directory.path.parent) == {"one", ".lock"}


async def test_while_one_makes_or_removes_a_batch_others_wait(tmp_path: Path) -> None:
    def make() -> None:
        with alone(tmp_path):
            (tmp_path / "made").touch()

    with alone(tmp_path):
        making = asyncio.ensure_future(asyncio.to_thread(make))
        done, _ = await asyncio.wait([making], timeout=0.05)
        assert not done
        assert not (tmp_path / "made").exists()
    await asyncio.wait_for(making, 10)
    assert (tmp_path / "made").exists()


def test_a_copy_is_gone_unless_it_was_moved_away(tmp_path: Path) -> None:
    with spool(tmp_path) as (path, file):
        file.write(b"lines")
        file.flush()
        assert path.stat().st_mode & 0o777 == 0o600
        path.replace(tmp_path / "input")
    with spool(tmp_path) as (_, file):
        file.write(b"more")
    assert (tmp_path / "input").read_bytes() == b"lines"
    assert names_in(tmp_path) == {"input", ".lock"}


def test_what_killed_processes_left_is_cleared_up_and_living_ones_are_spared(tmp_path: Path) -> None:
    removed = tmp_path / ".removed-1"
    removed.mkdir()
    (removed / "finished.lines").write_bytes(b"x")
    (tmp_path / ".input-dead").write_bytes(b"x")
    with spool(tmp_path) as (path, _):
        with alone(tmp_path):
            clear_up(tmp_path)
        assert names_in(tmp_path) == {".lock", path.name}


def test_temporary_outputs_lie_beside_their_places_under_short_names(tmp_path: Path) -> None:
    target, errors = tmp_path / "a" / ("x" * 250), tmp_path / "b" / "e"
    results, problems = temporary_output(target, errors, new_batch_id())
    assert (results.parent, problems.parent) == (target.parent, errors.parent)
    assert results.name != problems.name
    assert max(len(results.name), len(problems.name)) < 60
    assert results.name.startswith(".")


def test_the_lock_ends_with_its_process(tmp_path: Path) -> None:
    manifest = new_manifest(tmp_path)
    directory = new_directory(tmp_path, manifest)
    lock = (directory.path / "lock").open("w")
    fcntl.flock(lock, fcntl.LOCK_EX)
    with pytest.raises(BatchLocked), directory.locked(manifest.batch_id):
        pass
    lock.close()
    with directory.locked(manifest.batch_id):
        pass
