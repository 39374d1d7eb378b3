"""enqueue, tail and cancel as a person or a script meets them, over a stand-in stage and a real server."""

import asyncio
import json
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from redis import Redis

from ops.running import UpLock, find_advert
from pipeline.client import Client, Terminal
from pipeline.keys import Keys
from pipeline.messages import GenerateRequest
from pipeline.settings import Settings
from pipeline.wire import unpack
from tests.ops.answering import FAIL_WORD, HANG_WORD, commit, emit
from tests.ops.command_line import line_with, sluice, sluice_process
from tests.ops.waiting import DEADLINE_S, POLL_S


@pytest.fixture
def _server(stack_env: dict[str, str], valkey_url: str, namespace: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands find a server, with a stack or without."""
    monkeypatch.setenv("SLUICE_REDIS_URL", valkey_url)
    monkeypatch.setenv("SLUICE_NAMESPACE", namespace)


@pytest.fixture
def _stack(_server: None) -> Iterator[None]:
    """Somebody else's stage works on that server."""
    process = subprocess.Popen([sys.executable, "-m", "tests.ops.answering"])
    yield
    process.terminate()
    process.wait(DEADLINE_S)


def enqueued(*words: object) -> str:
    result = sluice("enqueue", *words)
    assert result.exit_code == 0, result.stderr
    return result.stdout.removesuffix("\n")


@pytest.mark.usefixtures("_stack")
def test_id_alone_is_printed_and_gives_the_text_as_often_as_wanted() -> None:
    request_id = enqueued("--seed", 3, "--raw", "hello there")
    assert request_id.startswith("req_")
    for _ in range(2):
        result = sluice("tail", request_id)
        assert (result.exit_code, result.stdout) == (0, "HELLO THERE seed 3\n")
    assert sluice("tail", "--from", 1, request_id).stdout == "THERE seed 3\n"
    assert sluice("tail", "--from", 2, request_id).stdout == "seed 3\n"


@pytest.mark.usefixtures("_stack")
def test_tail_as_json_is_an_object_for_each_delta_and_one_for_the_end() -> None:
    request_id = enqueued("--seed", 3, "hello there")
    result = sluice("tail", "--json", request_id)
    *deltas, terminal = [json.loads(line) for line in result.stdout.splitlines()]
    assert deltas == [
        {"first_index": 0, "token_ids": [0], "text": "HELLO "},
        {"first_index": 1, "token_ids": [1], "text": "THERE "},
    ]
    assert (terminal["finish_reason"], terminal["text"], terminal["failure"]) == ("stop", "seed 3", None)
    assert terminal["usage"]["completion_tokens"] == 2


@pytest.mark.usefixtures("_stack")
def test_tail_of_a_failed_request_says_why_and_fails() -> None:
    result = sluice("tail", enqueued(FAIL_WORD))
    assert result.exit_code == 1
    assert result.stderr.endswith("error: tokenizer: no\n")


@pytest.mark.usefixtures("_server")
def test_unknown_id_is_told_with_what_it_may_mean() -> None:
    result = sluice("tail", "req_nobody")
    assert result.exit_code == 1
    assert "request req_nobody is not known: never accepted, its results have expired" in result.stderr
    result = sluice("cancel", "req_nobody")
    assert result.exit_code == 1
    assert result.stdout.startswith("req_nobody unknown: never accepted")


@pytest.mark.usefixtures("_stack")
def test_cancel_says_what_became_of_each_request() -> None:
    running, over = enqueued(HANG_WORD), enqueued("hello")
    assert sluice("tail", over).exit_code == 0
    result = sluice("cancel", running, over)
    assert (result.exit_code, result.stdout) == (0, f"{running} cancelled\n{over} had already ended\n")
    result = sluice("tail", running)
    assert (result.exit_code, result.stdout) == (1, "\n")
    assert result.stderr.endswith("error: the request was cancelled\n")
    assert sluice("cancel", running).stdout == f"{running} had already ended\n"
    assert sluice("cancel", over, "req_nobody").exit_code == 1


@pytest.mark.usefixtures("_server")
def test_enqueued_without_a_stage_it_waits_and_that_is_told() -> None:
    result = sluice("enqueue", "--id", "mine", "hello")
    assert (result.exit_code, result.stdout) == (0, "mine\n")
    assert "no stage of this stack runs" in result.stderr
    result = sluice("enqueue", "--id", "mine", "hello")
    assert (result.exit_code, result.stdout) == (0, "mine\n")
    assert "was there already: nothing was enqueued" in result.stderr


@pytest.mark.usefixtures("_server")
def test_time_limit_of_the_command_line_reaches_the_queue(valkey_url: str, namespace: str) -> None:
    request_id = enqueued("--timeout", 60, "hello")
    with Redis.from_url(valkey_url, protocol=2) as server:
        deadline_ms = server.zscore(Keys(namespace).deadlines(), request_id)
        seconds, _ = server.time()  # pyright: ignore[reportGeneralTypeIssues]
    assert 30 < float(str(deadline_ms)) / 1000 - seconds <= 61


@pytest.mark.usefixtures("_server")
def test_prompt_comes_from_standard_input_and_goes_into_the_queue_that_was_asked_for(
    valkey_url: str, namespace: str
) -> None:
    result = sluice("enqueue", "--priority", "batch", "--raw", "-", text="from a file")
    assert result.exit_code == 0, result.stderr
    with Redis.from_url(valkey_url, protocol=2) as server:
        [(_, fields)] = server.xrange(Keys(namespace).stream("tokenizer", "batch"))  # pyright: ignore[reportGeneralTypeIssues]
    request = unpack(fields[b"p"], GenerateRequest)
    assert (request.prompt, request.priority, request.request_id) == ("from a file", "batch", result.stdout.strip())


@pytest.mark.parametrize("words", [("enqueue", "hello"), ("tail", "req_x"), ("cancel", "req_x")])
def test_without_any_stack_it_says_how_to_get_one(stack_env: dict[str, str], words: tuple[str, ...]) -> None:
    result = sluice(*words)
    assert result.exit_code == 2
    assert "SLUICE_REDIS_URL is not set" in result.stderr
    assert "Start one with `sluice up`" in result.stderr


@pytest.mark.usefixtures("_server")
@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["--temperature", "3", "hi"], "error: temperature: must be between 0 and 2, got 3.0"),
        ([""], "error: prompt: is empty"),
        (["--raw", "--system", "x", "hi"], "error: system: belongs to a chat"),
        (["--id", "a b", "hi"], "error: request_id: must have 1 to 200 letters"),
        (["--id", "batch_1", "hi"], "error: request_id: begins with batch_"),
        (["--priority", "urgent", "hi"], "'urgent'"),
    ],
)
def test_wrong_option_is_refused_and_nothing_is_printed(words: list[str], problem: str) -> None:
    result = sluice("enqueue", *words)
    assert (result.exit_code, result.stdout) == (2, "")
    assert problem in result.stderr


