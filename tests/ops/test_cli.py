"""The command line as a person or a script meets it, over a stand-in stage and a real server."""

import asyncio
import json
import signal
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from structlog.testing import capture_logs
from typer.testing import CliRunner, Result

from ops.cli import app
from ops.commands.asking import Wanted, new_request
from ops.commands.run import count_lines
from pipeline.errors import InvalidRequest
from pipeline.settings import Settings
from tests.ops.answering import FAIL_WORD, HANG_WORD
from tests.ops.waiting import DEADLINE_S, holds

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

    def invoke(*words: object) -> Result:
        with capture_logs():
            return CliRunner().invoke(app, [str(word) for word in words])

    return invoke


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
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": "/v1/chat/completions", "body": body})


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
    assert next(row for row in rows if row[:1] == ["one"])[:3] == ["one", "3", "3"]
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


async def test_ctrl_c_stops_everything_and_keeps_what_was_finished(
    stack_env: dict[str, str], procfile: Path, tmp_path: Path, home: Path
) -> None:
    source = write_lines(tmp_path, chat("one", "a"), "{", chat("two", HANG_WORD))
    target = tmp_path / "out.jsonl"
    async with sluice_process(procfile, "run", "-i", source, "-o", target) as process:
        await line_with(process.stderr, "line 2")
        await holds(lambda: b'"one"' in partial_of(target))
        process.send_signal(signal.SIGINT)
        _, stderr = await asyncio.wait_for(process.communicate(), DEADLINE_S)
    assert process.returncode == 130, stderr
    assert b"2 finished lines are in" in stderr
    assert stderr.endswith(b"stopped\n")
    assert not target.exists()
    assert [record["custom_id"] for record in records_in(tmp_path / "out.jsonl.partial")] == ["one", None]
    assert not (home / "valkey" / "server.sock").exists()


async def test_sigterm_stops_as_ctrl_c_does(stack_env: dict[str, str], procfile: Path, home: Path) -> None:
    async with sluice_process(procfile, "up") as process:
        await line_with(process.stderr, "ready after")
        process.terminate()
        await asyncio.wait_for(process.communicate(), DEADLINE_S)
    assert process.returncode == 143
    assert not (home / "valkey" / "server.sock").exists()


async def test_run_uses_the_stack_that_is_up(stack_env: dict[str, str], procfile: Path, tmp_path: Path) -> None:
    source = write_lines(tmp_path, chat("one", "a b"))
    broken = tmp_path / "Broken"
    broken.write_text("tokenizer: false\n")  # so a stack of its own would fail
    async with sluice_process(procfile, "up") as up:
        await line_with(up.stderr, "ready after")
        async with sluice_process(broken, "run", "-i", source, "-o", tmp_path / "out.jsonl") as run:
            _, stderr = await asyncio.wait_for(run.communicate(), DEADLINE_S)
            assert run.returncode == 0, stderr
        async with sluice_process(procfile, "up") as second:
            _, stderr = await asyncio.wait_for(second.communicate(), DEADLINE_S)
            assert second.returncode == 1
            assert b"another `sluice up` runs" in stderr
        up.send_signal(signal.SIGINT)
        await asyncio.wait_for(up.communicate(), DEADLINE_S)
        assert up.returncode == 130
    assert len(records_in(tmp_path / "out.jsonl")) == 1


def test_generate_prints_the_text_and_nothing_else(sluice: Sluice) -> None:
    result = sluice("generate", "--seed", 3, "hello there")
    assert result.exit_code == 0, result.stderr
    assert result.stdout == "HELLO THERE seed 3\n"


def test_generate_prints_one_object_as_json(sluice: Sluice) -> None:
    result = sluice("generate", "--json", "--raw", "--seed", 3, "hello there")
    assert result.exit_code == 0, result.stderr
    answer = json.loads(result.stdout)
    assert answer["text"] == "HELLO THERE seed 3"
    assert (answer["seed"], answer["token_ids"], answer["finish_reason"]) == (3, [0, 1], "stop")
    assert answer["usage"]["completion_tokens"] == 2


def test_generate_that_fails_says_why(sluice: Sluice) -> None:
    result = sluice("generate", f"please {FAIL_WORD}")
    assert result.exit_code == 1
    assert "error: tokenizer: no" in result.stderr


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["--temperature", "3", "hi"], "error: temperature: must be between 0 and 2, got 3.0"),
        (["--max-tokens", "0", "hi"], "error: max_tokens: must be between 1 and"),
        (["--seed", "-1", "hi"], "error: seed: must be between 0 and"),
        ([""], "error: prompt: is empty"),
        (["--raw", "--system", "x", "hi"], "error: system: belongs to a chat"),
        (["--stop", "", "hi"], "error: stop: each string must have 1 to 256 characters"),
    ],
)
def test_generate_refuses_a_wrong_option_before_anything_starts(
    sluice: Sluice, words: list[str], problem: str, home: Path
) -> None:
    result = sluice("generate", *words)
    assert result.exit_code == 2
    assert problem in result.stderr
    assert list(home.iterdir()) == []


def test_request_has_the_models_own_sampling_unless_told_otherwise(stack_settings: Settings) -> None:
    settings = stack_settings.model_copy(update={"model": "smollm2-135m-instruct"})
    plain = new_request(Wanted("hi", "be brief", False, True, {}), settings)
    chosen = new_request(Wanted("hi", None, True, False, {"temperature": 0.0}), settings)
    assert (plain.params.temperature, plain.params.top_p) == (0.2, 0.9)
    assert plain.messages is not None
    assert [message.role for message in plain.messages] == ["system", "user"]
    assert (chosen.params.temperature, chosen.prompt, chosen.speculate) == (0.0, "hi", False)


def test_half_a_surrogate_pair_is_refused(stack_settings: Settings) -> None:
    with pytest.raises(InvalidRequest, match="prompt: is not Unicode text"):
        new_request(Wanted("\ud800", None, False, True, {}), stack_settings)


def test_models_list_says_what_is_there(sluice: Sluice, home: Path) -> None:
    result = sluice("models", "list", "--json")
    assert result.exit_code == 0
    assert json.loads(result.stdout)[0]["state"] == "missing"
    assert "smollm2-135m-instruct" in sluice("models", "list").stdout


def test_pull_of_an_unknown_model_lists_those_there_are(sluice: Sluice) -> None:
    result = sluice("models", "pull", "gpt-9")
    assert result.exit_code == 2
    assert "known: smollm2-135m-instruct" in result.stderr


@pytest.mark.parametrize("words", [(), ("run",), ("generate",), ("up",), ("models",), ("models", "pull")])
def test_every_command_explains_itself(sluice: Sluice, words: tuple[str, ...]) -> None:
    result = sluice(*words, "--help")
    assert result.exit_code == 0
    assert "Usage:" in result.stdout


@pytest.mark.parametrize(("data", "expected"), [(b"", 0), (b"a", 1), (b"a\n", 1), (b"a\nb", 2), (b"\n\n", 2)])
def test_lines_are_counted_with_and_without_a_last_newline(tmp_path: Path, data: bytes, expected: int) -> None:
    path = tmp_path / "lines"
    path.write_bytes(data)
    assert count_lines(path) == expected


def partial_of(target: Path) -> bytes:
    return b"".join(path.read_bytes() for path in target.parent.glob(f".{target.name}.*"))
