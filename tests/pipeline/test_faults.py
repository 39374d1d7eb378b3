"""Fault points: what a specification says happens, as often as it says, and nothing without one."""

import asyncio
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pipeline import faults
from pipeline.errors import SettingsError
from pipeline.faults import POINTS, configure, reach, reach_in_thread, struck
from tests.pipeline.benches import DEADLINE_S, soon

ROOT = Path(__file__).parents[2]

# Reaches a point as often as it is told, in the way it is told, and says after each time that it goes on.
REACHING = """
import asyncio, sys
from pathlib import Path
from pipeline import faults

spec, directory, way, num = sys.argv[1:]
faults.configure(spec, Path(directory))

async def on_the_loop():
    for n in range(int(num)):
        await faults.reach("decode.step")
        print("passed", n, flush=True)

def in_a_thread():
    for n in range(int(num)):
        faults.reach_in_thread("decode.step")
        print("passed", n, flush=True)

async def both():
    await (on_the_loop() if way == "loop" else asyncio.to_thread(in_a_thread))

asyncio.run(both())
"""
WAYS = ["loop", "thread"]


@pytest.fixture(autouse=True)
def _disarm() -> Iterator[None]:
    yield
    configure(None, None)


def reaching(spec: str, directory: Path, way: str = "loop", num: int = 1) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", REACHING, spec, str(directory), way, str(num)]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def end_of(process: subprocess.Popen[str]) -> tuple[int, int, str]:
    """How it ended, how often it passed the point, and what it said about errors."""
    try:
        output, errors = process.communicate(timeout=DEADLINE_S)
    finally:
        process.kill()
        process.wait()
    return process.returncode, output.count("passed"), errors


