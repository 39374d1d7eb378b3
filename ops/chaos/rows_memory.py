"""Rows about memory: full, damaged, and filled faster than it is emptied."""

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from kv_store.pool import FilePool
from ops.chaos.asks import long_answers, long_prompts
from ops.chaos.damage import blobs_of, delete, delete_all, exchange, flip, sealed, truncate
from ops.chaos.inquiry import NotRun
from ops.chaos.lab import Lab
from ops.chaos.processes import pids_of
from ops.chaos.remains import held_credits
from ops.chaos.row import Row
from ops.chaos.trial import TIMEOUT_S, Trial
from pipeline.client.asks import NewRequest
from pipeline.client.errors import QueueFull
from pipeline.counters import KV_DAMAGED, KV_MISSING, KV_RECOMPUTED_TOKENS, REQUESTS_SENT_BACK

MIB = 1024**2
WATCH_S = 0.02
NEARLY_FULL = 0.8
FULL_S = 2.0
NUM_MANY, NUM_PROMPTS = 48, 24
EARLY = ("a", "e", "o", " ")
SLOW_STEP_S = 0.15
LONG_FLOOD_S = 180.0
FLOOD_S = 20.0
DOOR_S = 0.2


@dataclass(slots=True)
class Most:
    """The most of a pool that was seen in use, and how much work waited in front of prefill meanwhile."""

    credit_bytes: int = 0
    used_bytes: int = 0
    num_waiting: int = 0


async def f19(lab: Lab) -> None:
    """The pool is full by its quota, and by what its file system has, while decode stands still."""
    # Credit is taken for all that a request may come to: of these most end early, and promise much until then.
    many = [lab.ask(f"request {index}", 900, seed=index, temperature=0.8, stop=EARLY) for index in range(NUM_MANY)]
    prompts = long_prompts(lab, NUM_PROMPTS, 900, 60)
    await lab.expected([*many, *prompts])
    async with lab.trial(kv_pool_bytes=MIB, max_num_seqs=64) as trial, _watched_pool(trial) as most:
        await _fill(trial, many, lambda: most.credit_bytes > NEARLY_FULL * MIB and most.num_waiting > 0)
        await trial.judge(recovers=False)
        lab.note(f"quota 1024 KiB: credits up to {most.credit_bytes >> 10} KiB, blobs {most.used_bytes >> 10} KiB")
        lab.require(most.credit_bytes <= MIB, f"{most.credit_bytes} bytes were promised of {MIB}")
    size_bytes = MIB // 2
    async with (
        _small_file_system(size_bytes) as pool,
        lab.trial(kv_pool_dir=pool, kv_pool_bytes=4 * MIB, max_num_seqs=64) as trial,
        _watched_pool(trial) as most,
    ):
        await _fill(trial, prompts, lambda: _free_bytes(pool) < (1 - NEARLY_FULL) * size_bytes)
        free_bytes = _free_bytes(pool)
        await trial.judge(recovers=False)
        lab.note(f"file system of 512 KiB below a quota of 4096: {free_bytes >> 10} KiB were free")


def _free_bytes(directory: Path) -> int:
    status = os.statvfs(directory)
    return status.f_bavail * status.f_frsize


async def _fill(trial: Trial, asks: Sequence[NewRequest], is_full: Callable[[], bool]) -> None:
    """Send requests while decode is stopped, and let it go on when the pool has been full for a while."""
    trial.strike("decode", number=signal.SIGSTOP)
    trial.send(asks)
    await trial.until(is_full, lambda: "the pool was never nearly full")
    await asyncio.sleep(FULL_S)  # the fault is the time itself
    trial.stopped.resume(pids_of(trial.stack)["decode"])


async def f20(lab: Lab) -> None:
    """Blobs are deleted, cut, exchanged, and flipped in one bit, before decode reads them."""
    damages = (delete, truncate, flip, exchange, delete_all)
    asks = long_prompts(lab, len(damages) + 1)
    await lab.expected(asks)
    async with lab.trial() as trial:
        decode = pids_of(trial.stack)["decode"]
        trial.strike("decode", number=signal.SIGSTOP)
        sent = trial.send(asks)
        await sealed(trial, sent)
        pool = trial.settings.pool_dir
        blobs = {seen.request_id: blobs_of(pool, seen) for seen in sent}
        for damage, seen in zip(damages, sent, strict=False):
            damage(blobs[seen.request_id], blobs[sent[-1].request_id])
        trial.stopped.resume(decode)
        await trial.judge(sent, recovers=False)
        counted = await trial.counted()
        names = (KV_MISSING, KV_DAMAGED, KV_RECOMPUTED_TOKENS, REQUESTS_SENT_BACK)
        lab.note(", ".join(f"{name} {counted.get(name, 0)}" for name in names))
        for name in names:
            lab.require(counted.get(name), f"{name} is 0")


