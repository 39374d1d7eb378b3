"""How far a run is: a bar on a terminal, a line now and then elsewhere. On standard error.

Owns what is shown while a run goes on. Knows nothing about requests: it is told of tokens and of lines.
"""

import time
from abc import ABC, abstractmethod
from typing import Self, TextIO

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

PLAIN_EVERY_S = 10.0  # in a log file, a line for every token would bury everything else


class RunProgress(ABC):
    """Told of every token and every finished line."""

    def __init__(self, num_lines: int) -> None:
        self.num_lines = num_lines
        self.num_done = 0
        self.num_failed = 0
        self.num_tokens = 0
        self._started_at = time.monotonic()

    def start(self) -> None:
        """Count the time from now on: the stack is ready."""
        self._started_at = time.monotonic()

    def tokens(self, num: int) -> None:
        """Tokens arrived."""
        self.num_tokens += num
        self.refresh()

    def line(self, *, failed: bool) -> None:
        """A line is finished."""
        self.num_done += 1
        self.num_failed += failed
        self.refresh()

    @property
    def rate(self) -> float:
        """Tokens per second since the start."""
        elapsed_s = time.monotonic() - self._started_at
        return self.num_tokens / elapsed_s if elapsed_s > 0 else 0.0

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
        self.note(f"{self.num_done}/{self.num_lines} lines{failed}, {self.num_tokens} tokens, {self.rate:.1f} tok/s")

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

    def refresh(self) -> None:
        """Move the bar; it draws itself ten times a second at most."""
        self._bar.update(self._task, completed=self.num_done, rate=f"{self.rate:.1f} tok/s")

    def note(self, line: str) -> None:
        """Print the line above the bar."""
        self._bar.console.print(escape(line), highlight=False)

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()


def make_progress(num_lines: int, stream: TextIO) -> RunProgress:
    """Return what suits the stream."""
    return BarProgress(num_lines, stream) if stream.isatty() else PlainProgress(num_lines, stream)
