"""Rows about stages that die or stand still: killed at every point of a message's way, all at once, again and again."""

import asyncio
import os
import signal
import threading
import time
from pathlib import Path

from kv_store.directory import TEMPORARY_PREFIX
from kv_store.layout import PAGE_TOKENS
from ops.chaos.asks import SOON_TOKENS, long_answers, long_prompts
from ops.chaos.history import Seen
from ops.chaos.lab import CHUNK_TOKENS, LEASE_S, Lab
from ops.chaos.processes import gone, is_stopped, pids_of
from ops.chaos.row import Row
from ops.chaos.trial import Trial
from ops.stack import GRACE_S
from pipeline.counters import KV_RECOMPUTED_TOKENS, REQUESTS_TAKEN_OVER, TOKENS_REPLAYED
from pipeline.keys import HANG_LEASES

MAX_TRIES = 12  # at hitting a moment of microseconds among dozens
LONG_LEASE_S = 30.0  # so long that nobody waits for it by chance
SLOW_STEP_S = 0.03  # so that long answers take longer than a stage may go on with them
TWO_DECODE = {"decode": 2}


async def f1(lab: Lab) -> None:
    """The tokenizer dies with a message in hand, before its commit, and right after it."""
    await _struck_at(lab, "tokenizer.claimed", "tokenizer.handled", "tokenizer.committed")


async def f2(lab: Lab) -> None:
    """Prefill dies before, after and during the write of a blob."""
    asks = long_prompts(lab)
    await lab.expected(asks)
    for point in ("prefill.computed", "prefill.written"):
        async with lab.trial(fault=f"{point}=kill@4") as trial:
            trial.send(asks)
            await trial.judge()
            trial.require_struck(point, 1)
    async with lab.trial() as trial:
        for number in range(1, MAX_TRIES + 1):
            if await _killed_while_writing(trial):
                lab.note(f"killed during a write at try {number}")
                return
        lab.blame([f"prefill was never killed during a write in {MAX_TRIES} tries"])


async def f3(lab: Lab) -> None:
    """The compressor dies between sealing and its commit, and right after it."""
    await _struck_at(lab, "compressor.sealed", "compressor.handled", "compressor.committed")


async def f4(lab: Lab) -> None:
    """Decode dies in the middle of answers."""
    async with lab.trial() as trial:
        sent = await _under_way(trial)
        trial.strike("decode")
        seen = sum(request.num_tokens for request in sent)
        await trial.judge()
        lab.note(f"killed after {seen} tokens")
        lab.require(seen < sum(request.num_tokens for request in sent) / 2, "too late to interrupt anything")


async def f4x(lab: Lab) -> None:
    """Eight sampled requests, decode killed three times and prefill once, each time after tokens were seen."""
    asks = [lab.ask(f"{index}, " * 100, 240, seed=300 + index, temperature=0.8, logprobs=1) for index in range(8)]
    await lab.expected(asks)
    async with lab.trial() as trial:
        sent = trial.send(asks)
        killed_after: list[int] = []
        for name, wanted in (("prefill", 1), ("decode", 1), ("decode", 100), ("decode", 100)):
            seen = sum(request.num_tokens for request in sent)
            await trial.tokens(seen + wanted, sent)
            killed_after.append(sum(request.num_tokens for request in sent))
            if name == "prefill":
                lab.require(any(not request.deltas for request in sent), "prefill was through when it was killed")
            await trial.ready_again(name)
        lab.note(f"killed after {', '.join(map(str, killed_after))} tokens")
        await trial.judge()
        lab.require(killed_after[-1] < sum(request.num_tokens for request in sent), "the last kill came too late")


async def f5(lab: Lab) -> None:
    """Everything but the server dies at once."""
    async with lab.trial() as trial:
        await _under_way(trial, 12, 120)
        trial.strike()
        await trial.judge()


async def f7(lab: Lab) -> None:
    """A decode process is stopped for two leases while another one is there, and goes on."""
    async with lab.trial(TWO_DECODE, max_num_seqs=4) as trial:
        sent = await _under_way(trial, 6)
        pid = pids_of(trial.stack)["decode"]
        trial.strike("decode", number=signal.SIGSTOP)
        await asyncio.sleep(2 * LEASE_S)  # the fault is the time itself
        await _taken_over(trial)
        trial.stopped.resume(pid)
        await trial.judge(sent)
        dropped = trial.log("decode").count('"request_dropped"') + trial.log("decode").count('"lease_lost"')
        lab.note(f"the stopped process was refused {dropped} times")
        lab.require(dropped, "the stopped process never learned that its work was gone")


