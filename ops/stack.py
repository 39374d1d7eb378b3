"""A whole stack for as long as a `with` lasts: server, pool, stages, and nothing of them afterwards.

Owns the order of starting and stopping, and what the stages get as their environment. Knows nothing about
batches or text.

    start    server -> pool -> transport -> stages -> all ready
    stop     take back unfinished requests -> stages -> what they left -> transport -> pool -> server
"""

import asyncio
import contextlib
import os
import socket
from collections.abc import Awaitable, Mapping, Set
from contextlib import AsyncExitStack
from pathlib import Path

from redis.exceptions import RedisError

from ops.external import JOBS, OWN_STACK, ExternalStack, external_stack, needed_stages
from ops.leftovers import Leftovers
from ops.pool_share import PoolShare
from ops.running import AttachedStack, find_advert
from ops.server.valkey import EmbeddedValkey
from ops.serving import Serving, Warn, warn_on_stderr
from ops.supervision.crashes import RestartPolicy
from ops.supervision.process import Echo
from ops.supervision.procfile import default_procfile, read_procfile
from ops.supervision.slots import Surroundings
from ops.supervision.supervisor import Supervisor
from pipeline.connect import host_and_pid, open_transport
from pipeline.errors import SluiceError
from pipeline.keys import POOLED_STAGES, STAGES
from pipeline.settings import PREFIX, Settings
from pipeline.transport import Transport
from stages.common.handshake import Registration
from stages.gguf.model_files import check_gguf, resolve

GRACE_S = 15.0  # an engine step and a lease, which is as long as handing work back may take
DRAIN_ORDER = (JOBS, "tokenizer", "prefill", "compressor", "decode")
"""Whoever feeds others stops before them, so that what it has in hand still finds its way down."""
TIDY_TIMEOUT_S = 10.0  # a server that is gone must not hold up the end


class Stack(Serving):
    """A stack of this process's own."""

    def __init__(
        self,
        settings: Settings,
        replicas: Mapping[str, int] | None = None,
        *,
        procfile: Path | None = None,
        policy: RestartPolicy | None = None,
        echo: Echo | None = None,
        warn: Warn = warn_on_stderr,
        passing: bool = False,
    ) -> None:
        """Plan a stack; entering it starts it.

        Args:
            settings: of this process; the stages get the same.
            replicas: how many processes of each stage; one by default, 0 of one that is not needed.
            procfile: which stages there are; the project's own by default.
            policy: when a stage is restarted and when it is given up.
            echo: gets the lines that the stages log, besides their files.
            warn: gets a sentence for what should not be but stops nothing.
            passing: it is there for one command only, and says so to others that look for a stack.
        """
        super().__init__(settings, warn)
        self.supervisor: Supervisor | None = None
        self._replicas = dict(replicas or {})
        self._procfile = procfile or default_procfile()
        self._policy = policy
        self._echo = echo
        self._passing = passing
        self._valkey: EmbeddedValkey | None = None

    @property
    def greeting(self) -> str:
        """Say that it takes a moment."""
        return "starting the stack"

    def afterwards(self, batch_id: str) -> str:  # noqa: ARG002 - the stack of others has more to say
        """Say nothing: without a stack a batch waits."""
        return ""

    async def wait_failed(self) -> SluiceError:
        """Return why the stack cannot go on; never return while it can."""
        watchers: list[Awaitable[SluiceError]] = []
        if self.supervisor is not None:
            watchers.append(self.supervisor.wait_failed())
        if self._valkey is not None:
            watchers.append(self._valkey.wait_failed())
        return await _first(watchers)

    async def _start(self, starting: AsyncExitStack) -> None:
        check_gguf(resolve(self.settings.model, self.settings.home))
        self.settings.home.mkdir(mode=0o700, parents=True, exist_ok=True)
        if self.settings.redis_url is None:
            await self._start_server(starting)
        share = PoolShare(self.settings.pool_dir, self.settings.kv_pool_bytes)
        starting.callback(share.close)
        self._transport = transport = await open_transport(self.settings, pool_id=share.pool_id, warn=self._warn)
        starting.push_async_callback(transport.close)
        leftovers = Leftovers(self.settings, share.pool_id)
        starting.push_async_callback(leftovers.close)
        starting.push_async_callback(self._clear_up, share, leftovers)
        await leftovers.drop_dead_processes(await transport.processes())
        if self._passing:
            await self._say_passing(transport, starting)
        self.supervisor = self._plan_stages(transport)
        starting.push_async_callback(self._stop_stages, self.supervisor, leftovers)
        await self.supervisor.start()
        starting.push_async_callback(self._cancel_unfinished)
        await self.watched(self.supervisor.wait_ready())

    async def _say_passing(self, transport: Transport, starting: AsyncExitStack) -> None:
        registration = Registration(transport, OWN_STACK, {})
        await registration.announce()
        keeping = asyncio.create_task(registration.keep())
        starting.push_async_callback(_end, keeping)

    def _plan_stages(self, transport: Transport) -> Supervisor:
        around = Surroundings(
            stage_environment(self.settings), self._procfile.parent, self.settings.home / "logs", self._echo
        )
        lines = read_procfile(self._procfile)
        return Supervisor(lines, self._replicas, around, lambda: _local_pids(transport), self._policy)

    async def _stop_stages(self, supervisor: Supervisor, leftovers: Leftovers) -> None:
        """Stop the stages one after the other where there is work to pass on, else at once, which is faster."""
        has_work = False  # also where there is no server: then nobody can pass on anything
        if not self._unfinished():  # else it was just taken back
            with contextlib.suppress(RedisError, OSError):
                async with asyncio.timeout(TIDY_TIMEOUT_S):
                    has_work = await leftovers.count(STAGES) > 0
        await supervisor.stop(GRACE_S, DRAIN_ORDER if has_work else ())

    async def _start_server(self, starting: AsyncExitStack) -> None:
        self._valkey = EmbeddedValkey(self.settings.home)
        starting.push_async_callback(self._valkey.stop)
        url = await self._valkey.start()
        self.settings = self.settings.model_copy(update={"redis_url": url})

    async def _clear_up(self, share: PoolShare, leftovers: Leftovers) -> None:
        """Leave neither entries nor blobs, and say what should not have been there."""
        try:
            async with asyncio.timeout(TIDY_TIMEOUT_S):
                await leftovers.remove_entries(self._unfinished())
                if not share.is_last():
                    return
                num_referring = await leftovers.count(POOLED_STAGES)
                # A server of others has their entries too; those of this pool are ours.
                num_left = await leftovers.count(STAGES) if self._valkey is not None else num_referring
        except (RedisError, OSError) as error:
            self._warn(f"the queues could not be cleared up: {error}")
            return
        if num_left and not self.leave_work:
            self._warn(f"{num_left} entries are left in the queues; the next start goes on with them")
        if num_referring:
            return  # then the blobs are not garbage
        swept = share.sweep()
        if swept.num_blobs and not self._unfinished():
            self._warn(f"{swept.num_blobs} blobs were left in the pool, and are removed")


