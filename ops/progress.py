"""How far a run is: a bar on a terminal, a line now and then elsewhere, or JSON for scripts.

Owns what is shown while a run goes on. Knows nothing about requests: it is told how many tokens and lines there are.
"""

import json
import time
from abc import ABC, abstractmethod
from typing import Self, TextIO

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

PLAIN_EVERY_S = 10.0  # in a log file, a line for every token would bury everything else
JSON_EVERY_S = 1.0


class RunProgress(ABC):
    """Told of all counts now and then; what they were the first time was done before, and is no speed."""

    def __init__(self, num_lines: int) -> None:
        self.num_lines = num_lines
        self.num_done = 0
        self.num_failed = 0
        self.num_tokens = 0
        self._started_at: float | None = None
        self._lines_before = 0
        self._tokens_before = 0

    def set(self, *, num_lines: int, num_done: int, num_failed: int, num_tokens: int) -> None:
        """Take all counts at once."""
        self.num_lines, self.num_done = num_lines, num_done
        self.num_failed, self.num_tokens = num_failed, num_tokens
        if self._started_at is None:
            self._started_at = time.monotonic()
            self._lines_before, self._tokens_before = num_done, num_tokens
            self.start()
        self.refresh()

    def add(self, *, num_tokens: int = 0, num_done: int = 0) -> None:
        """Count what has just come."""
        self.set(
            num_lines=self.num_lines,
            num_done=self.num_done + num_done,
            num_failed=self.num_failed,
            num_tokens=self.num_tokens + num_tokens,
        )

    @property
    def rate(self) -> float:
        """Tokens per second since the start; a batch that a server lost counts its tokens anew."""
        elapsed_s = self._elapsed_s
        return max(self.num_tokens - self._tokens_before, 0) / elapsed_s if elapsed_s > 0 else 0.0

    @property
    def left_s(self) -> float | None:
        """Seconds until the last line, at the pace since the start; None before there is one."""
        num_done = self.num_done - self._lines_before
        if num_done <= 0:
            return None
        return (self.num_lines - self.num_done) * self._elapsed_s / num_done

    @property
    def _elapsed_s(self) -> float:
        return 0.0 if self._started_at is None else time.monotonic() - self._started_at

    def start(self) -> None:  # noqa: B027 - most have nothing to do
        """Begin with the counts as they are."""

    @abstractmethod
    def refresh(self) -> None:
        """Show the state, if it is time to."""

    @abstractmethod
    def note(self, line: str) -> None:
        """Show a line that stays."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        return None


class PlainProgress(RunProgress):
    """A line every few seconds."""

    def __init__(self, num_lines: int, stream: TextIO) -> None:
        super().__init__(num_lines)
        self._stream = stream
        self._due_at = time.monotonic() + PLAIN_EVERY_S

    def refresh(self) -> None:
        """Print a line if the last one is old."""
        if time.monotonic() < self._due_at:
            return
        self._due_at = time.monotonic() + PLAIN_EVERY_S
        failed = f", {self.num_failed} failed" if self.num_failed else ""
        left = "" if self.left_s is None else f", {self.left_s:.0f} s left"
        self.note(
            f"{self.num_done}/{self.num_lines} lines{failed}, {self.num_tokens} tokens, {self.rate:.1f} tok/s{left}"
        )

    def note(self, line: str) -> None:
        """Print the line."""
        print(line, file=self._stream, flush=True)


class BarProgress(RunProgress):
    """A bar with rate and time left."""

    def __init__(self, num_lines: int, stream: TextIO) -> None:
        super().__init__(num_lines)
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[rate]}"),
            TimeRemainingColumn(),
            console=Console(file=stream),
            transient=True,
        )
        self._task: TaskID = self._bar.add_task("running", total=num_lines, rate="")

    def start(self) -> None:
        """Let the bar begin where the run does."""
        self._bar.reset(self._task, total=self.num_lines, completed=self.num_done)

    def refresh(self) -> None:
        """Move the bar; it draws itself ten times a second at most."""
        rate = f"{self.rate:.1f} tok/s"
        self._bar.update(self._task, total=self.num_lines, completed=self.num_done, rate=rate)

    def note(self, line: str) -> None:
        """Print the line above the bar."""
        self._bar.console.print(escape(line), highlight=False)

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()


class JsonProgress(RunProgress):
    """An object a line, for scripts: progress once a second, and notes."""

    def __init__(self, num_lines: int, stream: TextIO) -> None:
        super().__init__(num_lines)
        self._stream = stream
        self._due_at = 0.0

    def refresh(self) -> None:
        """Print the counts if the last ones are old, or if these are the last."""
        if time.monotonic() < self._due_at and self.num_done < self.num_lines:
            return
        self._due_at = time.monotonic() + JSON_EVERY_S
        self._print(
            event="progress",
            num_lines=self.num_lines,
            num_done=self.num_done,
            num_failed=self.num_failed,
            output_tokens=self.num_tokens,
            output_tokens_per_s=round(self.rate, 2),
            left_s=None if self.left_s is None else round(self.left_s, 1),
        )

    def note(self, line: str) -> None:
        """Print the line as an object."""
        self._print(event="note", message=line)

    def _print(self, **fields: object) -> None:
        print(json.dumps(fields, ensure_ascii=False), file=self._stream, flush=True)


def make_progress(num_lines: int, stream: TextIO) -> RunProgress:
    """Return what suits the stream."""
    return BarProgress(num_lines, stream) if stream.isatty() else PlainProgress(num_lines, stream)
