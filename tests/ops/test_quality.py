"""Quality: the figures mean what they say, and the KV codec is part of what is measured."""

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from kv_store.codecs.registry import CODECS, codec_named
from ops.chaos.tiny_model import TOKENS, write_tiny_llama
from ops.measuring import markdown_table, write_record
from ops.offline import Offline, offline
from ops.quality import __main__ as command
from ops.quality.divergence import Divergence, Summary, bootstrap_interval
from ops.quality.measure import measure
from ops.quality.record import WINDOW_TOKENS, Plan, run
from stages.engine.gguf_weights import GgufWeights
from stages.engine.reference import ReferenceModel
from stages.gguf.file import GgufFile
from tests.ops.test_datasets import item, write

WINDOWS = [(np.arange(200) * step % len(TOKENS)).tolist() for step in (7, 11)]


def rows(*logits: list[float]) -> np.ndarray:
    return np.array(logits, np.float32)


@pytest.fixture(scope="module")
def model_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("model") / "tiny.gguf")


@pytest.fixture(scope="module")
def engine(model_file: Path) -> Iterator[Offline]:
    with offline(model_file, model_file.parent / "weights", 1) as loaded:
        yield loaded


@pytest.fixture(scope="module")
def reference(engine: Offline) -> ReferenceModel:
    return ReferenceModel(engine.source, engine.config)


def test_equal_logits_have_no_divergence() -> None:
    logits = rows([1.0, 2.0, -3.0], [0.0, 0.0, 9.0])
    found = Divergence.between(logits, logits + np.float32(4))  # a constant changes no probability
    assert found.kl == pytest.approx([0, 0], abs=1e-7)
    assert found.agrees.all()


def test_divergence_is_that_of_the_reference_from_the_engine() -> None:
    reference = rows(np.log([0.5, 0.5]).tolist(), np.log([0.9, 0.1]).tolist())
    engine = rows(np.log([0.25, 0.75]).tolist(), np.log([0.2, 0.8]).tolist())
    found = Divergence.between(reference, engine)
    expected = [0.5 * np.log(2) + 0.5 * np.log(0.5 / 0.75), 0.9 * np.log(0.9 / 0.2) + 0.1 * np.log(0.1 / 0.8)]
    assert found.kl == pytest.approx(expected, rel=1e-6)
    assert found.agrees.tolist() == [False, False]  # a tie goes to the lower id


def test_summary_is_over_tokens_and_its_interval_over_windows() -> None:
    windows = [
        Divergence(np.array([0.1, 0.3]), np.array([True, True])),
        Divergence(np.array([0.2, 1.0]), np.array([True, False])),
    ]
    found = Summary.of(windows)
    assert found.num_tokens == 4
    assert found.mean_kl == pytest.approx(0.4)
    assert found.top1_agreement == 0.75
    assert found.window_mean_kl == pytest.approx((0.2, 0.6))
    assert 0.9 < found.p99_kl <= 1.0
    assert found.mean_kl_low == pytest.approx(0.2)
    assert found.mean_kl_high == pytest.approx(0.6)


def test_interval_narrows_with_the_number_of_windows_and_never_changes() -> None:
    values = np.random.default_rng(1).normal(1.0, 0.1, 64)
    few, many = bootstrap_interval(values[:8]), bootstrap_interval(values)
    assert many == bootstrap_interval(values)
    assert many[0] < values.mean() < many[1]
    assert many[1] - many[0] < few[1] - few[0]
    # Of a mean of 64: about 1.96 standard errors to each side.
    assert many[1] - many[0] == pytest.approx(2 * 1.96 * values.std() / 8, rel=0.1)


def test_windows_that_agree_leave_no_doubt() -> None:
    assert bootstrap_interval(np.full(5, 0.25)) == (0.25, 0.25)


def test_engine_is_close_to_its_own_reference_and_far_from_another(
    engine: Offline, reference: ReferenceModel, tmp_path: Path
) -> None:
    raw = [codec_named("raw")]
    with GgufFile.open(write_tiny_llama(tmp_path / "other.gguf", seed=1)) as file:
        other = ReferenceModel(GgufWeights(file, engine.config), engine.config)
    [near] = measure(reference, engine.model, raw, WINDOWS[:1])["raw"]
    [far] = measure(other, engine.model, raw, WINDOWS[:1])["raw"]
    assert near.kl.mean() < 0.01
    assert near.agrees.mean() > 0.8  # 0.885 where there is AVX2 and no more: activations have a bit less there
    assert far.kl.mean() > 10 * near.kl.mean()
    assert far.agrees.mean() < 0.5


def test_each_codec_rounds_what_attention_reads(engine: Offline, reference: ReferenceModel) -> None:
    found = measure(reference, engine.model, CODECS, WINDOWS[:1])
    assert set(found) == {"raw", "fp8_e4m3", "int8"}
    [raw], [fp8], [int8] = found["raw"], found["fp8_e4m3"], found["int8"]
    assert (raw.kl != fp8.kl).mean() > 0.9
    assert (raw.kl != int8.kl).mean() > 0.9
    assert np.abs(int8.kl - raw.kl).mean() < np.abs(fp8.kl - raw.kl).mean()


def test_a_window_is_measured_alone(engine: Offline, reference: ReferenceModel) -> None:
    codecs, seen = [codec_named("int8")], list[int]()
    [first, second] = measure(reference, engine.model, codecs, WINDOWS, lambda: seen.append(1))["int8"]
    [alone] = measure(reference, engine.model, codecs, WINDOWS[1:])["int8"]
    assert len(first.kl) == len(WINDOWS[0])
    assert np.array_equal(second.kl, alone.kl)
    assert len(seen) == 2


def test_record_has_raw_numbers_and_what_they_depend_on(model_file: Path, tmp_path: Path) -> None:
    dataset = write(tmp_path / "tiny.json", [item(0, ("human", "The tide turns at nine. " * 50))])
    plan = Plan(
        model_name="tiny",
        model_path=model_file,
        weight_cache=model_file.parent / "weights",
        dataset_path=dataset,
        codecs=[codec_named("fp8_e4m3"), codec_named("raw")],
        num_tokens=600,
        num_threads=1,
    )
    record, table = run(plan)
    write_record(tmp_path / "docs" / "tiny.json", record)
    saved = json.loads((tmp_path / "docs" / "tiny.json").read_text("utf-8"))
    assert saved["dataset"]["num_tokens"] == 2 * WINDOW_TOKENS
    assert list(saved["codecs"]) == ["fp8_e4m3", "raw"]
    assert len(saved["codecs"]["raw"]["window_mean_kl"]) == 2
    assert {"arithmetic_version", "instruction_set", "num_threads"} == set(saved["engine"])
    assert {"torch", "numba"} < set(saved["measured_on"]["versions"])
    assert str(tmp_path) not in json.dumps(saved)
    assert "int8 + exact KV" in table
    assert [line.count("|") for line in table.splitlines()] == [7] * 4


def test_an_unknown_codec_is_refused_before_anything_is_loaded() -> None:
    app = command.typer.Typer()
    app.command()(command.quality)
    result = CliRunner().invoke(app, ["--codecs", "raw,fp4"])
    assert result.exit_code == 2
    assert "fp4" in result.output


def test_table_is_aligned_and_valid_markdown() -> None:
    assert markdown_table(("what", "n"), [("a", "1"), ("longer", "20")]).splitlines() == [
        "| what   |  n |",
        "| ------ | -: |",
        "| a      |  1 |",
        "| longer | 20 |",
    ]
