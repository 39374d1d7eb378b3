"""Benchmarks: what is reported is what the stamps and the client's clock say, and the baseline is the same model."""

import asyncio
import json
import math
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from kv_store.codecs.registry import codec_named
from ops.bench import __main__ as command
from ops.bench import end_to_end, engine
from ops.bench.figures import Figures, Spread, percent
from ops.bench.load import LoadFailed, Pass, Sample, asks_of, is_loop, run_pass
from ops.bench.naive import NaiveModel
from ops.bench.runners import EngineRunner, NaiveRunner
from ops.bench.stamps import HAND_OVER, PHASES, SLOT, phases_ms, share
from ops.chaos.tiny_model import TOKENS, write_tiny_llama
from ops.measuring import write_record
from ops.offline import Offline, offline
from ops.stack import Stack
from pipeline.client.asks import NewRequest
from pipeline.client.client import Client
from pipeline.memory import MemoryQueues, MemoryTransport
from pipeline.messages import Stamp
from pipeline.params import SamplingParams
from pipeline.settings import Settings
from pipeline.transport import TransportOptions
from stages.engine.reference import ReferenceModel
from tests.ops.answering import FAIL_WORD, serve
from tests.ops.test_datasets import item, write

# As a request carries them: its own boundaries, then those of its chunks, then decode's.
STAMPS = (
    ("submitted", 1_000),
    ("tokenizer_claimed", 2_000),
    ("tokenized", 3_000),
    ("prefill_claimed", 10_000),
    ("first_token", 60_000),
    ("decode_claimed", 90_000),
    ("chunk_computed", 40_000),
    ("chunk_written", 42_000),
    ("compressor_claimed", 43_000),
    ("sealed", 50_000),
    ("chunk_computed", 60_000),
    ("chunk_written", 64_000),
    ("compressor_claimed", 65_000),
    ("sealed", 70_000),
    ("kv_loaded", 92_000),
    ("finished", 500_000),
)


def stamps(*passed: tuple[str, int]) -> list[Stamp]:
    return [Stamp(boundary=boundary, at_us=at_us) for boundary, at_us in passed]


def test_phases_are_those_of_the_last_chunk_and_add_up_to_the_whole() -> None:
    phases = phases_ms(stamps(*STAMPS))
    assert phases == {
        "tokenizer queue": 1,
        "tokenizing": 1,
        "prefill queue": 7,
        "prefill": 50,
        "blob writing": 4,
        "compressor queue": 1,
        "packing": 5,
        "decode slot": 20,
        "KV loading": 2,
        "decode": 408,
    }
    assert sum(phases.values()) == 499
    assert share(phases, HAND_OVER) == pytest.approx(12 / 499)
    assert share(phases, (SLOT,)) == pytest.approx(20 / 499)


def test_without_a_compressor_nobody_waits_for_it_and_packing_takes_no_time() -> None:
    sealed_in_prefill = [stamp for stamp in STAMPS if stamp[0] not in {"compressor_claimed", "sealed"}]
    phases = phases_ms(stamps(*sealed_in_prefill, ("sealed", 64_000)))
    assert phases["decode slot"] == 26
    assert phases["packing"] == 0
    assert "compressor queue" not in phases
    assert sum(phases.values()) == 499


def test_a_clock_that_steps_back_makes_no_phase_negative() -> None:
    phases = phases_ms(
        stamps(("submitted", 5_000), ("tokenizer_claimed", 9_000), ("tokenized", 7_000), ("finished", 10_000))
    )
    assert phases == {"tokenizer queue": 4, "tokenizing": 0, "prefill queue": 1}


def test_a_request_without_stamps_has_no_phases() -> None:
    assert phases_ms([]) == {}
    assert share({}, HAND_OVER) == 0


@pytest.mark.parametrize(
    ("token_ids", "loops"),
    [
        ([5] * 64, True),
        ([*range(64), *[1, 2, 3] * 20], True),
        ([*range(100), *list(range(30)) * 3], True),
        ([*range(64)], False),
        ([*range(61), 7, 7, 7], False),
        ([*range(64), *list(range(40)) * 3], False),
        ([1, 2, 3] * 20 + [9], False),
        ([], False),
        ([4], False),
    ],
    ids=["one token", "short period", "long period", "none", "three in a row", "too long", "ended", "empty", "single"],
)
def test_a_loop_is_what_goes_on_to_the_end(token_ids: list[int], loops: bool) -> None:
    assert is_loop(token_ids) is loops


def sample(number: int, **changes: object) -> Sample:
    return replace(
        Sample(
            prompt_tokens=10,
            output_tokens=8,
            draft_tokens=4,
            accepted_tokens=1,
            ttft_ms=float(number),
            tpot_ms=float(number) / 10,
            total_ms=499.0,
            loops=False,
            phases_ms=phases_ms(stamps(*STAMPS)),
        ),
        **changes,
    )


