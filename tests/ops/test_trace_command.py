"""`sluice trace` over a real server, and the picture of what it writes."""

import asyncio
import json
import subprocess
import sys
import xml.etree.ElementTree as ET
from collections.abc import Sequence
from pathlib import Path

import pytest

from kv_store.pool import PoolUsage
from ops.tracing.file import read_trace
from ops.tracing.picture import Picture, main
from ops.tracing.trace import trace_of
from pipeline import wire
from pipeline.clock import now_us
from pipeline.connect import open_client, open_transport
from pipeline.keys import Keys
from pipeline.messages import Stamp, Terminal, Usage
from pipeline.samples import SampleLog
from pipeline.settings import Settings
from pipeline.transport import Emit, Finish, Transaction
from tests.ops.command_line import sluice
from tests.ops.test_trace import request, sample, shifted
from tests.ops.trace_rules import check_trace
from tests.pipeline.test_timeline import BEGINNING, TWO_CHUNKS


@pytest.fixture
def elsewhere(stack_env: dict[str, str], valkey_url: str, namespace: str, monkeypatch: pytest.MonkeyPatch) -> Settings:
    """A stack that others run, at SLUICE_REDIS_URL."""
    monkeypatch.setenv("SLUICE_REDIS_URL", valkey_url)
    monkeypatch.setenv("SLUICE_NAMESPACE", namespace)
    return Settings()


def just_now() -> tuple[Stamp, ...]:
    return shifted(TWO_CHUNKS, now_us() - BEGINNING)


async def serve(settings: Settings, *request_ids: str, stamps: Sequence[Stamp] = (), unfinished: str = "") -> None:
    """Admit requests and end all of them but one; take a sample."""
    transport = await open_transport(settings)
    client = open_client(settings)
    try:
        for request_id in request_ids:
            await transport.admit(request_id, "batch", b"payload")
            if request_id == unfinished:
                continue
            [delivery] = await transport.receive("tokenizer", 1, 1)
            usage = Usage(prompt_tokens=1, completion_tokens=3)
            terminal = Terminal(finish_reason="stop", text="secret", usage=usage, stamps=tuple(stamps))
            effects = (Emit(b"delta", 0, 3), Finish(wire.pack(terminal), "finished"))
            await transport.commit([Transaction(delivery, request_id, 0, effects, ack=True)])
        log = SampleLog(client, "x", Keys(settings.namespace))
        await log.take("s", "pool", PoolUsage(num_blobs=1, used_bytes=100, quota_bytes=1_000))
    finally:
        await client.aclose()
        await transport.close()


def test_one_request_and_what_the_queues_held(elsewhere: Settings, tmp_path: Path) -> None:
    asyncio.run(serve(elsewhere, "a", "b", stamps=just_now()))
    target = tmp_path / "t.json"
    result = sluice("trace", "a", "-o", target)
    assert result.exit_code == 0, result.output
    document = json.loads(target.read_text())
    check_trace(document)
    assert {one["args"]["request_id"] for one in document["traceEvents"] if one["ph"] == "X"} == {"a"}
    assert [one["args"] for one in document["traceEvents"] if one["name"] == "KV pool"] == [{"bytes": 100}]
    assert "secret" not in target.read_text()
    assert target.stat().st_mode & 0o777 == 0o600
    assert "1 requests, 1 samples" in result.stderr


def test_the_last_ones_to_standard_output(elsewhere: Settings) -> None:
    asyncio.run(serve(elsewhere, "a", "b", "c", stamps=just_now()))
    result = sluice("trace", "--last", "2", "-o", "-")
    assert result.exit_code == 0
    document = json.loads(result.stdout)
    check_trace(document)
    assert {one["args"]["request_id"] for one in document["traceEvents"] if one["ph"] == "X"} == {"b", "c"}


async def serve_foreign(settings: Settings, request_id: str) -> None:
    """Admit a request and end it as another version would."""
    transport = await open_transport(settings)
    try:
        await transport.admit(request_id, "batch", b"payload")
        [delivery] = await transport.receive("tokenizer", 1, 1)
        finish = Finish(b"\x81\xa4kind\xa6future", "finished")
        await transport.commit([Transaction(delivery, request_id, 0, (finish,), ack=True)])
    finally:
        await transport.close()


