"""One turn of a batch's step: take the lease, work a slice of time, give the lease up, ask for the next turn.

Owns what all steps have in common, so that a step is only its work. Killed anywhere, a turn leaves a lease that
runs out, and the reconciler gives its step another number (reconcile.py). A step that fails says why in the batch's
state, also where it is our mistake: it would fail again and again, and somebody waits. Knows nothing about what steps
do.
"""

import asyncio
import traceback
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import ParamSpec, TypeVar

import structlog

from pipeline.batch.directory import BatchDirectory
from pipeline.batch.errors import BatchError, BatchLocked, UnknownBatch
from pipeline.batch.record import STEPS, BatchRecord, StepName
from pipeline.batch.schedule import BatchScheduler
from pipeline.batch.store import NOW, STEP_GRACE_S, STEP_LEASE_S, BatchStore, StepTurn, new_nonce
from pipeline.clock import monotonic_s
from pipeline.errors import ServerError
from pipeline.transport import Transport
from stages.jobs.token_names import TokenNames

SLICE_S = 10.0  # a turn is over after this: arq's jobs are short, and whoever waits behind one gets on
RENEWALS_PER_LEASE = 4

P = ParamSpec("P")
T = TypeVar("T")
log = structlog.get_logger("jobs")


@dataclass(frozen=True, slots=True)
class Jobs:
    """What steps work with; all of it belongs to the process."""

    store: BatchStore
    scheduler: BatchScheduler
    transport: Transport
    names: TokenNames
    stopping: asyncio.Event
    max_queue: int


class Turn:
    """What a step knows about its own turn."""

    def __init__(self, jobs: Jobs, record: BatchRecord, lease: StepTurn) -> None:
        self.jobs = jobs
        self.record = record
        self.lease = lease
        self.directory = BatchDirectory(Path(record.directory))
        self._until = monotonic_s() + SLICE_S
        self.lost = False
        self.ended = False

    @property
    def is_over(self) -> bool:
        """Whether the step should come to an end: its time is up, it is told to stop, or it lost the lease."""
        return self.lost or self.jobs.stopping.is_set() or monotonic_s() >= self._until

    def check(self) -> None:
        """Raise TurnLost where going on would be for nothing; may be called from a thread."""
        if self.lost or self.jobs.stopping.is_set():
            raise TurnLost

    async def in_thread(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Return what the work returns. Cancelled, it ends when the work does, whose files must stay open so long."""
        running = asyncio.ensure_future(asyncio.to_thread(work, *args, **kwargs))
        try:
            return await asyncio.shield(running)
        except asyncio.CancelledError:
            self.lost = True
            await asyncio.gather(running, return_exceptions=True)
            raise


class TurnLost(Exception):  # noqa: N818 - reads as the fact it states
    """The turn ended before its work did; the next one begins it again."""


Step = Callable[[Turn], Awaitable[None]]


async def take_turn(jobs: Jobs, name: StepName, step: Step, batch_id: str, number: int) -> None:
    """Work one turn of a step, if it is this job's to work."""
    turn = StepTurn(batch_id, name, number, new_nonce())
    try:
        if await jobs.store.begin(turn) != "ok":
            return
        await _work(jobs, turn, step)
        state = (await jobs.store.read(batch_id)).state
        if not jobs.stopping.is_set():
            await jobs.scheduler.drive(jobs.store, batch_id, state)
    except UnknownBatch:  # deleted under our hands
        return
    except ServerError as error:  # the lease runs out, and the step is tried again
        log.warning("step_gave_up", batch_id=batch_id, step=name, problem=str(error))


async def _work(jobs: Jobs, turn: StepTurn, step: Step) -> None:
    mine = Turn(jobs, await jobs.store.read(turn.batch_id), turn)
    renewing = asyncio.create_task(_renew(jobs.store, turn, mine))
    try:
        await step(mine)
    except (ServerError, UnknownBatch):
        raise
    except (TurnLost, BatchLocked):
        pass
    except (BatchError, OSError) as error:
        await _fail(jobs.store, turn, _reason(error, mine.record))
    except Exception as error:  # noqa: BLE001 - the harness of all steps: whoever waits must hear of it
        # Neither its text nor its traceback's: they may hold a prompt.
        where = traceback.extract_tb(error.__traceback__)[-1]
        place = f"{where.filename}:{where.lineno}"
        log.error("step_broke", batch_id=turn.batch_id, step=turn.step, error=type(error).__name__, place=place)  # noqa: TRY400
        await _fail(jobs.store, turn, f"{turn.step} broke with {type(error).__name__}; see the log of jobs")
    finally:
        mine.ended = True
        renewing.cancel()
        await asyncio.gather(renewing, return_exceptions=True)
    # One whose time was up goes on at once; one that had nothing more to do looks again in a while.
    await jobs.store.end(turn, 0.0 if mine.is_over else STEP_GRACE_S)


def _reason(error: BatchError | OSError, record: BatchRecord) -> str:
    if isinstance(error, OSError) and error.filename is None:  # of a full disk, say
        return f"{error} (its files are in {record.directory}, its output is {record.options.target})"
    return str(error)


async def _fail(store: BatchStore, turn: StepTurn, reason: str) -> None:
    if await store.begin(turn) != "ok":
        return  # whoever has the turn now may find things in order
    await store.move(turn.batch_id, tuple(STEPS), "failed", {"error": reason, "ended_ms": NOW})
    log.warning("batch_failed", batch_id=turn.batch_id, step=turn.step, reason=reason)


async def _renew(store: BatchStore, turn: StepTurn, mine: Turn) -> None:
    while not mine.lost and not mine.ended:  # said twice: a cancellation in the middle of a call may get lost
        await asyncio.sleep(STEP_LEASE_S / RENEWALS_PER_LEASE)
        try:
            mine.lost = await store.begin(turn) != "ok"
        except ServerError as error:
            log.warning("step_not_renewed", batch_id=turn.batch_id, step=turn.step, problem=str(error))