def test_figures_of_a_pass() -> None:
    samples = [sample(number) for number in range(1, 100)]
    samples.append(sample(100, loops=True, draft_tokens=40, accepted_tokens=40))
    figures = Figures.of(Pass(wall_s=4.0, samples=tuple(samples)))
    assert figures.output_tokens_per_s == 200
    assert figures.ttft_ms == Spread(50, 99)
    assert figures.tpot_ms == Spread(5.0, 9.9)
    assert figures.acceptance.all == pytest.approx((99 + 40) / (99 * 4 + 40))
    assert figures.acceptance.without_loops == pytest.approx(0.25)
    assert figures.acceptance.num_loops == 1
    assert figures.hand_over_ms == Spread(12, 12)
    assert figures.hand_over_share == pytest.approx(12 / 499)
    assert list(figures.mean_phases_ms) == list(PHASES.values())


def test_acceptance_without_drafts_is_not_a_number() -> None:
    figures = Figures.of(Pass(1.0, (sample(1, draft_tokens=0, accepted_tokens=0),)))
    assert figures.acceptance.all is None
    assert percent(figures.acceptance.all) == "-"


def test_load_is_greedy_of_fixed_length_and_says_whether_to_draft() -> None:
    [ask] = asks_of(["Why?"], "tiny", 128, speculate=False)
    assert ask.messages is not None
    assert ask.messages[0].content == "Why?"
    assert (ask.params.temperature, ask.params.max_tokens, ask.params.ignore_eos) == (0, 128, True)
    assert not ask.speculate


@pytest.fixture
async def client() -> AsyncIterator[Client]:
    queues, stopping = MemoryQueues(), asyncio.Event()
    stage = MemoryTransport(queues, TransportOptions(consumer="stage", max_queue=100))
    task = asyncio.create_task(serve(stage, stopping))
    yield Client(MemoryTransport(queues, TransportOptions(consumer="client", max_queue=100)), Settings())
    stopping.set()
    await task


def asking(prompt: str) -> NewRequest:
    return NewRequest("tiny", prompt, None, SamplingParams(seed=1))


async def test_a_pass_has_a_sample_for_each_request_in_order(client: Client) -> None:
    num_tokens, seen = list[int](), list[Sample]()
    found = await run_pass(client, [asking("a b c"), asking("d e")], 2, num_tokens.append, seen.append)
    assert [one.output_tokens for one in found.samples] == [3, 2]
    assert [one.accepted_tokens for one in found.samples] == [1, 1]
    assert sum(num_tokens) == 5
    assert tuple(seen) == found.samples
    assert found.wall_s > 0
    assert all(0 < one.ttft_ms <= one.total_ms for one in found.samples)


async def test_a_failed_request_fails_the_pass(client: Client) -> None:
    with pytest.raises(LoadFailed, match="no"):
        await run_pass(client, [asking("a b"), asking(FAIL_WORD)], 2)


async def test_each_way_of_sealing_gets_a_stack_and_each_kind_of_speculation_a_pass(
    stack_settings: Settings, procfile: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen: list[Settings] = []

    def start(settings: Settings, replicas: dict[str, int]) -> Stack:
        chosen.append(settings)
        return Stack(settings, replicas, procfile=procfile)

    monkeypatch.setattr(end_to_end, "Stack", start)
    turns = [item(number, ("human", f"What is the number {number} good for?")) for number in range(7)]
    plan = end_to_end.Plan("tiny", 3, 4, 2, "both", 1, {"tokenizer": 1})
    record, tables = await end_to_end.run(plan, stack_settings, write(tmp_path / "turns.json", turns))
    assert [settings.seal_in_prefill for settings in chosen] == [False, True]
    assert {settings.namespace for settings in chosen} == {"bench"}
    write_record(tmp_path / "record.json", record)
    saved = json.loads((tmp_path / "record.json").read_text("utf-8"))
    assert [one["case"] for one in saved["passes"]] == [
        {"seal_in_prefill": sealed, "speculate": speculate} for sealed in (False, True) for speculate in (True, False)
    ]
    assert all(len(one["raw"]["samples"]) == 3 for one in saved["passes"])
    assert all(one["figures"]["output_tokens"] == 12 for one in saved["passes"])
    assert str(stack_settings.home) not in json.dumps(saved)
    assert tables.count("compressor, speculation") == 2


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Offline]:
    folder = tmp_path_factory.mktemp("model")
    with offline(write_tiny_llama(folder / "tiny.gguf"), folder / "weights", 1) as loaded:
        yield loaded


