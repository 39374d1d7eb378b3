"""The control channel, over a real socket and stand-in processes: what is answered, and to whom."""

import asyncio
import json
import os
import socket
import stat
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from ops.control.client import NotNow, NotUp, Refused, ask_scale, ask_status
from ops.control.messages import CONTROL_SOCKET, MAX_REQUEST_BYTES, MAX_WAIT_S
from ops.control.server import MAX_CLIENTS, ControlServer
from ops.server.sockets import UnsafePlace, socket_directory
from ops.supervision.supervisor import Supervisor
from pipeline.errors import InvalidRequest
from tests.ops.supervised import make_supervisor, pids, ready, started
from tests.ops.waiting import DEADLINE_S, holds


@asynccontextmanager
async def controlled(home: Path, tmp_path: Path, *modes: str) -> AsyncIterator[Supervisor]:
    """A supervisor of stand-ins behind the control channel of a home."""
    supervisor = make_supervisor(tmp_path, list(modes) or ["a: steady", "b: steady"])
    async with ControlServer(home, lambda: supervisor), started(supervisor):
        await ready(supervisor)
        yield supervisor


@asynccontextmanager
async def connection(home: Path) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    reader, writer = await asyncio.open_unix_connection(str(home / CONTROL_SOCKET))
    try:
        yield reader, writer
    finally:
        writer.close()


async def say(home: Path, data: bytes) -> object:
    """Send bytes as they are, and return the answer."""
    async with connection(home) as (reader, writer):
        writer.write(data)
        return json.loads(await asyncio.wait_for(reader.readline(), DEADLINE_S))


def left_in(home: Path) -> list[str]:
    return [path.name for path in home.iterdir()]


async def test_status_names_every_process(home: Path, tmp_path: Path) -> None:
    async with controlled(home, tmp_path) as supervisor:
        slots = await ask_status(home)
        assert slots is not None
        assert [(slot.name, slot.stage, slot.state, slot.num_restarts) for slot in slots] == [
            ("a", "a", "ready", 0),
            ("b", "b", "ready", 0),
        ]
        assert [slot.pid for slot in slots] == pids(supervisor)
        assert all(slot.uptime_s is not None and slot.uptime_s >= 0 for slot in slots)


async def test_scaling_is_answered_when_it_is_done(home: Path, tmp_path: Path) -> None:
    async with controlled(home, tmp_path):
        more = await ask_scale(home, {"b": 3}, DEADLINE_S)
        assert [(slot.name, slot.ready) for slot in more] == [(name, True) for name in ("a", "b", "b-2", "b-3")]
        fewer = await ask_scale(home, {"b": 1}, DEADLINE_S)
        assert [slot.name for slot in fewer] == ["a", "b"]


async def test_scaling_that_takes_long_is_answered_when_time_is_up(home: Path, tmp_path: Path) -> None:
    async with controlled(home, tmp_path, "a: held") as supervisor:
        await ask_scale(home, {"a": 2}, DEADLINE_S)
        slots = await ask_scale(home, {"a": 1}, 0.05)
        assert [(slot.name, slot.state) for slot in slots] == [("a", "ready"), ("a-2", "stopping")]
        (tmp_path / "go").touch()
        await holds(lambda: len(supervisor.states()) == 1)


async def test_new_process_that_does_not_stay_up_is_told_with_its_last_lines(home: Path, tmp_path: Path) -> None:
    async with controlled(home, tmp_path, "a: flawed"):
        with pytest.raises(NotNow, match=r"(?s)a-2 ended with code 1, 3 times in a row.*the model has a hole"):
            await ask_scale(home, {"a": 2}, DEADLINE_S)


async def test_stage_or_number_that_cannot_be_is_refused_in_a_sentence(home: Path, tmp_path: Path) -> None:
    async with controlled(home, tmp_path):
        with pytest.raises(Refused, match="c: is no stage of this stack; there are a, b"):
            await ask_scale(home, {"c": 1}, DEADLINE_S)
        with pytest.raises(Refused, match="a: 0 processes; a stage has at least 1 and at most 64"):
            await ask_scale(home, {"a": 0}, DEADLINE_S)
        with pytest.raises(InvalidRequest, match="timeout: is 601 s"):
            await ask_scale(home, {"a": 1}, MAX_WAIT_S + 1)


async def test_home_without_up_has_no_status_and_is_not_scaled(home: Path) -> None:
    assert await ask_status(home) is None
    with pytest.raises(NotUp, match=f"no `sluice up` runs in {home}"):
        await ask_scale(home, {"a": 2}, DEADLINE_S)
    assert await ask_status(home / "nowhere") is None