async def f8(lab: Lab) -> None:
    """Each stage is asked to finish while it has work; leases are so long that waiting for one would show."""
    long, prompts = long_answers(lab, 6, 700), long_prompts(lab, 6)
    await lab.expected([*long, *prompts])
    async with lab.trial(fault=f"decode.step=delay:{SLOW_STEP_S}x*", lease_s=LONG_LEASE_S) as trial:
        sent = trial.send(long)
        await trial.tokens(SOON_TOKENS, sent)
        for name in ("tokenizer", "prefill", "compressor", "decode"):
            sent += trial.send(prompts)
            asked_at, pid = time.monotonic(), pids_of(trial.stack)[name]
            trial.strike(name, number=signal.SIGTERM)
            await gone({name: pid}, GRACE_S)
            lab.note(f"{name} left after {time.monotonic() - asked_at:.1f} s")
        lab.require(not all(seen.is_over for seen in sent[: len(long)]), "decode had nothing left when it went")
        await trial.judge(sent, recovers=False)
        standstill_s = trial.standstill_s(sent) or 0.0
        lab.note(f"stood still {standstill_s:.1f} s; leases of {LONG_LEASE_S:g} s")
        lab.require(standstill_s < LONG_LEASE_S / 2, f"nothing moved for {standstill_s:.1f} s: a lease was waited for")


async def f9(lab: Lab) -> None:
    """The engine is busy, or holds the interpreter, for three leases, while another process would take over."""
    busy_s = 3 * LEASE_S
    for point, action in (("decode.step", "delay"), ("decode.step", "gil"), ("prefill.computed", "gil")):
        stage = point.partition(".")[0]
        async with lab.trial({stage: 2}, fault=f"{point}={action}:{busy_s:g}@3") as trial:
            sent = trial.send([*long_answers(lab, 4, 60), *long_prompts(lab, 2)])
            await trial.until(lambda: trial.num_struck(point) > 0, lambda: f"{point} was not reached")  # noqa: B023
            await asyncio.sleep(busy_s + LEASE_S)  # the fault is the time itself, and afterwards the process can speak
            await trial.judge(sent, recovers=False)
            lost = sum(trial.log(name).count('"lease_lost"') for name in (stage, f"{stage}-2"))
            lab.note(f"{point}={action} for {busy_s:g} s: {lost} leases lost")
            lab.require(not lost, f"{point}={action}: {lost} leases were lost")
            if stage == "decode":
                taken_over = (await trial.counted()).get(REQUESTS_TAKEN_OVER, 0)
                lab.require(not taken_over, f"{point}={action}: {taken_over} requests were taken over")


async def f39(lab: Lab) -> None:
    """The engine hangs for longer than may be: once it comes back after that, once it does not."""
    hang_s = (HANG_LEASES + 3) * LEASE_S
    for action in (f"delay:{hang_s:g}", "hang"):
        async with lab.trial(TWO_DECODE, fault=f"decode.step={action}@5", max_num_seqs=4) as trial:
            sent = trial.send(long_answers(lab, 6, 200))
            await trial.until(lambda: trial.num_struck("decode.step") > 0, lambda: "decode.step was not reached")
            trial.mark()
            await trial.judge(sent, recovers=False)
            trial.judge_recovery(sent, more_s=HANG_LEASES * LEASE_S)
            logs = trial.log("decode") + trial.log("decode-2")
            lab.require('"work_stands_still"' in logs, f"{action}: nobody noticed the hang")
            taken_over = (await trial.counted()).get(REQUESTS_TAKEN_OVER, 0)
            lab.note(f"{action}: {taken_over} requests were taken over")
            lab.require(taken_over, f"{action}: nobody took the work over")
            if action != "hang":
                await trial.until(
                    lambda: '"request_dropped"' in trial.log("decode") + trial.log("decode-2"),
                    lambda: "the hung process was never refused",
                )