def state_of(pid: int) -> str:
    """The letter of a process's state: T is stopped."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0]


async def reached(point: str, times: int) -> list[int]:
    """Reach a point that fails, and return at which times it did."""
    failed: list[int] = []
    for number in range(1, times + 1):
        try:
            await reach(point)
        except RuntimeError:
            failed.append(number)
    return failed


@pytest.mark.parametrize(
    ("part", "problem"),
    [
        ("decode.step", "does not read POINT=ACTION"),
        ("decode.step=kill@x", "does not read POINT=ACTION"),
        ("decode.step=killx-1", "does not read POINT=ACTION"),
        ("decode.step=delay:soon", "does not read POINT=ACTION"),
        ("decode.step=killx2@3", "does not read POINT=ACTION"),
        ("", "does not read POINT=ACTION"),
        ("decode.steps=kill", "'decode.steps' is not a fault point; the nearest one is decode.step"),
        ("decode.step=explode", "the action is 'explode', allowed: kill, stop, term, delay, hang, gil, fail"),
        ("decode.step=", "the action is '', allowed: kill"),
        ("decode.step=delay", "SECONDS of delay is None, allowed: more than 0, at most 3600"),
        ("decode.step=delay:0", "SECONDS of delay is 0, allowed: more than 0"),
        ("decode.step=gil:3601", "SECONDS of gil is 3601, allowed: more than 0, at most 3600"),
        ("decode.step=kill:1", "kill takes no SECONDS; delay and gil do"),
        ("decode.step=kill@0", "NTH and TIMES are counted from 1"),
        ("decode.step=killx0", "NTH and TIMES are counted from 1"),
    ],
)
def test_a_wrong_part_is_named_with_what_is_allowed(tmp_path: Path, part: str, problem: str) -> None:
    with pytest.raises(SettingsError) as wrong:
        configure(f"prefill.written=fail,{part}", tmp_path)
    assert str(wrong.value).startswith(f"SLUICE_FAULT, part {part!r}: ")
    assert problem in str(wrong.value)


async def test_a_wrong_specification_leaves_the_one_before(tmp_path: Path) -> None:
    configure("decode.step=failx*", None)
    with pytest.raises(SettingsError):
        configure("decode.step=kill,decode.step", tmp_path)
    assert await reached("decode.step", 2) == [1, 2]


def test_what_is_counted_needs_a_directory() -> None:
    with pytest.raises(SettingsError, match=r"'decode.step=failx\*,decode.step=kill' needs SLUICE_FAULT_DIR"):
        configure("decode.step=failx*,decode.step=kill", None)


def test_a_directory_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(SettingsError, match=r"SLUICE_FAULT_DIR='.*/file/below' cannot be made: Not a directory"):
        configure("decode.step=kill", tmp_path / "file" / "below")


@pytest.mark.parametrize(
    ("part", "strikes"),
    [
        ("decode.step=fail", [1]),
        ("decode.step=fail@3", [3]),
        ("decode.step=failx2", [1, 2]),
        ("decode.step=fail@2x3", [2, 3, 4]),
        ("decode.step=failx*", [1, 2, 3, 4, 5, 6]),
        ("decode.step=fail@5x*", [5, 6]),
        ("decode.step=fail@7", []),
        ("decode.step=fail@2,decode.step=fail@4", [2, 4]),
        ("prefill.written=fail , decode.step=fail@2", [2]),
        ("prefill.written=failx*", []),
    ],
)
async def test_it_strikes_when_and_as_often_as_it_says(tmp_path: Path, part: str, strikes: list[int]) -> None:
    configure(part, tmp_path / "made" / "here")
    assert await reached("decode.step", 6) == strikes
    counted = [] if "x*" in part else strikes
    assert struck(tmp_path / "made" / "here", "decode.step") == [os.getpid()] * len(counted)


async def test_the_loop_and_threads_count_one_number(tmp_path: Path) -> None:
    configure("decode.step=fail@3", tmp_path)
    await reach("decode.step")
    await asyncio.to_thread(reach_in_thread, "decode.step")
    with pytest.raises(RuntimeError, match="injected"):
        await asyncio.to_thread(reach_in_thread, "decode.step")
    await reach("decode.step")


async def test_disarmed_it_does_nothing(tmp_path: Path) -> None:
    for nothing in (None, ""):
        configure("decode.step=failx9", tmp_path)
        configure(nothing, None)
        assert await reached("decode.step", 3) == []
    assert struck(tmp_path, "decode.step") == []


async def test_without_a_specification_a_point_is_not_even_a_turn_of_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    def used(*_: object) -> None:
        raise AssertionError("an unconfigured point did something")

    for name in ("log", "_strike"):
        monkeypatch.setattr(faults, name, used)
    turns = 0

    def turn() -> None:
        nonlocal turns
        turns += 1

    asyncio.get_running_loop().call_soon(turn)
    for point in POINTS:
        await reach(point)
        reach_in_thread(point)
    assert turns == 0
    await asyncio.sleep(0)
    assert turns == 1  # the control


@pytest.mark.parametrize("way", WAYS)
def test_kill_ends_as_many_processes_as_it_says_and_spares_the_next(tmp_path: Path, way: str) -> None:
    ends = [end_of(reaching("decode.step=kill@2x2", tmp_path, way, num=3)) for _ in range(3)]
    assert [(returncode, num_passed) for returncode, num_passed, _ in ends] == [(-signal.SIGKILL, 1)] * 2 + [(0, 3)]
    assert len(set(struck(tmp_path, "decode.step"))) == 2


def test_processes_that_run_at_once_share_the_count(tmp_path: Path) -> None:
    processes = [reaching("decode.step=failx5", tmp_path, num=20) for _ in range(2)]
    # A strike ends this program, so each process takes one of the five, and a third and fourth find two left.
    assert [end_of(process)[0] for process in processes] == [1, 1]
    configure("decode.step=failx5", tmp_path)
    assert len(struck(tmp_path, "decode.step")) == 2
    for _ in range(3):
        with pytest.raises(RuntimeError):
            reach_in_thread("decode.step")
    reach_in_thread("decode.step")


@pytest.mark.parametrize("way", WAYS)
def test_stop_stops_all_of_the_process_at_the_point_until_it_is_continued(tmp_path: Path, way: str) -> None:
    process = reaching("decode.step=stop", tmp_path, way)
    deadline = time.monotonic() + DEADLINE_S
    try:
        while struck(tmp_path, "decode.step") != [process.pid] or state_of(process.pid) != "T":
            assert time.monotonic() < deadline
            assert process.poll() is None
            time.sleep(0.01)
        os.kill(process.pid, signal.SIGCONT)
    finally:
        returncode, num_passed, _ = end_of(process)
    assert (returncode, num_passed) == (0, 1)


@pytest.mark.parametrize("way", WAYS)
def test_term_is_the_signal_that_asks_for_an_end(tmp_path: Path, way: str) -> None:
    returncode, _, _ = end_of(reaching("decode.step=term", tmp_path, way, num=1000))
    assert returncode == -signal.SIGTERM  # nothing handles it in that program


@pytest.mark.parametrize("way", WAYS)
def test_fail_is_an_error_of_the_caller(tmp_path: Path, way: str) -> None:
    returncode, num_passed, errors = end_of(reaching("decode.step=fail@2", tmp_path, way, num=2))
    assert (returncode, num_passed) == (1, 1)
    assert "RuntimeError: injected" in errors


async def test_a_delay_on_the_loop_is_the_callers_alone(tmp_path: Path) -> None:
    configure("decode.step=delay:0.2", tmp_path)
    started = time.monotonic()
    late = asyncio.create_task(reach("decode.step"))
    await asyncio.sleep(0)
    await reach("decode.step")
    assert not late.done()
    await soon(late)
    assert time.monotonic() - started >= 0.2


async def test_a_delay_in_a_thread_is_the_threads_alone(tmp_path: Path) -> None:
    configure("decode.step=delay:0.2", tmp_path)
    started = time.monotonic()
    late = asyncio.create_task(asyncio.to_thread(reach_in_thread, "decode.step"))
    await soon(_until(lambda: bool(struck(tmp_path, "decode.step"))))
    reach_in_thread("decode.step")
    assert not late.done()
    await soon(late)
    assert time.monotonic() - started >= 0.2


async def test_a_hung_task_can_be_cancelled(tmp_path: Path) -> None:
    configure("decode.step=hang", tmp_path)
    hung = asyncio.create_task(reach("decode.step"))
    await soon(_until(lambda: bool(struck(tmp_path, "decode.step"))))
    await asyncio.sleep(0)
    assert not hung.done()
    hung.cancel()
    with pytest.raises(asyncio.CancelledError):
        await soon(hung)


def test_a_thread_hangs_for_much_longer_than_anybody_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A real hang would outlive the test, so this looks at what the thread would sleep."""
    slept: list[float] = []
    monkeypatch.setattr(faults.time, "sleep", slept.append)
    configure("decode.step=hang", tmp_path)
    reach_in_thread("decode.step")
    assert slept == [3600.0]


