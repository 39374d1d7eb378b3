"""Rows about the server: killed, frozen, emptied, set back, full, and with files that were cut."""

import asyncio
import re
import time
from collections.abc import Sequence
from pathlib import Path

from redis.exceptions import OutOfMemoryError

from ops.chaos.asks import SOON_TOKENS, long_answers, long_prompts, short_ones
from ops.chaos.history import History, Seen, compared, stored_problems
from ops.chaos.lab import Lab
from ops.chaos.row import Row
from ops.chaos.server import AOF
from ops.chaos.trial import TIMEOUT_S, Trial
from ops.server.valkey import EmbeddedValkey, ValkeyFailed
from pipeline.client.client import Client
from pipeline.client.errors import QueueFull
from pipeline.connect import open_transport
from pipeline.errors import UnknownRequest

FSYNC_S = 1.0
"""What appendfsync everysec may lose."""
PACE_S = 0.02
PACED_S = 3.0
FROZEN_S = 10.0
TOLD_S = 15.0
"""In which readers of lost requests are told so: a page of their reading, and the server's start."""
DOOR_S = 1.0
SAID_CHARS = 120


async def f10(lab: Lab) -> None:
    """The server is killed while requests are accepted all the time."""
    asks = short_ones(lab, int(PACED_S / PACE_S))
    await lab.expected([*asks, *long_answers(lab)])
    async with lab.trial() as trial:
        sent = trial.send(long_answers(lab))
        await trial.tokens(SOON_TOKENS, sent)
        killing = asyncio.create_task(_kill_after(trial, PACED_S / 2))
        for ask in asks:
            sent += trial.send([ask])
            await asyncio.sleep(PACE_S)
        killed_at, back_s = await killing
        await trial.ended(sent)
        lost = [seen for seen in sent if isinstance(seen.error, UnknownRequest)]
        lab.note(
            f"the server was back after {back_s:.1f} s; {len(lost)} of {len(sent)} were lost, and their readers told"
        )
        for seen in lost:
            assert seen.accepted_at is not None, "its reader was told after it was accepted"
            early_s = killed_at - seen.accepted_at
            lab.require(early_s <= FSYNC_S, f"{seen.request_id} was accepted {early_s:.1f} s before, and is lost")
        await trial.judge([seen for seen in sent if seen not in lost], recovers=False)
        trial.judge_recovery(sent, more_s=back_s)


async def f11(lab: Lab) -> None:
    """Groups are destroyed; then everything is deleted; then the server starts without its files."""
    async with lab.trial() as trial:
        sent = await _under_way(trial)
        num_groups = await _destroy_groups(trial)
        await trial.judge(sent)
        lab.note(f"{num_groups} groups destroyed")
        for how in ("FLUSHALL", "started empty"):
            sent = await _under_way(trial)
            began_at = time.monotonic()
            if how == "FLUSHALL":
                await trial.redis.flushall()
            else:
                await trial.server.kill(trial.server.empty)
            await trial.ended(sent)
            lab.note(f"{how}: readers were told after {time.monotonic() - began_at:.1f} s")
            lab.require_soon(time.monotonic() - began_at < TOLD_S, f"{how}: readers were told late")
            for seen in sent:
                told = isinstance(seen.error, UnknownRequest) and "lost" in str(seen.error)
                lab.require(told, f"{how}: {seen.request_id} ended with {seen.error or seen.terminals}")
            await trial.judge_remains()  # the pool is swept before there is new work
            await trial.judge(trial.send(long_prompts(lab)), recovers=False)


async def f12(lab: Lab) -> None:
    """The server stands still for much longer than a lease."""
    async with lab.trial() as trial:
        sent = await _under_way(trial)
        trial.mark()
        pid = await trial.server.freeze()
        await asyncio.sleep(FROZEN_S)  # the fault is the time itself
        trial.stopped.resume(pid)
        await trial.judge(sent, recovers=False)
        trial.judge_recovery(sent, more_s=FROZEN_S)


async def f13(lab: Lab) -> None:
    """The server's file ends in the middle of a command; then it is damaged in its middle."""
    asks = short_ones(lab, 20)
    await lab.expected(asks)
    async with lab.home() as settings:
        server = EmbeddedValkey(settings.home)
        own = settings.model_copy(update={"redis_url": await server.start()})
        transport = await open_transport(own)
        history = History(Client(transport, own))
        sent = history.send(asks)
        await history.accepted(sent, timeout_s=TIMEOUT_S)
        await history.close()
        await transport.close()
        await server.stop()
        again = [Seen(seen.ask, seen.request_id, seen.submitted_at, seen.accepted_at) for seen in sent]
        _cut(settings.home / "valkey" / AOF)
        async with lab.trial_in(settings) as trial:
            trial.history.resume(again)
            await trial.ended(again)
            lost = [seen for seen in again if isinstance(seen.error, UnknownRequest)]
            lab.note(f"started on a file that was cut; {len(lost)} of {len(again)} were lost, and their readers told")
            lab.require(len(lost) <= 1, f"{len(lost)} requests were lost with one command")
            await trial.judge([seen for seen in again if seen not in lost], recovers=False)
        _damage(settings.home / "valkey" / AOF)
        server = EmbeddedValkey(settings.home)
        try:
            await server.start()
        except ValkeyFailed as error:
            lab.note(f"damaged in its middle, it says: {str(error)[-SAID_CHARS:]}")
            lab.require("append only file" in str(error), f"it is not said why: {error}")
        else:
            lab.blame(["the server started on a damaged file and said nothing"])
        finally:
            await server.stop()


