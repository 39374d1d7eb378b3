"""The last step: both files appear whole, or nothing does and the batch says why."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pipeline.batch.directory import BatchDirectory
from pipeline.batch.figures import BatchSummary
from pipeline.batch.journal import RECORD
from stages.jobs.turn import Jobs
from tests.ops.answering import FAIL_WORD
from tests.pipeline.batch.files import disk_of
from tests.stages.jobs.bench import JobsBench, chat, ids_in, names_in, write_lines

NUM_LINES = 12


@pytest.fixture
def source(tmp_path: Path) -> Path:
    lines = [chat(f"id-{number}") for number in range(NUM_LINES - 1)]
    return write_lines(tmp_path / "in.jsonl", [*lines, chat("fails", FAIL_WORD)])


def ids() -> list[str]:
    return [f"id-{number}" for number in range(NUM_LINES - 1)]


async def collected(bench: JobsBench, jobs: Jobs, source: Path, **fields: Any) -> str:
    """A batch of which everything is collected and nothing written."""
    batch_id = await bench.submit(source, **fields)
    async with bench.answering():
        await bench.drive(jobs, batch_id, until=lambda record: record.state == "finalizing")
    return batch_id


async def finish(bench: JobsBench, jobs: Jobs, batch_id: str) -> None:
    record = await bench.drive(jobs, batch_id, until=lambda record: record.is_over)
    assert (record.state, record.succeeded, record.failed) == ("completed", NUM_LINES - 1, 1)
    assert ids_in(record.options.target) == ids()
    assert ids_in(record.options.errors) == ["fails"]
    assert names_in(bench.batches) == {".lock"}


@pytest.mark.parametrize("room", [0, 2000])
async def test_a_full_disk_leaves_nothing_half_done_and_once_it_is_not_the_batch_goes_on(
    bench: JobsBench, source: Path, tmp_path: Path, room: int
) -> None:
    (tmp_path / "out.jsonl").write_text("of the batch before\n")
    async with bench.jobs() as jobs:
        batch_id = await collected(bench, jobs, source)
        with disk_of(room):
            record = await bench.drive(jobs, batch_id, until=lambda record: record.is_over)
        assert (record.state, "File too large" in record.error) == ("failed", True)
        assert names_in(tmp_path) == {"in.jsonl", "out.jsonl", "batches"}
        assert (tmp_path / "out.jsonl").read_text() == "of the batch before\n"
        assert await bench.submit(source) == batch_id
        await bench.drive(jobs, batch_id, until=lambda record: record.state == "finalizing")
        assert (await bench.store.read(batch_id)).admitted == 0  # nothing was done again
        await finish(bench, jobs, batch_id)


def move(path: Path, to: Path) -> None:
    path.rename(to)


def block(path: Path) -> None:
    path.unlink(missing_ok=True)
    path.mkdir()


@pytest.mark.parametrize("name", ["out.jsonl", "out.errors.jsonl"])
async def test_what_stands_in_the_way_is_said_and_without_it_the_batch_goes_on(
    bench: JobsBench, source: Path, tmp_path: Path, name: str
) -> None:
    async with bench.jobs() as jobs:
        batch_id = await collected(bench, jobs, source)
        block(tmp_path / name)
        record = await bench.drive(jobs, batch_id, until=lambda record: record.is_over)
        assert (record.state, name in record.error) == ("failed", True)
        assert not (tmp_path / "out.jsonl").is_file()
        assert [left for left in names_in(tmp_path) if left.startswith(".")] == []
        (tmp_path / name).rmdir()
        await bench.submit(source)
        await finish(bench, jobs, batch_id)


async def test_a_directory_that_is_gone_is_said_so(bench: JobsBench, source: Path, tmp_path: Path) -> None:
    directory = tmp_path / "results"
    target, errors = directory / "out.jsonl", tmp_path / "errors.jsonl"
    async with bench.jobs() as jobs:
        batch_id = await collected(bench, jobs, source, target=target, errors=errors)
        directory.rmdir()
        record = await bench.drive(jobs, batch_id, until=lambda record: record.is_over)
        assert (record.state, str(directory) in record.error) == ("failed", True)
        assert names_in(tmp_path) == {"in.jsonl", "batches"}
        await bench.submit(source, target, errors=errors)  # which makes it again
        await finish(bench, jobs, batch_id)


async def test_an_input_that_is_gone_by_then_is_said_so(bench: JobsBench, source: Path) -> None:
    away = source.with_name("away.jsonl")
    async with bench.jobs() as jobs:
        batch_id = await collected(bench, jobs, source)
        move(source, away)
        assert (await bench.drive(jobs, batch_id, until=lambda record: record.is_over)).state == "failed"
        move(away, source)
        await bench.submit(source)
        await finish(bench, jobs, batch_id)


def lose_the_last(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: -RECORD.itemsize])


@pytest.mark.parametrize("harm", [lose_the_last, Path.unlink])
async def test_finished_lines_that_are_missing_are_noticed_and_done_again(
    bench: JobsBench, source: Path, harm: Callable[[Path], None]
) -> None:
    async with bench.jobs() as jobs:
        batch_id = await collected(bench, jobs, source)
        harm(BatchDirectory(Path((await bench.store.read(batch_id)).directory)).finished_index)
        record = await bench.drive(jobs, batch_id, until=lambda record: record.is_over)
        assert (record.state, f"of {NUM_LINES} lines" in record.error) == ("failed", True)
        assert not record.options.target.exists()
        await bench.submit(source)
        async with bench.answering():
            await bench.drive(jobs, batch_id, until=lambda record: record.state == "finalizing")
        await finish(bench, jobs, batch_id)


async def test_a_batch_that_was_given_up_writes_no_output(bench: JobsBench, source: Path, tmp_path: Path) -> None:
    async with bench.jobs() as jobs:
        batch_id = await collected(bench, jobs, source)
        again = bench.prepare(source, restart=True)
        record = await bench.drive(jobs, batch_id, until=lambda record: record.is_over)
        assert record.state == "failed"
        assert again.directory.manifest() == again.manifest
        assert names_in(tmp_path) == {"in.jsonl", "batches"}


async def test_the_summary_has_all_figures_and_the_record_its_counts(bench: JobsBench, source: Path) -> None:
    async with bench.jobs() as jobs:
        batch_id = await collected(bench, jobs, source)
        await bench.raw.hset(bench.keys.batch(batch_id), mapping={"succeeded": 99, "output_tokens": 7})
        await finish(bench, jobs, batch_id)
    record = await bench.store.read(batch_id)
    summary = BatchSummary.model_validate_json(record.summary)
    assert (summary.num_lines, summary.num_succeeded, summary.num_failed) == (NUM_LINES, NUM_LINES - 1, 1)
    assert (summary.output_tokens, summary.prompt_tokens) == (3 * (NUM_LINES - 1), 3 * (NUM_LINES - 1))
    assert (summary.draft_tokens, summary.accepted_tokens) == (2 * (NUM_LINES - 1), NUM_LINES - 1)
    assert (record.output_tokens, record.prompt_tokens) == (summary.output_tokens, summary.prompt_tokens)
    assert record.ended_ms >= record.started_ms > 0


async def test_through_a_link_the_file_behind_it_is_written(bench: JobsBench, source: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "link.jsonl").symlink_to(tmp_path / "elsewhere" / "out.jsonl")
    async with bench.jobs() as jobs:
        batch_id = await collected(bench, jobs, source, target=(tmp_path / "link.jsonl").resolve())
        await finish(bench, jobs, batch_id)
    assert (tmp_path / "link.jsonl").is_symlink()
    assert ids_in(tmp_path / "link.jsonl") == ids()