@pytest.mark.parametrize(("action", "others_run"), [("gil", False), ("delay", True)])
def test_gil_keeps_every_other_thread_from_running_and_delay_does_not(
    tmp_path: Path, action: str, others_run: bool
) -> None:
    configure(f"decode.step={action}:0.5", tmp_path)
    ticks: list[float] = []
    stopping = threading.Event()

    def tick() -> None:
        while not stopping.is_set():
            ticks.append(time.monotonic())
            time.sleep(0.001)

    ticking = threading.Thread(target=tick)
    ticking.start()
    try:
        started = time.monotonic()
        reach_in_thread("decode.step")
        ended = time.monotonic()
    finally:
        stopping.set()
        ticking.join()
    assert ended - started >= 0.5
    inside = sum(started + 0.1 < at < started + 0.4 for at in ticks)
    assert (inside > 0) is others_run


def test_every_point_in_the_code_is_declared() -> None:
    """Points that are named with the stage's word (pipeline/worker.py) are those of the map stages."""
    used: set[str] = set()
    for folder in ("pipeline", "stages"):
        for path in (ROOT / folder).rglob("*.py"):
            if path != Path(faults.__file__):
                used |= set(re.findall(r'reach(?:_in_thread)?\(f?"([^"]+)"', path.read_text()))
    patterns = {point for point in used if point.startswith("{")}
    named = {f"{stage}.{point.rpartition('.')[2]}" for point in patterns for stage in ("tokenizer", "compressor")}
    assert (used - patterns) | named <= POINTS


async def _until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110 - files and threads set no event
        await asyncio.sleep(0.005)
