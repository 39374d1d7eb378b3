import asyncio, time
from pathlib import Path
from tests.stages.jobs.bench import *

async def test_simple(bench, tmp_path, leftovers):
    source = write_lines(tmp_path / "in.jsonl", [chat(str(i)) for i in range(300)])
    t=time.time()
    async with bench.answering(), bench.working():
        record = await bench.ended(await bench.submit(source))
    print(time.time()-t, record)
    assert ids_in(tmp_path/"out.jsonl") == [str(i) for i in range(300)]
    print(await leftovers())

async def test_finalise_killed_before_move(bench, tmp_path, monkeypatch):
    source = write_lines(tmp_path / "in.jsonl", [chat(str(i)) for i in range(3)])
    from stages.jobs import finalise
    real = BatchStore.move
    n = 0
    async def move(self, batch_id, origins, to, fields=None):
        nonlocal n
        if to == "completed" and not n:
            n += 1
            raise asyncio.CancelledError
        return await real(self, batch_id, origins, to, fields)
    monkeypatch.setattr(BatchStore, "move", move)
    async with bench.answering(), bench.working():
        record = await bench.ended(await bench.submit(source))
    print(record)

async def test_slices(bench, tmp_path, monkeypatch):
    monkeypatch.setattr("stages.jobs.turn.SLICE_S", 1.0)
    source = write_lines(tmp_path / "in.jsonl", [chat(str(i)) for i in range(3000)])
    async with bench.answering(), bench.working():
        id = await bench.submit(source)
        t = time.time()
        while not (r := await bench.store.read(id)).is_over:
            print(round(time.time()-t, 2), r.cursor, r.collected)
            await asyncio.sleep(.3)

async def test_resume_failed_in_flight(bench, tmp_path, monkeypatch):
    # lines in flight when the batch fails end while it is validating again
    source = write_lines(tmp_path / "in.jsonl", [chat(str(i)) for i in range(3)])
    id = None
    async with bench.working():
        id = await bench.submit(source)
        await bench.sees(id, lambda r: r.cursor == 3)
    await bench.store.move(id, ["in_progress"], "failed", {"error": "x", "ended_ms": "now"})
    assert id == await bench.submit(source)
    async with bench.answering():
        await bench.holds(lambda: done(bench, 3))
        await bench.raw.delete(bench.keys.stream("tokenizer", "batch"))
    async with bench.working():
        print(await bench.ended(id))

async def done(bench, n):
    return await bench.raw.xlen(bench.keys.finished()) == n
