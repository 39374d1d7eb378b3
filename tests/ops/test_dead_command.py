"""`sluice dead` as a person or a script meets it, over a real server and letters that the harness wrote."""

import asyncio
import json
import subprocess
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import pytest

from ops.letters import table
from pipeline.connect import open_client, open_transport
from pipeline.dead_letters import DeadLetters, Letter, LetterId
from pipeline.keys import STAGES, Keys
from pipeline.messages import ChatMessage, WorkItem
from pipeline.settings import load_settings
from tests.ops.command_line import sluice
from tests.ops.waiting import DEADLINE_S
from tests.pipeline.benches import POOL, take_one
from tests.pipeline.letters import MESSAGES, TOKEN_IDS, generate, make_letter, prefilled, tokenized

SECRET = "nobody's business"
VERBS = ("list", "show", "replay", "drop")


@pytest.fixture(autouse=True)
def _server(stack_env: dict[str, str], valkey_url: str, namespace: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands find a server, and no process of a stack."""
    monkeypatch.setenv("SLUICE_REDIS_URL", valkey_url)
    monkeypatch.setenv("SLUICE_NAMESPACE", namespace)


@contextmanager
def stage_that_answers() -> Iterator[None]:
    """Run a stage in a process of its own."""
    process = subprocess.Popen([sys.executable, "-m", "tests.ops.answering"])
    try:
        yield
    finally:
        process.terminate()
        process.wait(DEADLINE_S)


def buried(*messages: tuple[str, WorkItem]) -> list[str]:
    """Bury a message in each stage, and return the names of the letters."""
    return asyncio.run(_bury(messages))


async def _bury(messages: Iterable[tuple[str, WorkItem]]) -> list[str]:
    settings = load_settings()
    transport, client = await open_transport(settings, pool_id=POOL), open_client(settings)
    try:
        dead = DeadLetters(client, "test", Keys(settings.namespace))
        return [str(await make_letter(transport, dead, stage, message)) for stage, message in messages]
    finally:
        await client.aclose()
        await transport.close()


def buried_bytes(request_id: str, payload: bytes) -> str:
    """Bury bytes that no stage can read, and return the name of the letter."""
    return asyncio.run(_bury_bytes(request_id, payload))


async def _bury_bytes(request_id: str, payload: bytes) -> str:
    settings = load_settings()
    transport, client = await open_transport(settings), open_client(settings)
    try:
        await transport.admit(request_id, "batch", payload)
        await transport.dead_letter(await take_one(transport, "tokenizer"), "not_msgpack: \x1b[2J junk\n  of two lines")
        return str((await DeadLetters(client, "test", Keys(settings.namespace)).recent())[-1].id)
    finally:
        await client.aclose()
        await transport.close()


def shown(letter: str, *words: str) -> str:
    result = sluice("dead", "show", letter, *words)
    assert result.exit_code == 0, result.stderr
    return result.stdout


def as_json(*words: object) -> list[dict[str, object]]:
    result = sluice("dead", "list", "--json", *words)
    assert result.exit_code == 0, result.stderr
    return json.loads(result.stdout)


# list


def test_without_letters_that_is_said() -> None:
    result = sluice("dead", "list")
    assert (result.exit_code, result.stdout) == (0, "There are no dead letters.\n")
    assert sluice("dead", "list", "--stage", "decode").stdout == "There are no dead letters of decode.\n"
    assert as_json() == []
    result = sluice("dead", "replay", "--all")
    assert (result.exit_code, result.stdout, result.stderr) == (0, "There are no dead letters.\n", "")
    assert sluice("dead", "drop", "--all").stdout == "0 dropped\n"


def test_list_has_a_line_for_each_letter_newest_last() -> None:
    letters = buried(*((stage, MESSAGES[stage](f"r-{stage}")) for stage in STAGES))
    result = sluice("dead", "list")
    assert (result.exit_code, result.stderr) == (0, "")
    head, *rows = [line.split() for line in result.stdout.splitlines()]
    assert head == ["letter", "when", "delivered", "request", "reason"]
    assert [row[0] for row in rows] == letters
    assert [row[3:5] for row in rows] == [["1", f"r-{stage}"] for stage in STAGES]
    assert {" ".join(row[5:]) for row in rows} == {"too_many_tries: given up after 5 tries"}


def test_list_is_bounded_and_says_so() -> None:
    letters = buried(("tokenizer", generate("a")), ("prefill", tokenized("b")), ("tokenizer", generate("c")))
    result = sluice("dead", "list", "--limit", 2)
    assert [line.split()[0] for line in result.stdout.splitlines()[1:]] == letters[1:]
    assert result.stderr == "the last 2 of 3; --limit shows more\n"
    result = sluice("dead", "list", "--limit", 2, "--stage", "tokenizer")
    assert [line.split()[0] for line in result.stdout.splitlines()[1:]] == [letters[0], letters[2]]
    assert result.stderr == ""


def test_list_as_json_is_an_array() -> None:
    [letter] = buried(("decode", prefilled("r")))
    [record] = as_json()
    assert (record["letter"], record["stage"], record["request_id"], record["attempt"]) == (letter, "decode", "r", 3)
    assert record["at_ms"] == LetterId.parse(letter).at_ms
    assert (record["tries"], record["reason"]) == (1, "too_many_tries: given up after 5 tries")


def test_a_reason_is_cut_to_the_width_and_an_id_never() -> None:
    letter = Letter(LetterId("decode", 1, 0), "why " * 50, "stream", "1-0", 5, 1, "r" * 40, 1)
    [_, line] = table([letter], 120).splitlines()
    assert len(line) == 120
    assert line.endswith(" why why ...")
    [_, narrow] = table([letter], 10).splitlines()
    assert narrow.startswith("decode:1-0 ")
    assert f"  {'r' * 40}  why why why why w..." in narrow


# show


@pytest.mark.parametrize("stage", STAGES)
def test_show_tells_everything_but_the_prompt(stage: str) -> None:
    fields = {"prompt": None, "messages": (ChatMessage(role="user", content=SECRET),)} if stage == "tokenizer" else {}
    [letter] = buried((stage, MESSAGES[stage]("r", **fields)))
    text = shown(letter)
    facts = dict(line.split(maxsplit=1) for line in text.splitlines() if not line.startswith(" "))
    assert (facts["letter"], facts["reason"]) == (letter, "too_many_tries: given up after 5 tries")
    assert facts["request"] == "r, attempt 3, is failed now"
    assert facts["priority"] == "batch"
    assert facts["delivered"].startswith("1 times, as entry ")
    if stage == "compressor":
        assert facts["chunk"] == "0, from token 0"
    else:
        assert facts["prompt"] == (f"{len(SECRET)} characters" if stage == "tokenizer" else "3 tokens")
        assert json.loads(facts["params"]) == {"temperature": 0.5, "seed": 11, "stop": ["end"]}
        assert facts["way"] == "+0.000 s submitted"
    assert facts.get("model") == ("m" if stage == "tokenizer" else None)
    assert ("+0.000 s tokenizer_claimed host:1:a" in text) == (stage in {"prefill", "decode"})
    assert SECRET not in text
    assert "5 6 7" not in text


def test_the_prompt_is_shown_where_it_is_asked_for() -> None:
    turns = (ChatMessage(role="system", content="be brief"), ChatMessage(role="user", content=SECRET))
    chat, plain, tokens, chunk = buried(
        ("tokenizer", generate("a", prompt=None, messages=turns)),
        ("tokenizer", generate("b", prompt=SECRET)),
        ("decode", prefilled("c")),
        ("compressor", MESSAGES["compressor"]("d")),
    )
    assert shown(chat, "--prompt").endswith(f"\n\n[system]\nbe brief\n[user]\n{SECRET}\n")
    assert shown(plain, "--prompt").endswith(f"\n\n{SECRET}\n")
    assert shown(tokens, "--prompt").endswith("\n\n5 6 7\n")
    assert shown(chunk, "--prompt").endswith("\n\n(no prompt that could be shown)\n")


def test_show_as_json_has_the_prompt_only_where_it_is_asked_for() -> None:
    text, tokens = buried(("tokenizer", generate("a", prompt=SECRET)), ("prefill", tokenized("b")))
    assert SECRET not in shown(text, "--json")
    record = json.loads(shown(text, "--json"))
    assert (record["kind"], record["model"], record["num_prompt_characters"]) == ("generate_request", "m", len(SECRET))
    assert (record["state"], record["problem"], record["params"]["seed"]) == ("failed", None, 11)
    assert record["stamps"][0]["boundary"] == "submitted"
    assert json.loads(shown(text, "--json", "--prompt"))["prompt"] == SECRET
    assert "prompt_token_ids" not in json.loads(shown(tokens, "--json"))
    record = json.loads(shown(tokens, "--json", "--prompt"))
    assert (record["prompt_token_ids"], record["num_prompt_tokens"]) == (list(TOKEN_IDS), 3)


def test_show_of_a_batch_line_says_whose_it_was() -> None:
    [letter] = buried(("tokenizer", generate("batch_x7k-12")))
    assert "batch      batch_x7k, index 12: it has this failure; a replay is a request of its own\n" in shown(letter)
    record = json.loads(shown(letter, "--json"))
    assert (record["batch"], record["line"]) == ("batch_x7k", 12)


def test_show_of_bytes_that_cannot_be_read_says_so() -> None:
    letter = buried_bytes("r", b"junk")
    text = shown(letter, "--prompt")
    assert "payload    4 bytes that cannot be read: not_msgpack: " in text
    assert "request" not in text
    record = json.loads(shown(letter, "--json"))
    assert (record["request_id"], record["num_bytes"]) == (None, 4)
    assert record["problem"].startswith("not_msgpack: ")


def test_what_a_stranger_wrote_cannot_drive_the_terminal() -> None:
    letter = buried_bytes("r", b"junk")
    listed = sluice("dead", "list").stdout.splitlines()
    assert len(listed) == 2
    assert listed[1].endswith("-        not_msgpack: ?[2J junk of two lines")
    assert "reason     not_msgpack: ?[2J junk of two lines\n" in shown(letter)
    assert "\x1b" not in shown(letter, "--json")


# replay


def test_a_replayed_request_is_answered_under_its_id() -> None:
    [letter] = buried(("tokenizer", generate("mine", prompt="hello there")))
    failed = sluice("tail", "mine")
    assert failed.exit_code == 1
    assert "tokenizer: given up after 5 tries" in failed.stderr
    result = sluice("dead", "replay", letter)
    assert result.exit_code == 0, result.stderr
    assert result.stdout.startswith(f"{letter} replayed: request mine runs again, as attempt ")
    assert result.stderr == "`sluice tail ID` follows a request\n"
    assert as_json() == []
    with stage_that_answers():
        result = sluice("tail", "mine")
    assert (result.exit_code, result.stdout) == (0, "HELLO THERE seed 11\n")


def test_each_letter_that_cannot_be_replayed_has_its_reason() -> None:
    chunk, first = buried(("compressor", MESSAGES["compressor"]("a")), ("tokenizer", generate("b")))
    junk, gone = buried_bytes("c", b"junk"), "decode:1-0"
    assert sluice("dead", "replay", first).exit_code == 0
    result = sluice("dead", "replay", chunk, junk, gone, junk)
    assert (result.exit_code, result.stderr) == (1, "")
    assert result.stdout.splitlines() == [
        f"{chunk} not replayed: it is one chunk of request a; send the request again and drop the letter",
        f"{junk} not replayed: its bytes cannot be read; send the request again and drop the letter",
        f"{gone} unknown: replayed or dropped before, expired, or never there",
    ]
    assert [record["letter"] for record in as_json()] == [chunk, junk]


def test_a_full_queue_is_told_and_keeps_the_letter(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = buried(("tokenizer", generate("a")), ("decode", prefilled("b")))
    monkeypatch.setenv("SLUICE_MAX_QUEUE", "1")
    result = sluice("dead", "replay", first, second)
    assert result.exit_code == 1
    assert result.stdout.splitlines()[1] == (
        f"{second} not replayed: the queue or the server's memory is full; try again in 2 s"
    )
    assert result.stderr == "`sluice tail ID` follows a request\n"
    assert [record["letter"] for record in as_json()] == [second]


def test_all_letters_of_a_stage_are_replayed() -> None:
    letters = buried(*(("prefill", tokenized(f"r{number}")) for number in range(3)), ("decode", prefilled("s")))
    result = sluice("dead", "replay", "--all", "--stage", "prefill")
    assert result.exit_code == 0, result.stderr
    assert [line.split()[0] for line in result.stdout.splitlines()] == letters[:3]
    assert sluice("dead", "replay", "--all").stdout.startswith(f"{letters[3]} replayed: request s ")
    assert as_json() == []


# drop


def test_letters_are_dropped_by_name_or_all_of_a_stage() -> None:
    letters = buried(*(("prefill", tokenized(f"r{number}")) for number in range(3)), ("decode", prefilled("s")))
    result = sluice("dead", "drop", letters[0], letters[1])
    assert (result.exit_code, result.stdout) == (0, "2 dropped\n")
    result = sluice("dead", "drop", letters[0], letters[2])
    assert result.exit_code == 1
    assert result.stdout == f"{letters[0]} unknown: replayed or dropped before, expired, or never there\n1 dropped\n"
    result = sluice("dead", "drop", "--all", "--stage", "tokenizer")
    assert (result.exit_code, result.stdout) == (0, "0 dropped\n")
    assert sluice("dead", "drop", "--all").stdout == "1 dropped\n"
    result = sluice("dead", "show", letters[3])
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr == f"error: {letters[3]} is unknown: replayed or dropped before, expired, or never there\n"


# Usage


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (("show", "decode"), "error: letter: 'decode' is not STAGE:ENTRY, such as decode:"),
        (("replay", "jobs:1-0"), "error: letter: 'jobs:1-0' is not STAGE:ENTRY"),
        (("drop", "decode:1-0", "x"), "error: letter: 'x' is not STAGE:ENTRY"),
        (("replay",), "error: letters: give either letters, or --all"),
        (("drop", "--all", "decode:1-0"), "error: letters: give either letters, or --all"),
        (("drop", "--stage", "decode", "decode:1-0"), "error: --stage: goes with --all"),
        (("list", "--stage", "jobs"), "error: --stage: is 'jobs'; there are tokenizer, prefill, compressor, decode"),
        (("replay", "--all", "--stage", "x"), "error: --stage: is 'x'; there are"),
        (("drop", "--all", "--stage", "x"), "error: --stage: is 'x'; there are"),
        (("list", "--limit", "0"), "Invalid value for '--limit'"),
    ],
)
def test_a_wrong_command_line_is_refused(words: tuple[str, ...], problem: str) -> None:
    result = sluice("dead", *words)
    assert (result.exit_code, result.stdout) == (2, "")
    assert problem in result.stderr


@pytest.mark.parametrize("words", [("list",), ("show", "decode:1-0"), ("replay", "--all"), ("drop", "--all")])
def test_without_a_stack_there_is_nothing_to_look_into(words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLUICE_REDIS_URL")
    result = sluice("dead", *words)
    assert (result.exit_code, result.stdout) == (2, "")
    assert "SLUICE_REDIS_URL is not set: there is no stack to look into" in result.stderr


def test_help_teaches_with_examples() -> None:
    page = sluice("dead", "--help").stdout
    assert all(f"  {verb} " in page and f"sluice dead {verb}" in page for verb in VERBS)
    for verb in VERBS:
        result = sluice("dead", verb, "--help")
        assert result.exit_code == 0
        assert f"Usage: sluice dead {verb} " in result.stdout
