"""Fault points: places where a test makes a process die, stop, hang, be late or fail, once or as often as it says.

Owns the names of the points, the grammar of SLUICE_FAULT, and the count of what was injected. Knows nothing about the
stages that reach the points. Without a specification a point costs one look into an empty dictionary.

    SLUICE_FAULT = PART[,PART...]        PART = POINT=ACTION[:SECONDS][@NTH][xTIMES]

    kill           SIGKILL to this process           delay:SECONDS   the caller waits; the rest of the process runs
    stop           SIGSTOP to this process           gil:SECONDS     no Python code of this process runs
    term           SIGTERM to this process           hang            the caller waits for an hour
    fail           raises RuntimeError("injected")

    @NTH    the first time it strikes is the NTH time that a process reaches the point (default 1)
    xTIMES  it strikes so often in all, whatever processes strike and however often they start again (default 1);
            x* is every time. One file each in SLUICE_FAULT_DIR, made with O_EXCL, counts; its content is the
            struck process's id, so a test learns of it there (`struck`). x* leaves no files.

    decode.step=kill@5                 the fifth step ends the process; the one that follows it is left alone
    prefill.written=delay:0.5x*        each time
"""

import asyncio
import ctypes
import difflib
import os
import re
import signal
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, cast, get_args

import structlog

from pipeline.errors import SettingsError

POINTS = frozenset(
    {
        "tokenizer.claimed",
        "tokenizer.handled",  # before its commit
        "tokenizer.committed",
        "compressor.claimed",
        "compressor.sealed",  # in a thread: the sealed blob is written
        "compressor.handled",  # before its commit
        "compressor.committed",
        "prefill.claimed",
        "prefill.credited",
        "prefill.computed",  # after each chunk
        "prefill.written",  # a blob is written, before its commit
        "prefill.handed_over",  # after that commit
        "prefill.finishing",  # before the last commit
        "prefill.finished",
        "decode.claimed",
        "decode.loaded",
        "decode.step",  # in the engine's thread, before each step
        "decode.emitting",  # before each emission's commit
        "decode.emitted",
        "decode.checkpointed",
    }
)
"""Every point there is; a specification that names another one stops the start."""

Action = Literal["kill", "stop", "term", "delay", "hang", "gil", "fail"]
_TIMED = frozenset({"delay", "gil"})
_MAX_S = 3600.0  # longer than any test waits
_GRAMMAR = "POINT=ACTION[:SECONDS][@NTH][xTIMES]"
_PART = re.compile(
    r"(?P<point>[^=]*)=(?P<action>[a-z]*?)(:(?P<seconds>\d{1,4}(\.\d{1,6})?))?(@(?P<nth>\d{1,6}))?(x(?P<times>\d{1,4}|\*))?"
)

log = structlog.get_logger("faults")


@dataclass(frozen=True, slots=True)
class _Fault:
    """One part of a specification; times is None for always."""

    text: str
    point: str
    action: Action
    seconds: float
    nth: int
    times: int | None


class _Armed:
    """A fault of this process, with how often its point was reached here; points are reached in several threads."""

    def __init__(self, fault: _Fault, directory: Path | None) -> None:
        self.fault = fault
        self._directory = directory
        self._num_reached = 0
        self._num_seen = 0  # files that are known to be there
        self._lock = threading.Lock()

    def strikes(self) -> bool:
        """Note that the point was reached, and return whether the fault strikes now."""
        with self._lock:
            self._num_reached += 1
            return self._num_reached >= self.fault.nth and (self.fault.times is None or self._counted(self.fault.times))

    def _counted(self, times: int) -> bool:
        assert self._directory is not None, "configure() asks for a directory where it is needed"
        while self._num_seen < times:
            self._num_seen += 1
            path = self._directory / f"{self.fault.text}.{self._num_seen}"
            try:
                descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
            except FileExistsError:
                continue
            try:
                os.write(descriptor, str(os.getpid()).encode())
            finally:
                os.close(descriptor)
            return True
        return False


_armed: dict[str, list[_Armed]] = {}  # of this process: it has one set of points, like signal handlers


