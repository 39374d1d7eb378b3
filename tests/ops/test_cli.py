"""The command line as a person or a script meets it, over a stand-in stage and a real server."""

import asyncio
import json
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from structlog.testing import capture_logs
from typer.testing import CliRunner, Result

from ops.cli import app
from ops.commands.asking import Wanted, new_request
from ops.commands.generate import summary
from pipeline.client.answers import Answer, Timing
from pipeline.client.asks import Submitted
from pipeline.errors import InvalidRequest
from pipeline.messages import Failure, Terminal
from pipeline.settings import Settings
from tests.ops.answering import FAIL_WORD, HANG_WORD
from tests.ops.command_line import COMMAND, line_with, sluice_process
from tests.ops.waiting import DEADLINE_S

Sluice = Callable[..., Result]


@pytest.fixture
def procfile(tmp_path: Path) -> Path:
    """One stage that answers everything, and the real jobs process."""
    path = tmp_path / "Procfile"
    path.write_text("jobs: python -m stages.jobs\ntokenizer: python -m tests.ops.answering\n")
    return path


@pytest.fixture
def sluice(stack_env: dict[str, str], procfile: Path, monkeypatch: pytest.MonkeyPatch) -> Sluice:
    """Run a command line in this process."""
    monkeypatch.setattr("ops.stack.default_procfile", lambda: procfile)

    def invoke(*words: object) -> Result:
        with capture_logs():
            return CliRunner().invoke(app, [str(word) for word in words])

    return invoke


def chat(custom_id: str, text: str, **body: object) -> str:
    body = {"model": "tiny", "messages": [{"role": "user", "content": text}], **body}
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": "/v1/chat/completions", "body": body})


def write_lines(tmp_path: Path, *lines: str) -> Path:
    path = tmp_path / "in.jsonl"
    path.write_text("".join(line + "\n" for line in lines))
    return path


