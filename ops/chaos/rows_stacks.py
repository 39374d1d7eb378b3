"""Rows about a stack as a whole: scaled, killed, run for long, started with parts that do not fit, on other clocks."""

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from ops.chaos import other_clock
from ops.chaos.asks import SOON_TOKENS, long_answers, short_ones
from ops.chaos.history import History, Seen
from ops.chaos.lab import Lab
from ops.chaos.launchers import write_procfile
from ops.chaos.processes import extra_stage, gone, is_running, pids_of
from ops.chaos.row import Row
from ops.chaos.tiny_model import write_tiny_llama
from ops.chaos.trial import TIMEOUT_S, Trial
from ops.control.client import ask_status
from ops.running import AttachedStack, find_advert
from ops.stack import stage_environment
from ops.supervision.procfile import default_procfile
from ops.supervision.slot_status import SlotStatus
from pipeline.client.asks import NewRequest
from pipeline.keys import STAGES
from pipeline.settings import Settings

NUM_REUSED, ONE_ROUND = 500, 100
MAX_GROWTH = 1.15  # of a process's memory, between the first hundred requests and the last
AGED_MS = 3_600_000
POLL_S = 0.05


async def f17(lab: Lab) -> None:
    """The clocks of all stages jump by an hour all the time; leases grow old by an hour on the server."""
    asks = long_answers(lab, 8)
    await lab.expected(asks)
    async with lab.home() as settings:
        procfile = write_procfile(settings.home / "Procfile", other_clock)
        async with lab.trial_in(settings, {"decode": 2}, procfile=procfile) as trial:
            trial.mark()
            sent = trial.send(asks)
            num_aged = 0
            while not all(seen.is_over for seen in sent):
                num_aged += await _age_leases(trial)
                await asyncio.sleep(10 * POLL_S)
            await trial.judge(sent, recovers=False)
            lab.note(
                f"clocks of stages jumped by an hour; {num_aged} leases made an hour older, as if the server's did"
            )
            lab.require(num_aged, "no lease was held when it was made older")


async def f29(lab: Lab) -> None:
    """Decode is scaled up and down while requests flow."""
    asks = long_answers(lab, 10, 150)
    await lab.expected(asks)
    async with lab.trial(max_num_seqs=4) as trial:
        supervisor = trial.stack.supervisor
        assert supervisor is not None, "the stack is up"
        flowing = asyncio.create_task(_flow(trial, asks))
        await trial.tokens(SOON_TOKENS)
        trial.mark()
        trial.may_die = True  # those that are one too many
        for number in (4, 1):
            supervisor.scale({"decode": number})
            lab.require(await supervisor.wait_settled({"decode"}, TIMEOUT_S), f"not settled with {number} processes")
            pids = {name: pid for name, pid in pids_of(trial.stack).items() if name.startswith("decode")}
            lab.require(len(pids) == number, f"{len(pids)} processes of decode and not {number}")
            await trial.tokens(sum(seen.num_tokens for seen in trial.history.requests) + SOON_TOKENS)
        flowing.cancel()
        await asyncio.gather(flowing, return_exceptions=True)
        await trial.judge(recovers=False)
        names = await _consumers(trial, "decode")
        lab.note(f"consumers that are left: {len(names)}")
        lab.require(names <= set(pids.values()), f"consumers of processes that have left: {names - set(pids.values())}")
        lab.require(not [death for death in trial.deaths.all if death.name == "decode"], "the process that stayed died")


async def f35(lab: Lab) -> None:
    """`sluice up` is killed under load, and started again in the same home."""
    asks = long_answers(lab)
    await lab.expected(asks)
    async with lab.home() as settings:
        async with _running_up(settings) as up:
            advert = await find_advert(settings)
            assert advert is not None, "it answers"
            async with AttachedStack(settings, advert) as stack:
                history = History(stack.client())
                sent = history.send(asks)
                await history.tokens(SOON_TOKENS, sent, timeout_s=TIMEOUT_S)
                pids = {slot.name: slot.pid for slot in await ask_status(settings.home) or () if slot.pid is not None}
                servers = _servers(settings.home)
                up.kill()
                killed_at = time.monotonic()
                await gone(pids)
                lab.note(f"{len(pids)} children ended {time.monotonic() - killed_at:.1f} s after their supervisor")
                await history.close()
        await gone({str(pid): pid for pid in servers})
        again = [Seen(seen.ask, seen.request_id, seen.submitted_at, seen.accepted_at) for seen in sent]
        async with lab.trial_in(settings) as trial:
            num_servers = len(_servers(settings.home))
            lab.require(num_servers == 1, f"{num_servers} servers run on one directory")
            trial.history.resume(again)
            await trial.judge(again, recovers=False)


