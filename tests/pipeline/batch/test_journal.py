"""The journal: a line that is on the disk is there once and whole, whatever a crash or a full disk leaves behind."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.batch.directory import BatchDirectory
from pipeline.batch.errors import BatchFilesDamaged
from pipeline.batch.journal import (
    NOT_YET,
    PHASE_NAMES,
    REASONS,
    RECORD,
    FinishedLine,
    Journal,
    finished_in_order,
    lines_in_flight,
    read_records,
)
from pipeline.batch.record import BatchRecord
from tests.pipeline.batch.files import disk_of, finished, new_directory, new_manifest

NUM_LINES = 10


@pytest.fixture
def directory(tmp_path: Path) -> BatchDirectory:
    return new_directory(tmp_path)


def append(directory: BatchDirectory, *lines: FinishedLine) -> None:
    with Journal(directory, NUM_LINES) as journal:
        journal.append(lines)


def contents(directory: BatchDirectory) -> list[tuple[int, str, bytes]]:
    return list(finished_in_order(directory, NUM_LINES))


def test_lines_come_out_in_order_however_they_came_in(directory: BatchDirectory) -> None:
    append(directory, finished(5), finished(0, "error"))
    append(directory, finished(3, "length"))
    assert contents(directory) == [
        (0, "error", finished(0).output),
        (3, "length", finished(3).output),
        (5, "stop", finished(5).output),
    ]
    assert read_records(directory)["index"].tolist() == [5, 0, 3]


def test_a_line_that_is_there_stays_as_it_is(directory: BatchDirectory) -> None:
    append(directory, finished(1), finished(2))
    before = directory.finished_lines.read_bytes()
    with Journal(directory, NUM_LINES) as journal:
        assert (journal.reason(1), journal.reason(3)) == ("stop", None)
        journal.append([FinishedLine(1, "error", b"another text\n"), FinishedLine(2, "error", b"and another\n")])
        journal.append([finished(3), finished(3, "length")])
        assert journal.reason(1) == "stop"
        journal.append([FinishedLine(3, "stop", b"a third time\n")])
    assert directory.finished_lines.read_bytes().startswith(before)
    assert [index for index, _, _ in contents(directory)] == [1, 2, 3]


def test_figures_are_kept_within_what_a_record_can_hold(directory: BatchDirectory) -> None:
    phases = range(1, len(PHASE_NAMES) + 1)
    append(
        directory,
        finished(
            0,
            prompt_tokens=1,
            output_tokens=2,
            draft_tokens=3,
            accepted_tokens=4,
            ttft_us=2**40,
            latency_us=-5,
            phases_us=phases,
        ),
        finished(1),
    )
    first, second = read_records(directory)
    assert [int(first[name]) for name in ("prompt_tokens", "output_tokens", "draft_tokens", "accepted_tokens")] == [
        *(1, 2, 3, 4)
    ]
    assert (first["ttft_us"], first["latency_us"], first["phases_us"].tolist()) == (NOT_YET - 1, 0, list(phases))
    assert (second["ttft_us"], second["latency_us"]) == (NOT_YET, NOT_YET)


def test_without_a_journal_nothing_is_finished(directory: BatchDirectory) -> None:
    assert len(read_records(directory)) == 0
    assert contents(directory) == []
    directory.finished_index.write_bytes(b"x" * RECORD.itemsize)  # its bytes are gone, so it counts for nothing
    assert len(read_records(directory)) == 0


def cut(path: Path, num_bytes: int) -> None:
    path.write_bytes(path.read_bytes()[:num_bytes])


def test_cut_at_any_byte_of_its_index_it_holds_the_lines_before_and_goes_on(directory: BatchDirectory) -> None:
    lines = [finished(index) for index in (4, 1)]
    append(directory, *lines)
    index, data = directory.finished_index.read_bytes(), directory.finished_lines.read_bytes()
    for num_bytes in range(len(index) + 1):
        directory.finished_index.write_bytes(index[:num_bytes])
        directory.finished_lines.write_bytes(data)
        kept = lines[: num_bytes // RECORD.itemsize]
        assert [line.index for line in kept] == read_records(directory)["index"].tolist()
        append(directory, *lines, finished(9))
        assert contents(directory) == sorted((line.index, "stop", line.output) for line in [*lines, finished(9)])
        assert directory.finished_lines.read_bytes() == data + finished(9).output


def test_cut_at_any_byte_of_its_lines_it_holds_those_that_are_whole_and_goes_on(directory: BatchDirectory) -> None:
    lines = [finished(index) for index in (4, 1, 7)]
    append(directory, *lines)
    index, data = directory.finished_index.read_bytes(), directory.finished_lines.read_bytes()
    ends = [sum(len(line.output) for line in lines[: number + 1]) for number in range(3)]
    for num_bytes in range(len(data) + 1):
        directory.finished_index.write_bytes(index)
        directory.finished_lines.write_bytes(data[:num_bytes])
        assert len(read_records(directory)) == sum(end <= num_bytes for end in ends)
        append(directory, *lines)
        assert contents(directory) == sorted((line.index, "stop", line.output) for line in lines)


@settings(max_examples=100, deadline=None)
@given(st.binary(min_size=1, max_size=3 * RECORD.itemsize), st.binary(max_size=100))
def test_what_a_power_loss_leaves_behind_the_last_record_is_cut_off(
    tmp_path_factory: pytest.TempPathFactory, tail: bytes, more: bytes
) -> None:
    directory = new_directory(tmp_path_factory.mktemp("journal"))
    append(directory, finished(4), finished(1))
    with directory.finished_index.open("ab") as file:
        file.write(tail)
    with directory.finished_lines.open("ab") as file:
        file.write(more)
    assert read_records(directory)["index"].tolist() == [4, 1]
    append(directory, finished(0))
    assert [index for index, _, _ in contents(directory)] == [0, 1, 4]


def test_zeros_are_no_record(directory: BatchDirectory) -> None:
    directory.finished_index.write_bytes(bytes(2 * RECORD.itemsize))
    directory.finished_lines.write_bytes(b"")
    assert len(read_records(directory)) == 0


@pytest.mark.parametrize("field", ["index", "reason"])
def test_records_of_another_batch_are_refused(directory: BatchDirectory, field: str) -> None:
    append(directory, finished(4), finished(1))
    records = np.fromfile(directory.finished_index, RECORD)
    records[field][0] = 200
    records.tofile(directory.finished_index)
    with pytest.raises(BatchFilesDamaged, match="does not belong to a batch of 10 lines; start over with --restart"):
        read_records(directory, NUM_LINES)


def test_a_line_that_is_recorded_twice_is_refused(directory: BatchDirectory) -> None:
    append(directory, finished(4), finished(1))
    records = np.fromfile(directory.finished_index, RECORD)
    records["index"] = 4
    records.tofile(directory.finished_index)
    with pytest.raises(BatchFilesDamaged):
        Journal(directory, NUM_LINES)


@pytest.mark.parametrize("room", [0, 5, 40])
def test_a_full_disk_loses_nothing_that_was_there(directory: BatchDirectory, room: int) -> None:
    append(directory, finished(4), finished(1))
    before = directory.finished_lines.read_bytes()
    size = max(len(before), directory.finished_index.stat().st_size) + room
    with Journal(directory, NUM_LINES) as journal:
        with disk_of(size), pytest.raises(OSError, match="File too large"):
            journal.append([finished(index) for index in (0, 2, 3, 5, 6)])
        assert journal.reason(0) is None
    assert directory.finished_lines.read_bytes().startswith(before)
    done = read_records(directory)["index"].tolist()
    assert done[:2] == [4, 1]
    append(directory, *(finished(index) for index in range(7)))
    assert contents(directory) == [(index, "stop", finished(index).output) for index in range(7)]


def test_after_a_full_disk_the_same_journal_goes_on(directory: BatchDirectory) -> None:
    with Journal(directory, NUM_LINES) as journal:
        with disk_of(3), pytest.raises(OSError, match="File too large"):
            journal.append([finished(0)])
        journal.append([finished(1)])
    assert contents(directory) == [(1, "stop", finished(1).output)]


def test_lines_in_flight_are_those_that_were_fed_and_are_not_on_the_disk(directory: BatchDirectory) -> None:
    append(directory, finished(1), finished(8, "error"))
    manifest = new_manifest(directory.path)
    fields = {"directory": str(directory.path), "input_sha256": "", "total": NUM_LINES, "cursor": 4}
    record = BatchRecord(id="batch_1", state="cancelling", options=manifest.options, **fields)
    assert lines_in_flight(directory, record) == [0, 2, 3]


def test_reasons_are_all_that_a_line_can_end_with(directory: BatchDirectory) -> None:
    append(directory, *(finished(index, reason) for index, reason in enumerate(REASONS)))
    assert [reason for _, reason, _ in contents(directory)] == ["stop", "length", "error"]
