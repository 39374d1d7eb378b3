"""The queue benchmark: a hop's latency is the queue's alone, and what is no answer of the server is no round trip."""

import ctypes
import os
import threading
import time
from pathlib import Path

import pytest
from redis.asyncio import Redis

from ops.bench.batch_memory import BenchFailed
from ops.bench.hops import Hop, hops_of
from ops.bench.proc import CpuSeconds, cpu_seconds, resident_mib
from ops.bench.prompts import Prompts
from ops.bench.queue_cost import take_reading
from ops.bench.queue_figures import Cost, Reading, RoundTrips, hop_table, queue_parts, tables, trip_table
from ops.chaos.tiny_model import TOKENS, write_tiny_llama
from pipeline.messages import Stamp
from stages.engine.engine import Engine

BURN_S = 0.3
PR_SET_NAME = 15


def request(
    submitted: int, prefill: tuple[int, int], decode: tuple[int, int, int], chunks: tuple[tuple[int, int, int], ...]
) -> list[Stamp]:
    """Stamps in milliseconds: prefill's claim and token 0; decode's claim, load and end; each chunk's three."""
    of_request = {
        "submitted": submitted,
        "tokenizer_claimed": submitted + 2,
        "tokenized": submitted + 3,
        "prefill_claimed": prefill[0],
        "first_token": prefill[1],
        "decode_claimed": decode[0],
        "kv_loaded": decode[1],
        "finished": decode[2],
    }
    stamps = [Stamp(boundary=boundary, at_us=1000 * at_ms) for boundary, at_ms in of_request.items()]
    for index, times in enumerate(chunks):
        for boundary, at_ms in zip(("chunk_written", "compressor_claimed", "sealed"), times, strict=True):
            stamps.append(Stamp(boundary=boundary, at_us=1000 * at_ms, chunk=index))
    return stamps


FIRST = request(0, (5, 100), (112, 115, 900), ((60, 61, 64), (102, 104, 110)))


def test_a_request_alone_waits_for_nobody_in_any_queue() -> None:
    assert hops_of([FIRST], num_slots=1) == {
        "tokenizer": Hop(1, (2.0,)),
        "prefill": Hop(1, (2.0,)),
        "compressor": Hop(2, (1.0, 2.0)),
        "decode": Hop(1, (2.0,)),
    }


def test_waiting_for_a_stage_that_is_busy_is_no_latency_of_its_queue() -> None:
    # Tokenized at 53, while prefill has the first one until its last chunk is written at 102.
    second = request(50, (103, 150), (172, 175, 950), ((152, 154, 160),))
    hops = hops_of([FIRST, second], num_slots=2)
    assert hops["prefill"] == Hop(2, (2.0,))
    assert hops["compressor"] == Hop(3, (1.0, 2.0, 2.0))
    assert hops["decode"] == Hop(2, (2.0, 12.0))


def test_whoever_came_at_the_same_time_and_was_served_first_stood_before() -> None:
    second = request(0, (103, 150), (172, 175, 950), ((152, 154, 160),))
    second[1] = Stamp(boundary="tokenizer_claimed", at_us=3000)
    second[2] = Stamp(boundary="tokenized", at_us=4000)
    assert hops_of([FIRST, second], num_slots=2)["tokenizer"] == Hop(2, (2.0,))


def test_waiting_for_a_slot_is_no_latency_of_decode_s_queue() -> None:
    second = request(50, (103, 150), (902, 905, 990), ((152, 154, 160),))
    assert hops_of([FIRST, second], num_slots=1)["decode"] == Hop(2, (2.0,))
    assert hops_of([FIRST, second], num_slots=2)["decode"] == Hop(2, (2.0, 742.0))


def test_a_request_that_ended_early_was_in_fewer_queues() -> None:
    hops = hops_of([FIRST[:2]], num_slots=1)
    assert [hop.num_messages for hop in hops.values()] == [0, 0, 0, 0]
    assert hops_of([FIRST[:4]], num_slots=1)["tokenizer"].num_messages == 1


def reading(at_s: float, trips: RoundTrips, used_s: float) -> Reading:
    used = CpuSeconds(loop_s=used_s, engine_s=10 * used_s, helpers_s=3 * used_s)
    names = ("jobs", "tokenizer", "prefill", "compressor", "decode", "server")
    return Reading(at_s, trips, dict.fromkeys(names, used), used_s)


def cost(name: str = "one at a time", **counted: object) -> Cost:
    before = reading(10.0, RoundTrips(100, 50, 20), 1.0)
    return Cost.between(name, before, reading(20.0, RoundTrips(301, 150, 60), 3.0), **counted)


def test_a_cost_is_the_difference_of_two_readings_without_the_question_itself() -> None:
    one = cost()
    assert one.round_trips == RoundTrips(200, 100, 40)
    assert one.round_trips.others == 60
    assert one.cpu["decode"] == CpuSeconds(2.0, 20.0, 6.0)
    assert (one.wall_s, one.client_cpu_s) == (10.0, 2.0)


