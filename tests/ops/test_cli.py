"""The command line as a person or a script meets it, over a stand-in stage and a real server."""

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from ops.cli import app
from ops.commands import common
from ops.commands.generate import Wanted, new_request
from ops.commands.run import count_lines
from pipeline.errors import InvalidRequest
from pipeline.settings import Settings
from tests.ops.answering import CRASH_WORD, FAIL_WORD, HANG_WORD
from tests.ops.waiting import DEADLINE_S

Sluice = Callable[..., Result]
# As a process of its own: the same command line, but with the test's Procfile.
COMMAND = """
import sys
from pathlib import Path
from ops import stack
from ops.cli import main

procfile = Path(sys.argv.pop(1))
stack.default_procfile = lambda: procfile
main()
"""


@pytest.fixture
def sluice(stack_env: dict[str, str], procfile: Path, monkeypatch: pytest.MonkeyPatch) -> Sluice:
    """Run a command line in this process."""
    monkeypatch.setattr("ops.stack.default_procfile", lambda: procfile)
    monkeypatch.setattr(common, "configure_logs", lambda *_: None)  # the tests have their own
    return lambda *words: CliRunner().invoke(app, [str(word) for word in words])


@asynccontextmanager
async def sluice_process(procfile: Path, *words: object) -> AsyncIterator[asyncio.subprocess.Process]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", COMMAND, str(procfile), *map(str, words)),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def line_with(stream: asyncio.StreamReader | None, text: str) -> str:
    assert stream is not None
    async with asyncio.timeout(DEADLINE_S):
        while (line := (await stream.readline()).decode()) and text not in line:
            pass
    assert text in line
    return line


def chat(custom_id: str, text: str, **body: object) -> str:
    body = {"model": "tiny", "messages": [{"role": "user", "content": text}], **body}
    return json.dumps(
        {"custom_id": custom_id, "method": "POST", "url": "/v1/chat/completions", "body": body}
    )


def write_lines(tmp_path: Path, *lines: str) -> Path:
    path = tmp_path / "in.jsonl"
    path.write_text("".join(line + "\n" for line in lines))
    return path


def records_in(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_run_writes_results_in_order_with_errors_in_their_places(sluice: Sluice, tmp_path: Path) -> None:
    source = write_lines(
        tmp_path,
        chat("one", "a b c", seed=5),
        "{not json",
        chat("two", f"please {FAIL_WORD}"),
        chat("three", "a", temperature=9),
        chat("four", "d"),
    )
    target = tmp_path / "results" / "out.jsonl"
    result = sluice("run", "-i", source, "-o", target)
    assert result.exit_code == 1, result.stderr
    records = records_in(target)
    assert [record["custom_id"] for record in records] == ["one", None, "two", "three", "four"]
    assert [record["error"] is None for record in records] == [True, False, False, False, True]
    content = records[0]["response"]["body"]["choices"][0]["message"]["content"]  # pyright: ignore
    assert content == "A B C seed 5"
    assert "line 2: is not JSON" in result.stderr
    assert "line 3 ('two'): tokenizer failed: no" in result.stderr
    assert "line 4 ('three'): temperature: must be between 0 and 2, got 9" in result.stderr
    rows = [line.split() for line in result.stdout.splitlines()]
    assert ["one", "3", "3"] == next(row for row in rows if row[:1] == ["one"])[:3]
    assert "5 lines, 3 of them failed: 6 prompt tokens, 4 output tokens in" in result.stdout


def test_run_prints_figures_as_json(sluice: Sluice, tmp_path: Path) -> None:
    source = write_lines(tmp_path, chat("one", "a b"), chat("two", "c"))
    result = sluice("run", "-i", source, "-o", tmp_path / "out.jsonl", "--json")
    assert result.exit_code == 0, result.stderr
    figures = json.loads(result.stdout)
    assert (figures["num_lines"], figures["num_failed"], figures["output_tokens"]) == (2, 0, 3)
    assert figures["startup_s"] > 0
    assert figures["output"] == str(tmp_path / "out.jsonl")


def test_run_of_more_lines_than_the_window_keeps_their_order(sluice: Sluice, tmp_path: Path) -> None:
    source = write_lines(tmp_path, *(chat(f"id-{number}", "a b c") for number in range(60)))
    result = sluice("run", "-i", source, "-o", tmp_path / "out.jsonl", "--window", 3, "--no-table")
    assert result.exit_code == 0, result.stderr
    assert [record["custom_id"] for record in records_in(tmp_path / "out.jsonl")] == [
        f"id-{number}" for number in range(60)
    ]
    assert "id-7" not in result.stdout


def test_empty_input_gives_an_empty_output(sluice: Sluice, tmp_path: Path) -> None:
    result = sluice("run", "-i", write_lines(tmp_path), "-o", tmp_path / "out.jsonl")
    assert result.exit_code == 0, result.stderr
    assert (tmp_path / "out.jsonl").read_bytes() == b""


def test_output_must_not_be_the_input(sluice: Sluice, tmp_path: Path) -> None:
    source = write_lines(tmp_path, chat("one", "a"))
    before = source.read_bytes()
    result = sluice("run", "-i", source, "-o", source)
    assert (result.exit_code, source.read_bytes()) == (2, before)
    assert "output: is the input" in result.stderr


def test_missing_input_is_a_usage_error(sluice: Sluice, tmp_path: Path) -> None:
    result = sluice("run", "-i", tmp_path / "nowhere", "-o", tmp_path / "out.jsonl")
    assert result.exit_code == 2
    assert "nowhere" in result.stderr


def test_missing_model_is_a_usage_error_that_says_what_to_do(sluice: Sluice, tmp_path: Path) -> None:
    source = write_lines(tmp_path, chat("one", "a"))
    result = sluice("run", "-i", source, "-o", tmp_path / "out.jsonl", "-m", "smollm2-135m-instruct")
    assert result.exit_code == 2
    assert "run `sluice models pull smollm2-135m-instruct`" in result.stderr
    assert not (tmp_path / "out.jsonl").exists()


def test_unknown_setting_is_a_usage_error_that_names_the_nearest(
    sluice: Sluice, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLUICE_MODLE", "x")
    result = sluice("generate", "hello")
    assert result.exit_code == 2
    assert result.stderr == "error: SLUICE_MODLE is not a setting; the nearest one is SLUICE_MODEL\n"


def test_stage_that_does_not_start_ends_the_command_with_its_last_lines(
    sluice: Sluice, procfile: Path, tmp_path: Path
) -> None:
    procfile.write_text('tokenizer: python -c "raise SystemExit(chr(33) * 3)"\n')
    source = write_lines(tmp_path, chat("one", "a"))
    result = sluice("run", "-i", source, "-o", tmp_path / "out.jsonl")
    assert result.exit_code == 1
    assert "error: tokenizer ended with code 1. Its last lines" in result.stderr
    assert "\n  !!!\n" in result.stderr
    assert not (tmp_path / "out.jsonl").exists()


def test_stage_that_crashes_over_and_over_ends_the_command(
    sluice: Sluice, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ops.supervisor.RestartPolicy.__init__.__defaults__", ())  # see quick_policy
    raise AssertionError