@pytest.mark.usefixtures("_server")
def test_tail_of_a_negative_offset_is_a_usage_error() -> None:
    assert sluice("tail", "--from", "-1", "req_x").exit_code == 2


def test_model_is_that_of_the_stack_that_is_up_unless_another_is_asked_for(
    stack_settings: Settings, valkey_url: str, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock = UpLock(stack_settings.home)
    lock.announce(stack_settings.model_copy(update={"redis_url": valkey_url, "namespace": namespace}))
    assert sluice("enqueue", "hello").exit_code == 0
    result = sluice("enqueue", "--model", "other", "hello")
    assert result.exit_code == 2
    assert f"serves {stack_settings.model}, not other" in result.stderr
    monkeypatch.setenv("SLUICE_MODEL", "another")
    assert sluice("enqueue", "hello").exit_code == 2
    monkeypatch.delenv("SLUICE_MODEL")
    assert sluice("enqueue", "hello").exit_code == 0
    lock.release()


@pytest.mark.usefixtures("_server")
async def test_ctrl_c_on_tail_ends_the_reading_and_not_the_request(procfile: Path) -> None:
    async with await Client.connect() as client:
        submitted = await client.enqueue("hello", model="tiny")
        stage = client.transport
        [delivery] = await stage.receive("tokenizer", 1, DEADLINE_S)
        async with sluice_process(procfile, "tail", submitted.request_id) as tail:
            assert tail.stdout is not None
            reading = asyncio.create_task(tail.stdout.readexactly(len("HELLO ")))
            await commit(stage, delivery, unpack(delivery.payload, GenerateRequest), (emit(0, "HELLO"),), ack=False)
            await asyncio.wait_for(reading, DEADLINE_S)
            tail.send_signal(signal.SIGINT)
            _, stderr = await asyncio.wait_for(tail.communicate(), DEADLINE_S)
        assert (tail.returncode, stderr.endswith(b"stopped\n")) == (130, True)
        assert await client.cancel(submitted.request_id) is True  # so it had not ended


async def test_ctrl_c_on_generate_cancels_the_request_on_the_stack_that_is_up(
    stack_settings: Settings, procfile: Path
) -> None:
    async with sluice_process(procfile, "up") as up:
        await line_with(up.stderr, "ready after")
        advert = await find_advert(stack_settings)
        assert advert is not None
        async with await Client.connect(advert.redis_url, namespace=advert.namespace) as client:
            async with sluice_process(procfile, "generate", f"one two {HANG_WORD}") as generate:
                await waiting_in(client, "tokenizer")
                generate.send_signal(signal.SIGINT)
                await asyncio.wait_for(generate.communicate(), DEADLINE_S)
            assert generate.returncode == 130
            [ended] = await client.transport.finished(10)
            assert unpack(ended.terminal, Terminal).finish_reason == "cancelled"
        up.send_signal(signal.SIGINT)
        await asyncio.wait_for(up.communicate(), DEADLINE_S)


async def waiting_in(client: Client, stage: str) -> None:
    """Return when a request is in a stage's queue."""
    async with asyncio.timeout(DEADLINE_S):
        while not await client.transport.queue_length(stage, "interactive"):  # noqa: ASYNC110 - it has no event
            await asyncio.sleep(POLL_S)


@pytest.mark.usefixtures("_server")
@pytest.mark.parametrize(
    "words",
    [("tail", "\udcff"), ("cancel", "\udcff"), ("cancel", "batch_\udcff"), ("tail", "--from", 2**64, "req_x")],
)
def test_what_is_no_id_or_offset_is_a_usage_error(words: tuple[object, ...]) -> None:
    result = sluice(*words)
    assert (result.exit_code, result.stdout) == (2, "")
    assert re.search(r"error: (request_id|request_ids|batch_id|after): must", result.stderr)