def test_the_queue_layer_is_the_server_and_all_loops_but_computing_and_other_work_are_not() -> None:
    used = CpuSeconds(loop_s=1, engine_s=10, helpers_s=3)
    parts = {name: sum(queue_parts(name, used).values()) for name in cost().cpu}
    assert parts == {"jobs": 0, "tokenizer": 1, "prefill": 4, "compressor": 1, "decode": 4, "server": 14}
    assert cost().queue_share == pytest.approx(24 / (6 * 14))


def test_tables_say_per_token_with_and_without_what_an_idle_stack_asks() -> None:
    idle = cost("idle")
    busy = cost(num_requests=4, output_tokens=50, num_deltas=50, hops=hops_of([FIRST], 1))
    shown = trip_table([idle, busy])
    rows = {row.split("|")[1].strip(): row.split("|")[2:4] for row in shown.splitlines()[2:]}
    assert [cell.strip() for cell in rows["a second"]] == ["20.0", "20.0"]
    assert [cell.strip() for cell in rows["a request"]] == ["-", "50.00"]
    assert [cell.strip() for cell in rows["an output token"]] == ["-", "4.00"]
    assert [cell.strip() for cell in rows["less an idle stack's"]] == ["-", "0.00"]
    assert "1.00 / 2.00" in hop_table([busy])
    assert tables([idle, busy]).endswith("28.6 % of the stack's CPU time; the aim is below 3.0 %: MISSED")


async def test_what_a_script_calls_and_what_is_sent_together_are_no_round_trips_of_their_own(
    raw_redis: Redis, namespace: str
) -> None:
    key, pids = f"{namespace}:list", {"server": os.getpid()}
    before = await take_reading(raw_redis, pids)
    for _ in range(5):
        await raw_redis.execute_command("EVAL", "for i = 1, 7 do redis.call('RPUSH', KEYS[1], i) end", 1, key)
    await raw_redis.xread({f"{namespace}:stream": "0"}, count=1)
    async with raw_redis.pipeline(transaction=False) as together:
        for _ in range(4):
            together.llen(key)
        await together.execute()
    after = await take_reading(raw_redis, pids)
    trips = Cost.between("", before, after).round_trips
    assert (trips.total, trips.scripts, trips.reads, trips.others) == (7, 5, 1, 1)


async def test_a_process_that_ended_makes_the_measurement_fail_in_words(raw_redis: Redis) -> None:
    with pytest.raises(BenchFailed, match="ended while it was measured"):
        await take_reading(raw_redis, {"decode": 2**22 + 1})


def test_cpu_time_is_told_apart_by_thread() -> None:
    def burn() -> None:
        ends_at = time.thread_time() + BURN_S
        while time.thread_time() < ends_at:
            pass

    def burn_as_engine() -> None:
        ctypes.CDLL(None).prctl(PR_SET_NAME, b"engine", 0, 0, 0)
        burn()
        burnt.set()
        may_end.wait(60)

    burnt, may_end = threading.Event(), threading.Event()
    before = cpu_seconds(os.getpid())
    helper, engine = threading.Thread(target=burn), threading.Thread(target=burn_as_engine)
    helper.start()
    helper.join()
    engine.start()
    assert burnt.wait(60)
    used = cpu_seconds(os.getpid()) - before
    may_end.set()
    engine.join()
    assert used.helpers_s >= 0.8 * BURN_S
    assert used.engine_s >= 0.8 * BURN_S
    assert used.loop_s < BURN_S


def test_the_engine_computes_in_a_thread_of_that_name(tmp_path: Path) -> None:
    name = lambda: Path(f"/proc/self/task/{threading.get_native_id()}/comm").read_text().strip()  # noqa: E731
    with Engine(write_tiny_llama(tmp_path / "tiny.gguf"), "raw", 2, 1, tmp_path / "weights") as engine:
        assert engine._thread.submit(name).result(60) == "engine"


def test_memory_of_a_process_that_is_gone_is_unknown() -> None:
    resident = resident_mib(os.getpid())
    assert resident is not None
    assert resident > 1
    assert resident_mib(2**22 + 1) is None  # above the kernel's largest process id


def test_prompts_differ_and_have_about_the_length_that_was_asked_for(tmp_path: Path) -> None:
    prompts = Prompts(write_tiny_llama(tmp_path / "tiny.gguf"))
    assert len(TOKENS) > 256  # a byte is a token, but for one pair
    texts = [prompts.prompt(number, 200) for number in range(3)]
    assert len(set(texts)) == 3
    assert texts[0] == prompts.prompt(0, 200)
    assert all(200 <= len(text) <= 215 for text in texts)