async def f36(lab: Lab) -> None:
    """Processes with another codec, another model, or another shape of it want to join."""
    asks = long_answers(lab, 2, 40)
    await lab.expected(asks)
    async with lab.trial() as trial:
        shaped = write_tiny_llama(trial.settings.home / "shaped.gguf", num_layers=3)
        others = {
            "codec": ({"SLUICE_KV_CODEC": "raw"}, ("codec",)),
            "model": ({"SLUICE_MODEL": str(lab.models.other)}, ("model",)),
            "layout": ({"SLUICE_MODEL": str(shaped)}, ("layout", "model")),  # another layout is in another file
        }
        for stage in ("prefill", "decode"):
            for what, (variables, named) in others.items():
                async with extra_stage(trial.stack, stage, **variables) as extra:
                    code = await extra.ended(TIMEOUT_S)
                said = extra.log.read_text("utf-8").splitlines()[-1]
                lab.require(code == 1, f"{stage} with another {what} ended with {code}")
                is_named = any(f"this process has {part} " in said for part in named)
                lab.require(is_named, f"{stage} with another {what} said: {said[:200]}")
                lab.require("Traceback" not in said, f"{stage} with another {what} ended with a traceback")
        lab.note(f"{2 * len(others)} processes refused")
        trial.mark()
        trial.send(asks)
        await trial.judge(recovers=False)


async def f37(lab: Lab) -> None:
    """Hundreds of requests go through few slots."""
    asks = short_ones(lab, ONE_ROUND, 24)
    await lab.expected(asks)
    async with lab.trial(max_num_seqs=4, num_pages=64) as trial:
        trial.mark()
        memory: list[Mapping[str, int]] = []
        for _ in range(NUM_REUSED // ONE_ROUND):
            sent = trial.send(asks)
            await trial.ended(sent)
            memory.append({name: _resident_bytes(pid) for name, pid in pids_of(trial.stack).items() if name in STAGES})
        await trial.judge(recovers=False)
        grown = {name: memory[-1][name] / first for name, first in memory[0].items()}
        lab.note(", ".join(f"{name} x{factor:.2f}" for name, factor in grown.items()) + " memory since the first 100")
        for name, factor in grown.items():
            lab.require(factor < MAX_GROWTH, f"{name} grew from {memory[0][name]} to {memory[-1][name]} bytes")


async def _flow(trial: Trial, asks: Sequence[NewRequest]) -> None:
    """Send the same requests again whenever they have ended."""
    while True:
        sent = trial.send(asks)
        await trial.history.ended(sent, timeout_s=TIMEOUT_S)


async def _age_leases(trial: Trial) -> int:
    """Make every held entry look as if it was claimed an hour ago, which is what a jump of the server's clock does."""
    num_aged = 0
    async for key in trial.redis.scan_iter(match=f"{trial.keys.namespace}:stream:*", _type="stream"):
        for group in await trial.redis.xinfo_groups(key):
            for entry in await trial.redis.xpending_range(key, group["name"], "-", "+", 100):
                aged = await trial.redis.xclaim(
                    *(key, group["name"], entry["consumer"], 0, [entry["message_id"]]), idle=AGED_MS, justid=True
                )
                num_aged += len(aged)
    return num_aged


async def _consumers(trial: Trial, stage: str) -> set[int]:
    """The processes that have a name in the queues of a stage."""
    found: set[int] = set()
    async for key in trial.redis.scan_iter(match=f"{trial.keys.namespace}:stream:{stage}:*", _type="stream"):
        for consumer in await trial.redis.xinfo_consumers(key, stage):
            words = consumer["name"].decode().split(":")
            found |= {int(words[-2])} if len(words) > 2 else set()
    return found


@asynccontextmanager
async def _running_up(settings: Settings) -> AsyncIterator[asyncio.subprocess.Process]:
    """Run `sluice up` as people do, until it is killed here at the latest."""
    (settings.home / "logs").mkdir()
    with (settings.home / "logs" / "up.log").open("wb") as log:
        up = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "ops.cli", "up"),
            env=stage_environment(settings),
            cwd=default_procfile().parent,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
        )
    try:
        deadline = time.monotonic() + TIMEOUT_S
        while not _all_ready(await ask_status(settings.home)):
            if up.returncode is not None or time.monotonic() > deadline:
                raise TimeoutError("`sluice up` did not get ready")
            await asyncio.sleep(POLL_S)
        yield up
    finally:
        if up.returncode is None:
            up.kill()
        await up.wait()


def _all_ready(slots: list[SlotStatus] | None) -> bool:
    return bool(slots) and all(slot.ready for slot in slots or ())


def _servers(home: Path) -> set[int]:
    """The processes of servers that have their data in a home."""
    pids = [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()]
    return {pid for pid in pids if is_running(pid) and _is_server_of(pid, home)}


def _is_server_of(pid: int, home: Path) -> bool:
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
        return b"valkey-server" in command.split(b"\0")[0] and Path(f"/proc/{pid}/cwd").readlink() == home / "valkey"
    except OSError:  # it has ended, or is somebody else's
        return False


def _resident_bytes(pid: int) -> int:
    pages = int(Path(f"/proc/{pid}/statm").read_text("utf-8").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


ROWS = [
    Row("F17", "clocks moved by an hour", "redelivered at most, never with an effect", f17),
    Row("F29", "decode scaled 1 to 4 to 1 under load", "no error; no stranded entry; consumers removed", f29),
    Row("F35", "the supervisor killed", "children end; no second server on the same directory", f35),
    Row("F36", "processes of another model, codec or layout", "refused, naming what differs", f36),
    Row("F37", "500 requests with slot reuse", "output equal; resident memory flat", f37),
]
