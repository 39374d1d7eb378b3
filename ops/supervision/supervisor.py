"""Keeps the processes of a stack running: starts them, knows which are ready, and changes how many there are.

Owns the slots (slot.py), each of which restarts its process, and the question who has registered. Decides what
the end of a slot means:

    it was told to leave                            nothing: scaled down
    it was added later and was never ready          the slot is given up, whoever scaled up is told why
    any other                                       the whole stack is given up

Knows nothing about what the processes do.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence, Set
from functools import partial
from typing import Any, ClassVar

import structlog

from ops.supervision.crashes import RestartPolicy, StageFailed
from ops.supervision.procfile import ProcfileLine
from ops.supervision.slot import Slot
from ops.supervision.slot_status import SlotStatus
from ops.supervision.slots import Slots, Surroundings
from pipeline.errors import InvalidRequest, ServerError, SluiceError

READY_POLL_S = 0.1  # only while somebody is not ready
MAX_REPLICAS = 64  # of one stage, those that are leaving included
LEAVE_GRACE_S = 60.0  # a long answer; what is not finished by then is taken over when its lease ends

logger = structlog.get_logger("supervisor")

ListReady = Callable[[], Awaitable[Set[int]]]
"""Returns the pids that are registered as ready."""


class NotScalable(SluiceError):  # noqa: N818 - reads as the fact it states
    """The stack cannot be scaled at the moment: it is starting, stopping, or still busy with the last change."""

    retryable: ClassVar[bool] = True
    code: ClassVar[str] = "not_scalable"


class Supervisor:
    """Runs every line of a Procfile, some of them several times."""

    def __init__(
        self,
        lines: Sequence[ProcfileLine],
        replicas: Mapping[str, int],
        surroundings: Surroundings,
        list_ready: ListReady,
        policy: RestartPolicy | None = None,
        leave_grace_s: float = LEAVE_GRACE_S,
    ) -> None:
        unknown = replicas.keys() - {line.stage for line in lines}
        if unknown:
            raise ValueError(f"no line of the Procfile is named {', '.join(sorted(unknown))}")
        self.stages = tuple(line.stage for line in lines)
        self._log_dir = surroundings.log_dir
        self._list_ready = list_ready
        self._leave_grace_s = leave_grace_s
        self._slots = Slots({line.stage: line.command for line in lines}, surroundings, policy or RestartPolicy())
        self._tasks: set[asyncio.Task[None]] = set()
        self._failure: asyncio.Future[StageFailed] | None = None
        self._stopping = False
        self._all_ready_once = False
        for line in lines:
            for _ in range(replicas.get(line.stage, 1)):
                self._slots.add(line.stage).final_if_unready = True

    async def start(self) -> None:
        """Start all processes, and the tasks that look after them."""
        self._failure = asyncio.get_running_loop().create_future()
        self._log_dir.mkdir(parents=True, exist_ok=True)
        for slot in self._slots:
            self._run(slot)
        self._own(self._watch_ready())

    async def wait_ready(self) -> None:
        """Return when all processes are ready.

        Raises:
            StageFailed: one died, or was not ready in time.
        """
        failed = asyncio.ensure_future(self.wait_failed())
        ready = asyncio.ensure_future(self._wait_all_ready())
        try:
            await asyncio.wait({failed, ready}, return_when=asyncio.FIRST_COMPLETED)
            if failed.done():
                raise failed.result()
        finally:
            failed.cancel()
            ready.cancel()
            await asyncio.gather(failed, ready, return_exceptions=True)
        self._all_ready_once = True
        for slot in self._slots:
            slot.final_if_unready = False

    async def wait_failed(self) -> StageFailed:
        """Return what made the supervisor give up; never returns while it has not."""
        if self._failure is None:
            raise RuntimeError("the supervisor was not started")
        return await asyncio.shield(self._failure)

    def states(self) -> list[SlotStatus]:
        """Return one status for each process, in the order of the Procfile, those that are leaving included."""
        return [slot.status() for slot in self._slots]

    def scale(self, replicas: Mapping[str, int]) -> None:
        """Have so many processes of these stages from now on; wait_settled() waits for it.

        More are started at once, under the lowest free numbers; of fewer, those that are not ready
        are asked to finish, and then the highest-numbered.

        Raises:
            InvalidRequest: no such stage, or a number outside 1 to MAX_REPLICAS; then nothing has changed.
            NotScalable: the stack is starting or stopping, or processes that are leaving take the room.
        """
        for stage, wanted in replicas.items():
            self._check_scale(stage, wanted)
        for stage, wanted in replicas.items():
            staying = self._slots.staying(stage)
            logger.info("scaling", stage=stage, before=len(staying), after=wanted)
            for slot in sorted(staying, key=lambda slot: not slot.ready.is_set())[wanted:]:
                slot.leaving.set()  # now, so that whoever asks next counts right
                self._own(slot.leave(self._leave_grace_s))
            for _ in range(wanted - len(staying)):
                self._run(self._slots.add(stage))

    async def wait_settled(self, stages: Set[str], timeout_s: float) -> bool:
        """Return True when the processes of these stages are ready or gone, False when time is up first.

        Raises:
            StageFailed: one that was added is given up, because it never got ready.
        """
        slots = [slot for slot in self._slots if slot.stage in stages]
        waits = [asyncio.create_task(slot.settled()) for slot in slots]
        try:
            _, pending = await asyncio.wait(waits, timeout=timeout_s) if waits else (set(), set())
        finally:
            for wait in waits:
                wait.cancel()
        for slot in slots:
            if slot.failure is not None:
                raise slot.failure
        return not pending

    async def stop(self, grace_s: float, order: Sequence[str] = ()) -> None:
        """Ask all processes to finish, end those that have not after grace_s seconds; none is left.

        Args:
            grace_s: for all together.
            order: stages that are asked one after the other, each when the one before has ended or has used its share
                of the time up, which leaves that one until the end all the same; the rest last.
        """
        self._stopping = True
        deadline = time.monotonic() + grace_s
        groups = self._slots.in_groups(order)
        leaving: list[asyncio.Task[None]] = []
        try:
            for position, group in enumerate(groups):
                left_s = max(deadline - time.monotonic(), 0)
                asked = [self._own(slot.leave(left_s)) for slot in group]
                leaving += asked
                await asyncio.wait(asked, timeout=left_s / (len(groups) - position))
            await asyncio.gather(*leaving)
        finally:
            await asyncio.gather(*(slot.leave(0) for slot in self._slots))  # there are some when this was interrupted
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    def _run(self, slot: Slot) -> None:
        self._own(slot.run(), partial(self._slot_ended, slot))

    def _own(
        self, work: Coroutine[Any, Any, None], ended: Callable[[asyncio.Task[None]], None] | None = None
    ) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(ended or self._ended)
        return task

    def _slot_ended(self, slot: Slot, task: asyncio.Task[None]) -> None:
        self._slots.remove(slot)
        error = None if task.cancelled() else task.exception()
        if not isinstance(error, StageFailed):
            self._ended(task)
        elif slot.leaving.is_set():
            pass
        elif slot.ever_ready or not self._all_ready_once:
            if self._failure is not None and not self._failure.done():
                self._failure.set_result(error)
        else:
            logger.error("process_given_up", process=slot.name, problem=error.problem)

    def _ended(self, task: asyncio.Task[None]) -> None:
        """Pass an unforeseen error on to whoever waits, who would wait in vain."""
        error = None if task.cancelled() else task.exception()
        if error is not None and self._failure is not None and not self._failure.done():
            self._failure.set_exception(error)

    def _check_scale(self, stage: str, wanted: int) -> None:
        if stage not in self.stages:
            raise InvalidRequest(stage, f"is no stage of this stack; there are {', '.join(self.stages)}")
        if not 1 <= wanted <= MAX_REPLICAS:
            raise InvalidRequest(stage, f"{wanted} processes; a stage has at least 1 and at most {MAX_REPLICAS}")
        if not self._all_ready_once or self._stopping:
            raise NotScalable(
                f"the stack is {'stopping' if self._stopping else 'starting'}; it is scaled while it runs"
            )
        num_leaving = len(self._slots.of(stage)) - len(self._slots.staying(stage))
        if wanted + num_leaving > MAX_REPLICAS:
            raise NotScalable(f"{num_leaving} processes of {stage} are still stopping, and {MAX_REPLICAS} is the most")

    async def _wait_all_ready(self) -> None:
        for slot in self._slots:
            await slot.ready.wait()

    async def _watch_ready(self) -> None:
        seen: Set[int] = frozenset()
        while not self._stopping:  # a cancellation alone may be lost inside the client library
            waiting = [slot for slot in self._slots if slot.pid is not None and not slot.ready.is_set()]
            # Twice in a row: a process that finds that it does not fit to the others leaves at once.
            before, seen = seen, await self._ready_pids() if waiting else frozenset[int]()
            for slot in waiting:
                if slot.pid in before & seen:
                    slot.mark_ready()
            await asyncio.sleep(READY_POLL_S)

    async def _ready_pids(self) -> Set[int]:
        try:
            return await self._list_ready()
        except ServerError as error:  # it may be back before anybody is given up
            logger.info("readiness_unknown", problem=str(error))
            return frozenset()