def records_in(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_run_writes_results_in_order_and_errors_apart(sluice: Sluice, tmp_path: Path) -> None:
    source = write_lines(
        tmp_path,
        chat("one", "a b c", seed=5),
        "{not json",
        chat("two", f"please {FAIL_WORD}"),
        chat("three", "a", temperature=9),
        chat("four", "d"),
    )
    target = tmp_path / "results" / "out.jsonl"
    result = sluice("run", "-i", source, "-o", target, "--profile", "--log-memory")
    assert result.exit_code == 1, result.stderr
    records, errors = records_in(target), records_in(tmp_path / "results" / "out.errors.jsonl")
    assert [record["custom_id"] for record in records] == ["one", "four"]
    assert [record["custom_id"] for record in errors] == [None, "two", "three"]
    content = records[0]["response"]["body"]["choices"][0]["message"]["content"]  # pyright: ignore
    assert content == "A B C seed 5"
    assert "line 2: is not JSON" in result.stderr
    assert "line 3 ('two'): no" in result.stderr
    assert "line 4 ('three'): temperature: must be between 0 and 2, got 9" in result.stderr
    rows = [line.split() for line in result.stdout.splitlines()]
    assert next(row for row in rows if row[:1] == ["one"])[:3] == ["one", "3", "3"]
    assert "5 lines, 3 of them failed: 6 prompt tokens, 4 output tokens in" in result.stdout


def test_errors_can_stay_in_their_places(sluice: Sluice, tmp_path: Path) -> None:
    source, target = write_lines(tmp_path, chat("one", "a"), "{", chat("two", "b")), tmp_path / "out.jsonl"
    result = sluice("run", "-i", source, "-o", target, "--errors", target, "--no-table")
    assert result.exit_code == 1, result.stderr
    assert [record["custom_id"] for record in records_in(target)] == ["one", None, "two"]
    assert sorted(path.name for path in tmp_path.glob("*.jsonl")) == ["in.jsonl", "out.jsonl"]


def test_run_prints_progress_and_figures_as_json_lines(sluice: Sluice, tmp_path: Path) -> None:
    source = write_lines(tmp_path, chat("one", "a b"), chat("two", "c"))
    result = sluice("run", "--input-file", source, "--output-file", tmp_path / "out.jsonl", "--json")
    assert result.exit_code == 0, result.stderr
    *events, figures = [json.loads(line) for line in result.stdout.splitlines()]
    assert {event["event"] for event in events} == {"note", "progress"}
    assert (figures["event"], figures["num_lines"], figures["num_failed"]) == ("completed", 2, 0)
    assert (figures["output_tokens"], figures["output"]) == (3, str(tmp_path / "out.jsonl"))


def test_run_of_more_lines_than_the_window_keeps_their_order(sluice: Sluice, tmp_path: Path) -> None:
    source = write_lines(tmp_path, *(chat(f"id-{number}", "a b c") for number in range(60)))
    result = sluice("run", "-i", source, "-o", tmp_path / "out.jsonl", "--window", 3, "--no-table")
    assert result.exit_code == 0, result.stderr
    assert [record["custom_id"] for record in records_in(tmp_path / "out.jsonl")] == [
        f"id-{number}" for number in range(60)
    ]
    assert "id-7" not in result.stdout


def test_requests_can_come_through_a_pipe(
    sluice: Sluice, tmp_path: Path, procfile: Path, stack_env: dict[str, str]
) -> None:
    text = chat("one", "a") + "\n" + chat("two", "b") + "\n"
    command = [sys.executable, "-c", COMMAND, str(procfile), "run", "-i", "-", "-o", str(tmp_path / "out.jsonl")]
    result = subprocess.run(command, input=text, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert result.returncode == 0, result.stderr
    assert [record["custom_id"] for record in records_in(tmp_path / "out.jsonl")] == ["one", "two"]


@pytest.mark.parametrize(
    ("text", "words", "problem"),
    [
        ("", ("-o", "out.jsonl"), "error: input: "),
        ("\n\n", ("-o", "out.jsonl"), "has no requests"),
        ("{}", ("-o", "-"), "error: output: "),
        ("{}", ("-o", "."), "is a directory"),
        ("{}", ("-o", "/dev/null"), "is no regular file"),
    ],
)
def test_run_refuses_what_cannot_be_before_anything_starts(
    sluice: Sluice,
    tmp_path: Path,
    home: Path,
    monkeypatch: pytest.MonkeyPatch,
    text: str,
    words: list[str],
    problem: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "in.jsonl").write_text(text)
    result = sluice("run", "-i", "in.jsonl", *words)
    assert result.exit_code == 2, result.stderr
    assert problem in result.stderr
    assert not (home / "valkey").exists()


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


def test_a_run_that_is_refused_leaves_no_batch_behind(sluice: Sluice, tmp_path: Path, home: Path) -> None:
    source = write_lines(tmp_path, chat("one", "a"))
    result = sluice("run", "-i", source, "-o", tmp_path / "out.jsonl", "-m", "smollm2-135m-instruct")
    assert result.exit_code == 2
    assert list(home.glob("batches/*/manifest.json")) == []
    result = sluice("run", "-i", source, "-o", tmp_path / "out.jsonl")
    assert result.exit_code == 0, result.stderr


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


async def test_ctrl_c_stops_everything_and_the_same_command_goes_on(
    stack_env: dict[str, str], procfile: Path, tmp_path: Path, home: Path
) -> None:
    source = write_lines(tmp_path, chat("one", "a"), "{", chat("two", HANG_WORD))
    words = ("run", "-i", source, "-o", tmp_path / "out.jsonl", "--json")
    async with sluice_process(procfile, *words) as process:
        await line_with(process.stdout, '"num_done": 2')
        process.send_signal(signal.SIGINT)
        stdout, stderr = await asyncio.wait_for(process.communicate(), DEADLINE_S)
    assert process.returncode == 130, stderr
    assert b"2 of 3 lines are finished; the same command goes on" in stdout
    assert not (tmp_path / "out.jsonl").exists()
    assert not (home / "valkey" / "server.sock").exists()
    async with sluice_process(procfile, *words) as process:
        await line_with(process.stdout, "goes on: 2 of 3 lines are finished")


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


def test_what_came_before_a_failure_is_in_the_json() -> None:
    failure = Failure(stage="decode", code="deadline", message="too late", retryable=True)
    terminal = Terminal(finish_reason="error", failure=failure)
    answer = Answer(Submitted("r", 3, 0, 0.0), failure, Timing(0.0), terminal, 1.0)
    assert summary(answer, "Once upon")["text"] == "Once upon"
    assert summary(answer, "")["text"] is None


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
        (["--timeout", "0", "hi"], "error: timeout: must be a number of seconds above 0, at most 86400, got 0"),
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


def test_request_has_the_time_limit_of_the_command_line(stack_settings: Settings) -> None:
    limited, unlimited = Wanted("hi", None, True, True, {}, 2.5), Wanted("hi", None, True, True, {})
    assert (new_request(limited, stack_settings).timeout_s, new_request(unlimited, stack_settings).timeout_s) == (
        *(2.5, None),
    )


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