async def test_socket_of_a_killed_up_is_nobody_and_makes_room(home: Path, tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as killed:
        killed.bind(str(home / CONTROL_SOCKET))
    (home / CONTROL_SOCKET).chmod(0o600)
    assert await ask_status(home) is None
    async with controlled(home, tmp_path):
        assert await ask_status(home)


async def test_stack_that_is_just_starting_has_no_processes_yet(home: Path) -> None:
    async with ControlServer(home, lambda: None):
        assert await ask_status(home) == []
        with pytest.raises(NotNow, match="the stack is starting"):
            await ask_scale(home, {"a": 2}, DEADLINE_S)


async def test_socket_is_closed_to_others_and_goes_with_its_owner(home: Path) -> None:
    before = os.umask(0)
    try:
        async with ControlServer(home, lambda: None):
            assert stat.S_IMODE((home / CONTROL_SOCKET).stat().st_mode) == 0o600
    finally:
        os.umask(before)
    assert left_in(home) == []


async def test_socket_that_is_open_to_others_is_not_trusted(home: Path) -> None:
    async with ControlServer(home, lambda: None):
        (home / CONTROL_SOCKET).chmod(0o660)
        with pytest.raises(UnsafePlace, match=r"control.sock has mode 0660, and must be closed to others \(0600\)"):
            await ask_status(home)


async def test_file_in_the_place_of_the_socket_is_not_trusted(home: Path) -> None:
    (home / CONTROL_SOCKET).touch(0o600)
    with pytest.raises(UnsafePlace, match="is not a socket of this user"):
        await ask_status(home)


async def test_long_home_gets_a_short_socket_that_goes_away(home: Path) -> None:
    deep = home / ("d" * 100)
    deep.mkdir()
    async with ControlServer(deep, lambda: None):
        directory = socket_directory(deep, CONTROL_SOCKET)
        assert directory != deep
        assert stat.S_IMODE(directory.stat().st_mode) == 0o700
        assert await ask_status(deep) == []
    assert left_in(deep) == []
    assert not directory.exists()
    assert await ask_status(deep) is None


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        (b"hello\n", "request: Invalid JSON"),
        (b"\xff\xfe\n", "request: Invalid JSON"),
        (b"[]\n", "request: "),
        (b"{}\n", "request: Unable to extract tag using discriminator 'op'"),
        (b'{"op":"reboot"}\n', "request: Input tag 'reboot'"),
        (b'{"op":"status","more":1}\n', "status.more: Extra inputs are not permitted"),
        (b'{"op":"scale"}\n', "scale.replicas: Field required"),
        (b'{"op":"scale","replicas":{"b":"2"},"timeout_s":1}\n', "scale.replicas.b: Input should be a valid integer"),
        (b'{"op":"scale","replicas":{"b":true},"timeout_s":1}\n', "scale.replicas.b: Input should be a valid integer"),
        (b'{"op":"scale","replicas":{"b":2},"timeout_s":0}\n', "scale.timeout_s: Input should be greater than 0"),
        (b'{"op":"scale","replicas":{"b":2},"timeout_s":1e9}\n', "scale.timeout_s: Input should be less than"),
    ],
)
async def test_what_is_no_request_is_answered_in_a_sentence(home: Path, line: bytes, problem: str) -> None:
    async with ControlServer(home, lambda: None):
        answer = await say(home, line)
        assert isinstance(answer, dict)
        assert answer["error"].startswith(problem)
        assert answer["retryable"] is False
        assert await ask_status(home) == []


async def test_request_that_is_too_long_is_not_read(home: Path) -> None:
    async with ControlServer(home, lambda: None):
        answer = await say(home, b"x" * (MAX_REQUEST_BYTES + 1))
        assert answer == {"error": "request: has more than 4096 bytes", "retryable": False}


async def test_client_that_says_nothing_is_not_waited_for(home: Path) -> None:
    async with ControlServer(home, lambda: None, request_timeout_s=0.05):
        assert await say(home, b"") == {"error": "no request came in 0.05 s", "retryable": True}


async def test_more_clients_than_are_served_are_sent_away(home: Path) -> None:
    async with ControlServer(home, lambda: None) as server:
        waiting = [await asyncio.open_unix_connection(str(home / CONTROL_SOCKET)) for _ in range(MAX_CLIENTS)]
        await holds(lambda: len(server._clients) == MAX_CLIENTS)
        with pytest.raises(NotNow, match="16 others are being served; try again"):
            await ask_status(home)
        for _, writer in waiting:
            writer.close()
        await holds(lambda: not server._clients)
        assert await ask_status(home) == []


async def test_client_that_leaves_early_takes_nothing_back(home: Path, tmp_path: Path) -> None:
    async with controlled(home, tmp_path, "a: steady") as supervisor:
        asking = asyncio.create_task(ask_scale(home, {"a": 2}, DEADLINE_S))
        await holds(lambda: len(supervisor.states()) == 2)
        asking.cancel()
        await holds(lambda: [state.ready for state in supervisor.states()] == [True, True])
        assert await ask_status(home)


async def test_client_is_told_when_up_ends_before_it_answers(
    home: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    supervisor = make_supervisor(tmp_path, ["a: held"])
    async with started(supervisor):
        await ready(supervisor)
        async with ControlServer(home, lambda: supervisor):
            await ask_scale(home, {"a": 2}, DEADLINE_S)
            asking = asyncio.create_task(ask_scale(home, {"a": 1}, DEADLINE_S))
            await holds(lambda: supervisor.states()[1].state == "stopping")
        with pytest.raises(NotUp, match="ended before it answered"):
            await asking
        assert caplog.messages == []
        (tmp_path / "go").touch()


@pytest.mark.parametrize(
    "ask", [ask_status, lambda home: ask_scale(home, {"a": 1}, DEADLINE_S)], ids=["status", "scale"]
)
async def test_client_is_told_when_up_ends_between_connecting_and_asking(
    home: Path, monkeypatch: pytest.MonkeyPatch, ask: Callable[[Path], Awaitable[object]]
) -> None:
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(home / CONTROL_SOCKET))
    (home / CONTROL_SOCKET).chmod(0o600)
    listener.listen()
    connect = asyncio.open_unix_connection

    async def connect_to_one_that_ends(path: str, *, limit: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        try:
            return await connect(path, limit=limit)
        finally:
            listener.close()

    monkeypatch.setattr(asyncio, "open_unix_connection", connect_to_one_that_ends)
    with pytest.raises(NotUp, match="ended before it answered"):
        await ask(home)
