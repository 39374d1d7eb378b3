"""run and cancel of batches that others run, too, or that are not what they were: over a stand-in stage."""

import asyncio
import json
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from redis.asyncio import Redis
from typer.testing import Result

from pipeline.batch.record import BatchState
from pipeline.batch.store import BatchStore
from pipeline.batch.submit import Prepared, prepare, submit
from pipeline.client.batches import batch_options, batches_dir
from pipeline.keys import Keys
from pipeline.settings import Settings
from tests.ops.answering import HANG_WORD
from tests.ops.command_line import COMMAND, line_with, sluice, sluice_process
from tests.ops.waiting import DEADLINE_S

Invoke = Callable[..., Result]


def chat(custom_id: str, text: str = "a b", **body: object) -> str:
    body = {"model": "tiny", "messages": [{"role": "user", "content": text}], **body}
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": "/v1/chat/completions", "body": body})


def write_lines(path: Path, *lines: str) -> Path:
    path.write_text("".join(line + "\n" for line in lines))
    return path


def ids_in(path: Path) -> list[str]:
    return [json.loads(line)["custom_id"] for line in path.read_text().splitlines()]


@pytest.fixture
def procfile(tmp_path: Path) -> Path:
    """A Procfile of the real jobs process, and one stage that answers everything."""
    path = tmp_path / "Procfile"
    path.write_text("jobs: python -m stages.jobs\ntokenizer: python -m tests.ops.answering\n")
    return path


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_lines(tmp_path / "in.jsonl", chat("one"), chat("two"))


@pytest.fixture
def in_process(stack_env: dict[str, str], procfile: Path, monkeypatch: pytest.MonkeyPatch) -> Invoke:
    """Run a command line in this process, with the stand-in stage."""
    monkeypatch.setattr("ops.stack.default_procfile", lambda: procfile)
    return sluice


def prepared(settings: Settings, source: Path, target: Path, **options: Any) -> Prepared:
    """A batch that a command left unfinished."""
    wanted = batch_options(source, target, model=settings.model).model_copy(update=options)
    return prepare(wanted, batches_dir(settings.home))


# What is not as it was


def test_another_input_for_the_same_output_is_refused_before_anything_starts(
    in_process: Invoke, stack_settings: Settings, source: Path, tmp_path: Path, home: Path
) -> None:
    batch = prepared(stack_settings, source, tmp_path / "out.jsonl")
    other = write_lines(tmp_path / "other.jsonl", chat("three"))
    result = in_process("run", "-i", other, "-o", tmp_path / "out.jsonl", "--no-speculate")
    assert result.exit_code == 2
    assert f"the unfinished batch {batch.manifest.batch_id}, which has another input, speculate 'true'" in result.stderr
    assert "--restart" in result.stderr
    assert not (home / "valkey").exists()


def test_a_role_that_cannot_be_is_a_usage_error(in_process: Invoke, source: Path, tmp_path: Path) -> None:
    result = in_process("run", "-i", source, "-o", tmp_path / "out.jsonl", "--response-role", "")
    assert result.exit_code == 2
    assert "--response-role" in result.stderr


