"""The status page again and again, with the last minutes below it, until somebody presses q.

Owns the screen and the keyboard while it runs. Knows nothing about where the figures come from.
"""

import asyncio
import os
import signal
import sys
import termios
import tty
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from kv_store.errors import KvStoreError
from ops.status.history import Series, history, of_one_pool
from ops.status.page import BAD, DIM, age, page, size
from ops.status.state import Watch
from pipeline.errors import ServerError

REFRESH_S = 1.0
NUM_COLUMNS = 60
COLUMN_S = 2.0
MAX_KEYS = 64  # that may have been pressed since the last look


async def run_top(watch: Watch, console: Console) -> None:
    """Show the stack until q or Ctrl-C; a server that is away for a while is said and waited for."""
    shown: RenderableType = Text("looking ...", DIM)
    with pressed_keys() as leaving, Live(shown, console=console, screen=True, auto_refresh=False) as live:
        while not leaving.is_set():
            try:
                shown = await frame(watch)
                live.update(shown, refresh=True)
            except (ServerError, KvStoreError) as error:
                if not error.retryable:
                    raise
                live.update(Group(Text(str(error), BAD), "", shown), refresh=True)
            try:
                await asyncio.wait_for(leaving.wait(), REFRESH_S)
            except TimeoutError:
                continue


async def frame(watch: Watch) -> RenderableType:
    """Return what is shown at one moment.

    Raises:
        ServerError: the server does not answer.
        KvStoreError: the pool cannot be looked at.
    """
    status = await watch.look()
    now_us = status.overview.at_us
    samples = await watch.observer.samples.read(now_us - round(1e6 * NUM_COLUMNS * COLUMN_S), now_us)
    kv = status.overview.kv
    samples = of_one_pool(samples, None if kv is None else kv.pool_id)
    return Group(page(status), "", _charts(history(samples, now_us, NUM_COLUMNS, COLUMN_S)), "", Text("q leaves", DIM))


def _charts(figures: Sequence[Series]) -> RenderableType:
    if all(value is None for series in figures for value in series.values):
        return Text("no history: no process of this stack takes samples", DIM)
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0), header_style=DIM)
    table.add_column("requests")
    table.add_column(f"the last {age(NUM_COLUMNS * COLUMN_S)}")
    table.add_column("peak", justify="right")
    for series in figures:
        peak = size(series.peak) if series.name == "KV bytes" else f"{series.peak:.0f}"
        table.add_row(series.name, series.bars(), peak)
    return table


@contextmanager
def pressed_keys() -> Iterator[asyncio.Event]:
    """Yield an event that q and Ctrl-C set; keys are read one by one meanwhile, where standard input is a terminal."""
    leaving, loop, descriptor = asyncio.Event(), asyncio.get_running_loop(), sys.stdin.fileno()

    def read() -> None:
        if os.read(descriptor, MAX_KEYS).lower().count(b"q"):
            leaving.set()

    with ExitStack() as undo:
        loop.add_signal_handler(signal.SIGINT, leaving.set)
        undo.callback(loop.remove_signal_handler, signal.SIGINT)
        if os.isatty(descriptor):
            undo.callback(termios.tcsetattr, descriptor, termios.TCSADRAIN, termios.tcgetattr(descriptor))
            tty.setcbreak(descriptor)
            loop.add_reader(descriptor, read)
            undo.callback(loop.remove_reader, descriptor)
        yield leaving