def test_of_the_last_ones_those_that_cannot_be_read_are_left_out(elsewhere: Settings) -> None:
    asyncio.run(serve_foreign(elsewhere, "foreign"))
    alone = sluice("trace", "--last", "5", "-o", "-")
    assert alone.exit_code == 2
    assert "no request has ended here lately; 1 of another version cannot be read" in alone.stderr
    asyncio.run(serve(elsewhere, "a", stamps=just_now()))
    result = sluice("trace", "--last", "5", "-o", "-")
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    assert {one["args"]["request_id"] for one in document["traceEvents"] if one["ph"] == "X"} == {"a"}
    assert "1 of another version cannot be read" in result.stderr


def test_a_request_that_is_not_finished_is_said_to_be(elsewhere: Settings, tmp_path: Path) -> None:
    asyncio.run(serve(elsewhere, "a", unfinished="a"))
    result = sluice("trace", "a", "-o", tmp_path / "t.json")
    assert result.exit_code == 1
    assert "request a is not finished" in result.stderr
    assert not (tmp_path / "t.json").exists()


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["never-admitted", "-o", "t.json"], "never-admitted is not known"),
        (["--last", "3", "-o", "t.json"], "no request has ended here lately"),
        (["-o", "t.json"], "either the id of a request, or --last N"),
        (["a", "--last", "3", "-o", "t.json"], "either the id of a request, or --last N"),
    ],
)
@pytest.mark.usefixtures("elsewhere")
def test_what_cannot_be_traced_is_said(
    words: list[str], problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = sluice("trace", *words)
    assert result.exit_code == 2
    assert problem in result.stderr
    assert not (tmp_path / "t.json").exists()


def test_without_a_stack_there_is_nothing_to_trace(stack_env: dict[str, str]) -> None:
    result = sluice("trace", "--last", "3", "-o", "-")
    assert result.exit_code == 2
    assert "no `sluice up` runs" in result.stderr


def test_the_picture_shows_every_slice_arrow_and_counter(tmp_path: Path) -> None:
    requests = [request(f"r<{number}>", shifted(TWO_CHUNKS, 2_000 * number)) for number in range(3)]
    document = trace_of(requests, [sample(0), sample(9_000, prefill=(2, 1), decode=(1, 1))])
    (tmp_path / "t.json").write_text(json.dumps(document))
    main([str(tmp_path / "t.json"), "-o", str(tmp_path / "t.svg"), "--title", "Three & more"])
    picture = ET.fromstring((tmp_path / "t.svg").read_text())
    svg = "{http://www.w3.org/2000/svg}"
    trace = read_trace(document)
    assert len(picture.findall(f"{svg}rect")) == 1 + len(trace.slices)
    assert len(picture.findall(f"{svg}path[@class='arrow']")) == len(trace.arrows) == 36
    words = [str(text.text) for text in picture.iter(f"{svg}text")]
    assert "Three & more" in words
    assert {"tokenizer", "prefill", "compressor", "decode", "prefill queue", "decode queue", "KV pool"} <= set(words)
    assert "tokenizer queue" not in words  # it was always empty
    width, height = float(picture.attrib["width"]), float(picture.attrib["height"])
    for box in picture.findall(f"{svg}rect"):
        left, top = float(box.get("x", "0")), float(box.get("y", "0"))
        assert 0 <= left <= left + float(box.attrib["width"]) <= width
        assert 0 <= top <= top + float(box.attrib["height"]) <= height


def test_a_trace_without_requests_cannot_be_drawn(tmp_path: Path) -> None:
    (tmp_path / "t.json").write_text(json.dumps(trace_of([], [])))
    command = [sys.executable, "-m", "ops.tracing.picture", str(tmp_path / "t.json"), "-o", str(tmp_path / "t.svg")]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert ended.returncode == 1
    assert "holds no request" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_a_picture_of_one_moment_is_no_division_by_zero() -> None:
    instant = [stamp.model_copy(update={"at_us": BEGINNING}) for stamp in TWO_CHUNKS]
    assert Picture(read_trace(json.loads(json.dumps(trace_of([request("r", instant)], []))))).svg()