def stage_environment(settings: Settings) -> dict[str, str]:
    """Return the environment of a stage: this process's, with exactly these settings.

    What numba and torch read is not in it: each stage sets that itself, whoever starts it.
    """
    kept = {name: value for name, value in os.environ.items() if not name.upper().startswith(PREFIX)}
    return kept | settings.environment()


async def _local_pids(transport: Transport) -> Set[int]:
    """Return the processes of this host that are registered."""
    places = [host_and_pid(process.consumer) for process in await transport.processes()]
    return {pid for host, pid in places if host == socket.gethostname() and pid is not None}


async def _first(watchers: list[Awaitable[SluiceError]]) -> SluiceError:
    tasks = [asyncio.ensure_future(watcher) for watcher in watchers]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        return done.pop().result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _end(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def with_model_of_stack(settings: Settings) -> Settings:
    """Return the settings with the model that `sluice up` serves, where one runs and nobody chose another."""
    if "model" in settings.model_fields_set:
        return settings
    advert = await find_advert(settings)
    return settings if advert is None else settings.model_copy(update={"model": advert.model})


async def choose_stack(
    settings: Settings, replicas: Mapping[str, int], warn: Warn = warn_on_stderr, *, with_jobs: bool = True
) -> Serving:
    """Return the stack that is there, else one of our own; enter it.

    There is one where `sluice up` runs in this home, or where every stage has a process at SLUICE_REDIS_URL.
    A stack for a single request has no jobs process: batches that were interrupted are not for it to go on with.

    Raises:
        StackIncomplete: some of the stages at SLUICE_REDIS_URL that the command needs are missing.
        ServerError: that server cannot be used.
    """
    advert = await find_advert(settings)
    needed = needed_stages(with_jobs=with_jobs)
    if advert is None and await external_stack(settings, needed):
        if replicas:
            warn("the stack at SLUICE_REDIS_URL decides how many processes there are, not this command")
        return ExternalStack(settings, warn, needed)
    if advert is None:
        return Stack(settings, replicas if with_jobs else {**replicas, JOBS: 0}, warn=warn, passing=True)
    if replicas:
        warn(f"`sluice up` (process {advert.pid}) decides how many processes there are, not this command")
    return AttachedStack(settings, advert, warn)