def configure(spec: str | None, directory: Path | None) -> None:
    """Arm the faults of a specification, instead of those armed before; None or "" disarms all.

    Raises:
        SettingsError: A part does not follow the grammar, or the directory is missing or cannot be made.
    """
    faults = [_read(part.strip()) for part in spec.split(",")] if spec else []
    if any(fault.times is not None for fault in faults):
        if directory is None:
            raise SettingsError(f"SLUICE_FAULT={spec!r} needs SLUICE_FAULT_DIR to count in, unless all parts end in x*")
        try:
            directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise SettingsError(f"SLUICE_FAULT_DIR={str(directory)!r} cannot be made: {error.strerror}") from error
    _armed.clear()
    for fault in faults:
        _armed.setdefault(fault.point, []).append(_Armed(fault, directory))


async def reach(point: str) -> None:
    """Say that the event loop's work is at a point; a delay or hang blocks the calling task alone.

    Raises:
        RuntimeError: the injected fault `fail`.
    """
    for fault in _striking(point):
        if fault.action in ("delay", "hang"):
            await asyncio.sleep(fault.seconds)
        else:
            _strike(fault)


def reach_in_thread(point: str) -> None:
    """Say that a thread's work is at a point; a delay or hang blocks the calling thread alone.

    Raises:
        RuntimeError: the injected fault `fail`.
    """
    for fault in _striking(point):
        if fault.action in ("delay", "hang"):
            time.sleep(fault.seconds)
        else:
            _strike(fault)


def struck(directory: Path, point: str) -> list[int]:
    """Return the ids of the processes that counted faults at a point struck, in the order of each part's files."""
    if not directory.is_dir():  # nobody has armed a fault yet
        return []
    paths = [path for path in directory.iterdir() if path.name.startswith(f"{point}=")]
    paths.sort(key=lambda path: (path.stem, int(path.suffix[1:])))
    return [int(content) for path in paths if (content := path.read_bytes())]  # empty: not written yet


def _read(part: str) -> _Fault:
    matched = _PART.fullmatch(part)
    if matched is None:
        raise _wrong(part, f"does not read {_GRAMMAR}; SECONDS is a decimal number, NTH and TIMES are whole, or x*")
    point, action = matched["point"], matched["action"]
    if point not in POINTS:
        [near] = difflib.get_close_matches(point, sorted(POINTS), n=1, cutoff=0)
        raise _wrong(part, f"{point!r} is not a fault point; the nearest one is {near}")
    if action not in get_args(Action):
        raise _wrong(part, f"the action is {action!r}, allowed: {', '.join(get_args(Action))}")
    seconds = _seconds_of(part, action, matched["seconds"])
    nth, times = int(matched["nth"] or 1), None if matched["times"] == "*" else int(matched["times"] or 1)
    if nth < 1 or times == 0:
        raise _wrong(part, "NTH and TIMES are counted from 1")
    return _Fault(part, point, cast("Action", action), seconds, nth, times)


def _seconds_of(part: str, action: str, value: str | None) -> float:
    if action not in _TIMED:
        if value is not None:
            raise _wrong(part, f"{action} takes no SECONDS; {' and '.join(sorted(_TIMED))} do")
        return _MAX_S
    if value is None or not 0 < float(value) <= _MAX_S:
        raise _wrong(part, f"SECONDS of {action} is {value}, allowed: more than 0, at most {_MAX_S:g}")
    return float(value)


def _wrong(part: str, problem: str) -> SettingsError:
    return SettingsError(f"SLUICE_FAULT, part {part!r}: {problem}")


def _striking(point: str) -> list[_Fault]:
    """Count a point as reached, for each of its faults, and return those that strike now."""
    faults = [armed.fault for armed in _armed.get(point, ()) if armed.strikes()]
    for fault in faults:
        log.warning("fault_injected", point=point, action=fault.action)
    return faults


def _strike(fault: _Fault) -> None:
    match fault.action:
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "stop":
            # It stops the process whole, but to this thread, so that this thread does not go on for a moment more.
            signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)
        case "term":
            os.kill(os.getpid(), signal.SIGTERM)
        case "gil":
            _hold_gil(fault.seconds)
        case _:
            raise RuntimeError("injected")


def _hold_gil(seconds: float) -> None:
    """Sleep in C without giving the interpreter's lock away, as native code that forgot to release it would."""
    usleep = ctypes.PyDLL(None).usleep  # PyDLL keeps the lock during a call, CDLL would release it
    usleep.argtypes, usleep.restype = [ctypes.c_uint32], ctypes.c_int
    ends_at = time.monotonic() + seconds
    # One call: between two the interpreter would let other threads run. Only a signal ends it early.
    while (left_s := ends_at - time.monotonic()) > 0:
        usleep(int(left_s * 1e6) + 1)
