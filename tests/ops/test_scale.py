"""`sluice scale` as a person or a script meets it, and `sluice up` as it is then run, over stand-in stages."""

import asyncio
import json
import sys
from pathlib import Path

import pytest

from ops.commands.scale import read_changes, summary, table
from ops.control.server import ControlServer
from ops.supervision.slot_status import SlotState, SlotStatus
from pipeline.errors import InvalidRequest
from tests.ops.supervised import make_supervisor, ready, started
from tests.ops.waiting import DEADLINE_S


def slot(name: str, state: SlotState) -> SlotStatus:
    return SlotStatus(name=name, stage=name.partition("-")[0], pid=1, state=state, num_restarts=0, uptime_s=1.0)


SLOTS = [
    slot("a", "ready"),
    slot("b", "ready"),
    slot("b-2", "starting"),
    slot("b-3", "backing_off"),
    slot("b-4", "stopping"),
]


async def sluice(*words: str) -> tuple[int, str, str]:
    """Run a command line as a process; its exit code and what it printed."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "ops.cli", *words), stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    try:
        out, err = await asyncio.wait_for(process.communicate(), DEADLINE_S)
    finally:
        if process.returncode is None:
            process.kill()
    assert process.returncode is not None
    return process.returncode, out.decode(), err.decode()


async def test_numbers_are_changed_and_shown(stack_env: dict[str, str], home: Path, tmp_path: Path) -> None:
    supervisor = make_supervisor(tmp_path, ["a: steady", "b: steady"])
    async with ControlServer(home, lambda: supervisor), started(supervisor):
        await ready(supervisor)
        assert await sluice("scale") == (0, "a             1\nb             1\n", "")
        assert await sluice("scale", "b=3") == (0, "a             1\nb             3\n", "")
        code, out, _ = await sluice("scale", "a=2", "b=1", "--json")
        assert code == 0
        assert json.loads(out) == {"replicas": {"a": 2, "b": 1}, "ready": {"a": 2, "b": 1}, "pending": []}
        code, out, err = await sluice("scale", "c=3")
        assert (code, out, err) == (2, "", "error: c: is no stage of this stack; there are a, b\n")


async def test_change_that_takes_longer_is_told_with_what_is_on_its_way(
    stack_env: dict[str, str], home: Path, tmp_path: Path
) -> None:
    supervisor = make_supervisor(tmp_path, ["a: held"], {"a": 2})
    async with ControlServer(home, lambda: supervisor), started(supervisor):
        await ready(supervisor)
        code, out, err = await sluice("scale", "a=1", "--timeout", "1")
        assert (code, out) == (1, "a             1  a-2 is stopping\n")
        assert err == "error: after 1 s, a-2 is stopping; it goes on, and `sluice scale` shows how far it is\n"
        (tmp_path / "go").touch()


@pytest.mark.parametrize("words", [("scale",), ("scale", "decode=2")])
async def test_home_without_up_is_named(stack_env: dict[str, str], home: Path, words: tuple[str, ...]) -> None:
    assert await sluice(*words) == (1, "", f"error: no `sluice up` runs in {home}\n")


def test_words_become_numbers() -> None:
    assert read_changes(["decode=3", "prefill=02"]) == {"decode": 3, "prefill": 2}
    assert read_changes([]) == {}


@pytest.mark.parametrize(
    "word", ["decode", "decode=", "=3", "decode=two", "decode=-1", "decode=1.5", "decode=²", "a=1=2"]
)
def test_word_that_is_no_change_is_named(word: str) -> None:
    with pytest.raises(InvalidRequest, match="is not STAGE=N, such as decode=2"):
        read_changes([word])


def test_stage_that_is_there_twice_is_named() -> None:
    with pytest.raises(InvalidRequest, match="decode: is there twice"):
        read_changes(["decode=3", "decode=3"])


def test_what_is_on_its_way_is_beside_the_numbers() -> None:
    assert table(SLOTS).splitlines() == [
        "a             1",
        "b             3  b-2 is starting, b-3 is backing off, b-4 is stopping",
    ]
    assert table([]) == "starting"
    assert summary(SLOTS) == {
        "replicas": {"a": 1, "b": 3},
        "ready": {"a": 1, "b": 1},
        "pending": [
            {"name": "b-2", "state": "starting"},
            {"name": "b-3", "state": "backing_off"},
            {"name": "b-4", "state": "stopping"},
        ],
    }
