"""The first step: what was submitted is what is run, or the batch says why not and can go on later."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from pipeline.batch.directory import BatchDirectory
from pipeline.batch.input_index import ENTRY
from tests.pipeline.batch.files import disk_of
from tests.stages.jobs.bench import JobsBench, chat, ids_in, names_in, write_lines


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_lines(tmp_path / "in.jsonl", [chat(f"id-{number}") for number in range(5)])


async def test_an_index_is_made_and_the_batch_begins(bench: JobsBench, source: Path) -> None:
    batch_id = await bench.submit(source)
    async with bench.jobs() as jobs:
        record = await bench.drive(jobs, batch_id, until=lambda record: record.state != "validating")
    assert (record.state, record.total, record.started_ms >= record.created_ms) == ("in_progress", 5, True)
    assert BatchDirectory(Path(record.directory)).input_index.stat().st_size == 5 * ENTRY.itemsize


def copied(path: Path, to: Path | None = None) -> Path:
    return Path(shutil.copy(path, to or path.with_name("copy.jsonl")))


@pytest.mark.parametrize(
    ("harm", "said"),
    [
        (lambda path: write_lines(path, [chat("another")]), "was changed after the batch was submitted"),
        (lambda path: path.unlink(), "No such file"),
    ],
)
async def test_an_input_that_changed_is_said_so_and_once_it_is_back_the_batch_goes_on(
    bench: JobsBench, source: Path, tmp_path: Path, harm: Callable[[Path], object], said: str
) -> None:
    copy = copied(source)
    batch_id = await bench.submit(source)
    harm(source)
    async with bench.answering(), bench.working():
        record = await bench.ended(batch_id)
        assert record.state == "failed"
        assert str(source) in record.error
        assert said in record.error
        copied(copy, source)
        assert await bench.submit(source) == batch_id
        assert (await bench.sees(batch_id, lambda record: record.state == "completed")).admitted == 5
    assert ids_in(tmp_path / "out.jsonl") == [f"id-{number}" for number in range(5)]


async def test_an_index_that_does_not_fit_on_the_disk_leaves_nothing(bench: JobsBench, source: Path) -> None:
    batch_id = await bench.submit(source)
    async with bench.jobs() as jobs:
        with disk_of(100):
            record = await bench.drive(jobs, batch_id, until=lambda record: record.is_over)
        assert (record.state, "File too large" in record.error) == ("failed", True)
        assert names_in(Path(record.directory)) == {"manifest.json", "lock"}
        await bench.submit(source)
        await bench.drive(jobs, batch_id, until=lambda record: record.state == "in_progress")


async def test_files_that_were_given_up_are_said_so_and_those_of_the_successor_are_left_alone(
    bench: JobsBench, source: Path
) -> None:
    batch_id = await bench.submit(source)
    again = bench.prepare(source, restart=True)
    async with bench.jobs() as jobs:
        record = await bench.drive(jobs, batch_id, until=lambda record: record.is_over)
        assert (record.state, "gave it up" in record.error) == ("failed", True)
        assert names_in(again.directory.path) == {"manifest.json", "lock"}
        again.directory.remove()
        await bench.store.create(again.manifest, str(again.directory.path))
        record = await bench.drive(jobs, again.manifest.batch_id, until=lambda record: record.is_over)
        assert (record.state, "gave it up" in record.error) == ("failed", True)


async def test_while_somebody_else_writes_the_files_it_waits(bench: JobsBench, source: Path) -> None:
    prepared = bench.prepare(source)
    batch_id = await bench.submit(source)
    async with bench.working():
        with prepared.directory.locked(batch_id):
            await bench.holds(lambda: has_number(bench, batch_id, "validate", 3))
            assert (await bench.store.read(batch_id)).state == "validating"
        await bench.reaches(batch_id, "in_progress")


async def has_number(bench: JobsBench, batch_id: str, step: str, number: int) -> bool:
    found = await bench.raw.hget(bench.keys.batch(batch_id), f"{step}_number")
    return found is not None and int(found) >= number