async def f28(lab: Lab) -> None:
    """Decode is much slower than prefill, for as long as requests come."""
    asks = long_answers(lab, 4, 40)
    await lab.expected(asks)
    fault = f"decode.step=delay:{SLOW_STEP_S}x*"
    async with (
        lab.trial(fault=fault, kv_pool_bytes=MIB, max_queue=8, max_num_seqs=2) as trial,
        _watched_pool(trial) as most,
    ):
        trial.mark()
        ends_at = time.monotonic() + (LONG_FLOOD_S if lab.long else FLOOD_S)
        num_refused, number = 0, 0
        while time.monotonic() < ends_at:
            number += 1
            [seen] = trial.history.send([asks[number % len(asks)]], door_timeout_s=DOOR_S)
            await trial.accepted([seen])
            num_refused += isinstance(seen.error, QueueFull)
        accepted = [seen for seen in trial.history.requests if seen.accepted_at is not None]
        await trial.judge(accepted, recovers=False)
        lab.note(
            f"{num_refused} of {number} refused at the door; credits up to {most.credit_bytes >> 10} KiB, blobs up to "
            f"{most.used_bytes >> 10} KiB of 1024"
        )
        lab.require(num_refused, "the door never closed")
        lab.require(most.num_waiting, "nothing ever waited in front of prefill")
        lab.require(max(most.credit_bytes, most.used_bytes) <= MIB, "the pool was over its cap")


@asynccontextmanager
async def _watched_pool(trial: Trial) -> AsyncIterator[Most]:
    most = Most()
    watching = asyncio.create_task(_watch(trial, most))
    try:
        yield most
        if watching.done():
            watching.result()  # what ended it, or what was seen would look like nothing
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)


async def _watch(trial: Trial, most: Most) -> None:
    with FilePool.open(trial.settings.pool_dir, trial.settings.kv_pool_bytes) as pool:
        while True:
            held = await held_credits(trial.redis, trial.keys)
            most.credit_bytes = max(most.credit_bytes, sum(held.values()))
            most.used_bytes = max(most.used_bytes, pool.usage().used_bytes)
            waiting = await trial.redis.xlen(trial.keys.stream("prefill", "interactive"))
            most.num_waiting = max(most.num_waiting, waiting)
            await asyncio.sleep(WATCH_S)


@asynccontextmanager
async def _small_file_system(size_bytes: int) -> AsyncIterator[Path]:
    """Give a directory on a tmpfs of that size, in a name space of its own: mounting needs no right there.

    Raises:
        NotRun: this machine does not let its users have name spaces.
    """
    script = f"mount -t tmpfs -o size={size_bytes} tmpfs /mnt && mkdir -m 700 /mnt/pool && echo ready && exec cat"
    try:
        holder = await asyncio.create_subprocess_exec(
            *("unshare", "--user", "--map-root-user", "--mount", "sh", "-c", script),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
        )
    except FileNotFoundError:
        raise NotRun("a full file system: there is no unshare to make a small one with") from None
    assert holder.stdin is not None, "it was asked for"
    assert holder.stdout is not None, "it was asked for"
    try:
        async with asyncio.timeout(TIMEOUT_S):
            if await holder.stdout.readline() != b"ready\n":
                raise NotRun("a full file system: no name space to mount a small one in")
        yield Path(f"/proc/{holder.pid}/root/mnt/pool")
    finally:
        holder.stdin.close()  # `cat` ends, and the file system with it
        await holder.wait()


ROWS = [
    Row("F19", "shared memory full, by quota and by file system", "prefill waits on credits; no SIGBUS", f19),
    Row("F20", "a blob deleted, cut, exchanged or one bit flipped", "never a wrong token; recomputed, counted", f20),
    Row(
        "F28",
        "decode much slower than prefill for long",
        "prefill waits; the pool stays under its cap; the door refuses",
        f28,
    ),
]