async def f42(lab: Lab) -> None:
    """Decode is killed when every request has shown tokens and none has ended; little is computed again."""
    asks = long_answers(lab)
    await lab.expected(asks)
    async with lab.trial() as trial:
        sent = trial.send(asks)
        await trial.until(
            lambda: all(len(seen.deltas) > 1 for seen in sent) and sum(seen.num_tokens for seen in sent) > 400,
            lambda: f"deltas so far: {[len(seen.deltas) for seen in sent]}",
        )
        trial.strike("decode")
        at_kill = {seen.request_id: seen.num_tokens for seen in sent}
        lab.require(not any(seen.is_over for seen in sent), "a request had ended before its first tokens were seen")
        await trial.judge(sent)
        counted = await trial.counted()
        again = counted.get(TOKENS_REPLAYED, 0) + counted.get(KV_RECOMPUTED_TOKENS, 0)
        most = len(sent) * (CHUNK_TOKENS + PAGE_TOKENS)
        lab.note(f"killed after {list(at_kill.values())} tokens, {again} computed again of at most {most}")
        lab.require(again <= most, f"{again} tokens were computed again, and {most} are the most")


async def _struck_at(lab: Lab, *points: str) -> None:
    """Run requests on stacks in which fault points kill, and judge them."""
    asks = long_answers(lab, max_tokens=60)
    await lab.expected(asks)
    for point in points:
        async with lab.trial(fault=f"{point}=kill@2") as trial:
            trial.send(asks)
            await trial.judge()
            trial.require_struck(point, 1)


async def _under_way(trial: Trial, number: int = 4, max_tokens: int = 300) -> list[Seen]:
    """Send long answers and return when all are far from their end, but have begun."""
    asks = long_answers(trial.lab, number, max_tokens)
    await trial.lab.expected(asks)  # before the clock runs
    sent = trial.send(asks)
    await trial.tokens(SOON_TOKENS, sent)
    return sent


async def _taken_over(trial: Trial) -> None:
    """Return when somebody has taken a request over."""

    async def taken_over() -> bool:
        return bool((await trial.counters()).get(REQUESTS_TAKEN_OVER))

    await trial.until_so(taken_over, "nobody took the work over")


async def _killed_while_writing(trial: Trial) -> bool:
    """Kill prefill while an unfinished blob of its is in the pool; whether that came about."""
    pids = pids_of(trial.stack)
    trial.stopped.stop(pids["compressor"])  # so that nobody else writes
    sent = trial.send(long_prompts(trial.lab, 4))
    await trial.accepted(sent)
    trial.may_die = True
    written = threading.Event()
    killing = asyncio.create_task(
        asyncio.to_thread(_kill_at_unfinished, trial.settings.pool_dir, pids["prefill"], written)
    )

    async def is_over() -> bool:
        waiting = await trial.queue_length("tokenizer") + await trial.queue_length("prefill")
        return killing.done() or not waiting

    try:
        await trial.until_so(is_over, "prefill did not write all blobs")
    finally:
        written.set()
    killed = await killing
    trial.stopped.resume(pids["compressor"])
    await trial.judge(sent, recovers=False)
    await trial.ready()
    return killed


def _kill_at_unfinished(pool: Path, pid: int, written: threading.Event) -> bool:
    """Look all the time, since a blob is unfinished for some hundred microseconds; stop the writer, and look again."""
    while not written.is_set():
        if not _has_unfinished(pool):
            continue
        os.kill(pid, signal.SIGSTOP)
        while not is_stopped(pid):
            pass
        if _has_unfinished(pool):
            os.kill(pid, signal.SIGKILL)
            return True
        os.kill(pid, signal.SIGCONT)
    return False


def _has_unfinished(pool: Path) -> bool:
    return any(name.startswith(TEMPORARY_PREFIX) for name in os.listdir(pool))  # noqa: PTH208 - the fastest way


ROWS = [
    Row("F1", "kill -9 tokenizer in mid-message", "redelivered; one terminal", f1),
    Row("F2", "kill -9 prefill before, during and after it writes a blob", "its blobs are swept; one set is used", f2),
    Row("F3", "kill -9 compressor around its commit", "no duplicate downstream", f3),
    Row("F4", "kill -9 decode after k deltas", "the stream goes on at k+1 with the same text", f4),
    Row("F4x", "kill -9 decode three times and prefill once", "eight sampled requests come out the same", f4x),
    Row("F5", "all stages killed at once, then restarted", "all accepted requests finish", f5),
    Row("F7", "SIGSTOP decode for two leases, then SIGCONT", "its commits are refused; no double token", f7),
    Row(
        "F8", "SIGTERM each stage under load", "hands over what is left, in its grace time; no lease is waited for", f8
    ),
    Row("F9", "the engine busy, or holding the GIL, for three leases", "the lease is kept", f9),
    Row("F39", "the engine hangs while its process lives", "another process takes over; the hung one is refused", f39),
    Row("F42", "kill -9 decode when all have tokens and none has ended", "few tokens are computed again", f42),
]