def test_a_setting_that_is_wrong_is_said_without_a_traceback(
    in_process: Invoke, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLUICE_MODLE", "x")
    result = in_process("run", "-i", source, "-o", tmp_path / "out.jsonl")
    assert result.exit_code == 2
    assert result.stderr == "error: SLUICE_MODLE is not a setting; the nearest one is SLUICE_MODEL\n"


def test_starting_over_takes_the_place_of_the_unfinished_batch(
    in_process: Invoke, stack_settings: Settings, source: Path, tmp_path: Path
) -> None:
    old = prepared(stack_settings, source, tmp_path / "out.jsonl")
    other = write_lines(tmp_path / "other.jsonl", chat("[red]three[/blue]"))
    result = in_process("run", "-i", other, "-o", tmp_path / "out.jsonl", "--restart")
    assert result.exit_code == 0, result.output
    assert ids_in(tmp_path / "out.jsonl") == ["[red]three[/blue]"]
    assert "[red]three[/blue]" in result.stdout  # brackets are no markup
    assert not old.directory.path.exists()


# Two at once


async def test_two_commands_for_one_output_follow_one_batch_and_share_what_they_start(
    stack_env: dict[str, str], procfile: Path, tmp_path: Path, home: Path
) -> None:
    source = write_lines(tmp_path / "in.jsonl", *(chat(f"id-{number}") for number in range(50)))
    other = write_lines(tmp_path / "other.jsonl", *(chat(f"other-{number}") for number in range(20)))
    same = ("run", "-i", source, "-o", tmp_path / "out.jsonl", "--json", "--window", 4)
    another = ("run", "-i", other, "-o", tmp_path / "another.jsonl", "--json", "--window", 4)
    async with (
        sluice_process(procfile, *same) as first,
        sluice_process(procfile, *same) as second,
        sluice_process(procfile, *another) as third,
    ):
        outputs = [await asyncio.wait_for(process.communicate(), DEADLINE_S) for process in (first, second, third)]
        assert [first.returncode, second.returncode, third.returncode] == [0, 0, 0], outputs
    figures = [json.loads(stdout.splitlines()[-1]) for stdout, _ in outputs]
    assert figures[0]["batch_id"] == figures[1]["batch_id"] != figures[2]["batch_id"]
    assert [one["num_succeeded"] for one in figures] == [50, 50, 20]
    assert ids_in(tmp_path / "out.jsonl") == [f"id-{number}" for number in range(50)]
    assert ids_in(tmp_path / "another.jsonl") == [f"other-{number}" for number in range(20)]
    assert not (home / "valkey" / "server.sock").exists()


# Cancelling


@pytest.fixture
def server(stack_env: dict[str, str], valkey_url: str, namespace: str, monkeypatch: pytest.MonkeyPatch) -> Settings:
    """Commands find a server, and no stage."""
    monkeypatch.setenv("SLUICE_REDIS_URL", valkey_url)
    monkeypatch.setenv("SLUICE_NAMESPACE", namespace)
    return Settings()


async def batch_in(state: BatchState, settings: Settings, raw: Redis, source: Path, target: Path) -> str:
    store = BatchStore(raw, "test", Keys(settings.namespace))
    batch_id = await submit(store, prepared(settings, source, target))
    await store.move(batch_id, ["validating"], state)
    return batch_id


async def test_cancel_takes_batches_and_requests(
    server: Settings, procfile: Path, raw_redis: Redis, source: Path, tmp_path: Path
) -> None:
    running = await batch_in("in_progress", server, raw_redis, source, tmp_path / "one.jsonl")
    over = await batch_in("completed", server, raw_redis, source, tmp_path / "two.jsonl")
    ids = (running, "req_nobody", over, "batch_nobody", f"{running}-0")
    async with sluice_process(procfile, "cancel", *ids) as cancel:
        stdout, _ = await asyncio.wait_for(cancel.communicate(), DEADLINE_S)
        assert cancel.returncode == 1
    said = [line.split(maxsplit=1) for line in stdout.decode().splitlines()]
    assert [one for one, _ in said] == [running, "req_nobody", over, "batch_nobody", f"{running}-0"]
    assert [words.split(":")[0] for _, words in said] == [
        "is cancelled",
        "unknown",
        "had already ended, or was about to",
        "unknown",
        "unknown",
    ]
    store = BatchStore(raw_redis, "test", Keys(server.namespace))
    assert (await store.read(running)).state == "cancelling"


async def test_a_batch_that_is_cancelled_ends_its_command_with_what_it_has(
    stack_env: dict[str, str], procfile: Path, tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write_lines(tmp_path / "in.jsonl", chat("one"), chat("hangs", HANG_WORD))
    async with sluice_process(procfile, "run", "-i", source, "-o", tmp_path / "out.jsonl", "--json") as run:
        await line_with(run.stdout, '"num_done": 1')
        batch_id = unfinished(stack_env)
        monkeypatch.setenv("SLUICE_REDIS_URL", f"unix://{home}/valkey/server.sock")  # that of the command's own stack
        async with sluice_process(procfile, "cancel", batch_id) as cancel:
            stdout, _ = await asyncio.wait_for(cancel.communicate(), DEADLINE_S)
            assert (cancel.returncode, stdout.startswith(f"{batch_id} is cancelled".encode())) == (0, True)
        stdout, stderr = await asyncio.wait_for(run.communicate(), DEADLINE_S)
        assert run.returncode == 1, stderr
    figures = json.loads(stdout.splitlines()[-1])
    assert (figures["event"], figures["num_succeeded"], figures["num_failed"]) == ("cancelled", 1, 1)
    assert [error["code"] for error in figures["errors"]] == ["batch_cancelled"]
    assert ids_in(tmp_path / "out.jsonl") == ["one"]


def unfinished(environment: dict[str, str]) -> str:
    """The id of the only batch of a home."""
    [path] = batches_dir(Path(environment["SLUICE_HOME"])).glob("*/manifest.json")
    return json.loads(path.read_text())["batch_id"]


# Standard input


async def test_ctrl_c_while_standard_input_says_nothing_ends_it_at_once(
    stack_env: dict[str, str], procfile: Path, tmp_path: Path, home: Path
) -> None:
    words = ("run", "-i", "-", "-o", str(tmp_path / "out.jsonl"))
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", COMMAND, str(procfile), *words),
        stdin=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    async with asyncio.timeout(DEADLINE_S):
        while not list(batches_dir(home).glob(".input-*")):  # noqa: ASYNC110 - until it reads
            await asyncio.sleep(0.01)
        process.send_signal(signal.SIGINT)
        _, stderr = await process.communicate()
    assert (process.returncode, stderr.endswith(b"stopped\n")) == (130, True)
    assert [path.name for path in batches_dir(home).iterdir()] == [".lock"]