async def f18(lab: Lab) -> None:
    """The server has no memory left for anything new."""
    more = long_prompts(lab)
    await lab.expected(more)
    async with lab.trial() as trial:
        limit = (await trial.redis.config_get("maxmemory"))["maxmemory"]
        sent = await _under_way(trial, 8)
        trial.mark()
        await trial.redis.config_set("maxmemory", await trial.server.memory_bytes() // 2)
        try:
            await trial.redis.set(f"{trial.keys.namespace}:probe", "x", ex=1)
            lab.blame(["the server is not full: it took a key"])
        except OutOfMemoryError:
            pass
        refused = trial.history.send(more, door_timeout_s=DOOR_S)
        await trial.accepted(refused)
        for seen in refused:
            lab.require(isinstance(seen.error, QueueFull), f"{seen.request_id} at the door: {seen.error or 'accepted'}")
        await trial.judge(sent, recovers=False)
        lab.note(f"{len(refused)} refused at the door, the others finished on a full server")
        await trial.redis.config_set("maxmemory", limit)
        await trial.judge(trial.send(more), recovers=False)


async def f40(lab: Lab) -> None:
    """The server comes back with its data of a second ago, after much has happened in that second."""
    asks = [*long_answers(lab, 4, 250), *long_prompts(lab, 4), *short_ones(lab, 24)]
    await lab.expected(asks)
    async with lab.trial() as trial:
        sent = trial.send(asks)
        await trial.tokens(SOON_TOKENS, sent)
        before = trial.settings.home / "before"
        await asyncio.to_thread(trial.server.copy_to, before)
        seen_before = sum(seen.num_tokens for seen in sent)
        await asyncio.sleep(FSYNC_S)  # the fault is what happens in this time
        num_ended = sum(seen.is_over for seen in sent)
        trial.mark()
        back_s = await trial.server.kill(lambda: trial.server.set_back_to(before))
        lost = sum(seen.num_tokens for seen in sent) - seen_before
        lab.note(f"{lost} tokens and {num_ended} ends were seen that the server forgot; it was back in {back_s:.1f} s")
        lab.require(lost > 0, "nothing happened in the second that was lost")
        await trial.ended(sent)
        expected = await lab.expected([seen.ask for seen in sent])
        lab.blame(compared(sent, expected))
        await trial.idle()
        lab.blame(await stored_problems(trial.redis, trial.keys, sent))
        await trial.judge_remains()


async def _under_way(trial: Trial, number: int = 4) -> list[Seen]:
    asks = long_answers(trial.lab, number)
    await trial.lab.expected(asks)
    sent = trial.send(asks)
    await trial.tokens(SOON_TOKENS, sent)
    trial.mark()
    return sent


async def _kill_after(trial: Trial, after_s: float) -> tuple[float, float]:
    """Kill the server; returns when that was, and how long it took to come back."""
    await asyncio.sleep(after_s)
    trial.mark()
    killed_at = time.monotonic()
    return killed_at, await trial.server.kill()


async def _destroy_groups(trial: Trial) -> int:
    num_destroyed = 0
    async for key in trial.redis.scan_iter(match=f"{trial.keys.namespace}:stream:*", _type="stream"):
        for group in await trial.redis.xinfo_groups(key):
            num_destroyed += await trial.redis.xgroup_destroy(key, group["name"])
    return num_destroyed


def _cut(directory: Path) -> None:
    """Cut the last command of the file in two."""
    [file] = _newest(directory)
    with file.open("r+b") as opened:
        opened.truncate(file.stat().st_size - 7)


def _damage(directory: Path) -> None:
    """Write over a command in the middle of the file."""
    [file] = _newest(directory)
    data = file.read_bytes()
    begins = re.compile(rb"\r\n\*\d+\r\n\$").search(data, len(data) // 2)
    assert begins is not None, "a file of many commands"
    with file.open("r+b") as opened:
        opened.seek(begins.start() + 2)
        opened.write(b"#####")


def _newest(directory: Path) -> Sequence[Path]:
    return sorted(directory.glob("*.incr.aof"))[-1:]


ROWS = [
    Row("F10", "kill -9 of the server under a steady load", "at most 1 s of accepts lost, and readers told", f10),
    Row(
        "F11", "groups destroyed; all keys deleted; started empty", "goes on; readers are told; the pool is swept", f11
    ),
    Row("F12", "the server frozen for 10 s", "no duplicate effect", f12),
    Row("F13", "the server's file cut, or damaged", "starts, or a clear message", f13),
    Row("F18", "the server's memory full", "refused at the door; nothing lost", f18),
    Row("F40", "the server set back by a second", "no old claim is honoured; the same tokens", f40),
]