def test_baseline_computes_what_the_reference_computes(tiny: Offline) -> None:
    reference = ReferenceModel(tiny.source, tiny.config)
    naive = NaiveModel(tiny.source, tiny.config)
    token_ids = (np.arange(40) * 7 % len(TOKENS)).reshape(2, 20)
    cache = naive.cache(2, 20)
    naive.step(torch.from_numpy(token_ids[:, :18]), cache)
    naive.step(torch.from_numpy(token_ids[:, 18:19]), cache)
    logits = naive.step(torch.from_numpy(token_ids[:, 19:]), cache)
    for row, sequence in zip(logits, token_ids, strict=True):
        assert np.allclose(row.numpy(), reference.logits(sequence)[-1], atol=1e-4)


def test_a_batch_decodes_as_one_sequence_does_and_gives_its_pages_back(tiny: Offline) -> None:
    prompt = [(index * 5) % len(TOKENS) for index in range(70)]
    runner = EngineRunner(tiny.model, codec_named("int8"), 3, 80)
    texts: list[list[list[int]]] = []
    for batch in (1, 3, 2, 3):  # more pages in all than there are
        runner.begin(prompt, batch, 4)
        texts.append([runner.step() for _ in range(4)])
        assert [len(step) for step in texts[-1]] == [batch] * 4
    assert len({tuple(step[0] for step in steps) for steps in texts}) == 1
    assert all(len(set(step)) == 1 for steps in texts for step in steps)


def test_baseline_decodes_greedily_whatever_the_batch(tiny: Offline) -> None:
    reference = ReferenceModel(tiny.source, tiny.config)
    token_ids = [(index * 5) % len(TOKENS) for index in range(70)]
    runner = NaiveRunner(NaiveModel(tiny.source, tiny.config))
    runner.begin(token_ids, 3, 2)
    for _ in range(3):  # the first output token is the context's
        token_ids.append(int(reference.logits(np.array(token_ids))[-1].argmax()))
    assert [runner.step() for _ in range(2)] == [[token_id] * 3 for token_id in token_ids[-2:]]


class Recorder:
    """A runner that only writes down what it is asked for."""

    def __init__(self, name: str, calls: list[str]) -> None:
        self.name = name
        self._calls = calls

    def prefill(self, token_ids: Sequence[int]) -> None:
        self._calls.append(f"{self.name} prefill {len(token_ids)}")

    def begin(self, token_ids: Sequence[int], batch: int, num_steps: int) -> None:
        self._calls.append(f"{self.name} batch {batch}")

    def step(self) -> list[int]:
        return []


def engine_plan(**changes: object) -> engine.Plan:
    plan = engine.Plan("tiny", Path(), Path(), "raw", 1, (1, 4), 3, 2)
    return replace(plan, **changes)


def test_runners_take_turns_at_every_size() -> None:
    calls: list[str] = []
    timings = engine.time_runners(engine_plan(), [Recorder("a", calls), Recorder("b", calls)], 100)
    once = ["a prefill 512", "b prefill 512", "a batch 1", "b batch 1", "a batch 4", "b batch 4"]
    assert calls == [*once[:2], *once, *once]
    assert [(timing.runner, timing.batch, len(timing.calls_ms)) for timing in timings] == [
        ("a", None, 2),
        ("b", None, 2),
        ("a", 1, 6),
        ("b", 1, 6),
        ("a", 4, 6),
        ("b", 4, 6),
    ]


def test_engine_table_has_median_rates_and_their_ratio() -> None:
    timings = [
        engine.Timing("ours", 4, 4, (10.0, 20.0, 900.0)),
        engine.Timing("theirs", 4, 4, (100.0, 100.0, 1.0)),
    ]
    assert engine.table(timings).splitlines()[2].split("|")[1:-1] == [
        " decode, batch 4 ",
        "  200 ",
        "     40 ",
        "   5.0 ",
    ]


def test_engine_record_is_plain_json(tmp_path: Path) -> None:
    path = write_tiny_llama(tmp_path / "tiny.gguf")
    plan = engine_plan(model_path=path, weight_cache=tmp_path / "weights", batches=(1, 2), num_repetitions=1)
    record, table = engine.run(plan)
    saved = json.loads(json.dumps(record))
    assert len(saved["timings"]) == 6
    assert all(math.isfinite(timing["tokens_per_s"]) for timing in saved["timings"])
    assert str(tmp_path) not in json.dumps(saved)
    assert "torch fp32 eager" in table


@pytest.mark.parametrize("batches", ["0", "1,x", ""])
def test_a_wrong_batch_size_is_refused(batches: str) -> None:
    result = CliRunner().invoke(command.app, ["engine", "--batches", batches])
    assert result.exit_code == 2
    assert "no batch size" in result.output


def test_speculation_is_on_off_or_both() -> None:
    assert CliRunner().invoke(command.app, ["--speculation", "maybe"]).exit_code == 2
