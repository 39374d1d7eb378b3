"""Where a row happens: homes and stacks that are there to be struck, and nothing of them afterwards.

Owns a stack's life, and its settings where they differ from the user's. What is done to a stack, and what is thought of
it, is trial.py's.
"""

import shutil
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

from ops.chaos.homes import new_home
from ops.chaos.inquiry import Inquiry, Models
from ops.chaos.processes import gone, pids_of
from ops.chaos.reference import Reference
from ops.chaos.remains import blobs_left
from ops.chaos.trial import Trial
from ops.stack import Stack
from ops.supervision.crashes import RestartPolicy
from pipeline.settings import Settings

LEASE_S = 1.0
CHUNK_TOKENS = 64
POLICY = RestartPolicy(first_delay_s=0.05, max_delay_s=0.2, max_in_a_row=1000)
"""Faults are many and on purpose: nobody has to wait, and nobody to give up because they are many."""

ENDING = ("=kill", "=term", "=hang")
"""Faults that end a process; one that hangs for good is ended too."""


class Lab(Inquiry):
    """One row's means, and what it found."""

    def __init__(
        self,
        base: Settings,
        models: Models,
        reference: Reference,
        *,
        long: bool = False,
        timed: bool = True,
        logs: Path | None = None,
    ) -> None:
        """Prepare it; `logs` is where the logs of its stacks are kept, and the rest is an Inquiry's."""
        super().__init__(models, reference, long=long, timed=timed)
        self._base = base
        self._logs = logs

    def settings(self, **fields: object) -> dict[str, object]:
        """Return what differs from the user's settings in every stack that is struck."""
        usual = {"model": str(self.models.served), "lease_s": LEASE_S, "chunk_tokens": CHUNK_TOKENS}
        return usual | fields

    @asynccontextmanager
    async def home(self, **fields: object) -> AsyncIterator[Settings]:
        """Give a home without a stack; its logs are kept where that was asked for."""
        with new_home(self._base, **self.settings(**fields)) as settings:
            try:
                yield settings
            finally:
                self._keep_logs(settings.home / "logs")

    @asynccontextmanager
    async def trial(
        self,
        replicas: Mapping[str, int] | None = None,
        *,
        fault: str | None = None,
        procfile: Path | None = None,
        **fields: object,
    ) -> AsyncIterator[Trial]:
        """Run a stack in a home of its own; see trial_in.

        Args:
            replicas: processes of each stage.
            fault: which fault points strike (pipeline/faults.py).
            procfile: other commands than the project's.
            fields: settings.
        """
        async with self.home(**fields) as settings:
            struck = {"fault": fault, "fault_dir": settings.home / "faults"} if fault else {}
            async with self.trial_in(settings.model_copy(update=struck), replicas, procfile=procfile) as trial:
                trial.may_die = any(action in (fault or "") for action in ENDING)
                yield trial

    @asynccontextmanager
    async def trial_in(
        self,
        settings: Settings,
        replicas: Mapping[str, int] | None = None,
        *,
        procfile: Path | None = None,
        judge_url: str | None = None,
    ) -> AsyncIterator[Trial]:
        """Run a stack to be struck; when it has stopped, nothing of it may be left.

        `judge_url` is where the checker finds the server, if it must not go the way of the stages.
        """
        warnings: list[str] = []
        stack = Stack(settings, replicas, policy=POLICY, warn=warnings.append, procfile=procfile)
        pids: dict[str, int] = {}
        async with stack, AsyncExitStack() as ending:
            trial = Trial(self, stack, judge_url)
            ending.push_async_callback(trial.close)
            ending.callback(lambda: pids.update(pids_of(stack)))
            yield trial
            trial.judge_deaths()
        await gone(pids)
        self.blame(f"at the end of the stack: {warning}" for warning in warnings)
        self.blame(f"after the stack: {left}" for left in blobs_left(settings))

    def _keep_logs(self, logs: Path) -> None:
        if self._logs is not None and logs.is_dir():
            number = 1 + sum(1 for _ in self._logs.glob("*")) if self._logs.is_dir() else 1
            shutil.copytree(logs, self._logs / f"stack-{number}")
