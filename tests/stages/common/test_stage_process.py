"""A stage that cannot start because of its model ends with one sentence for the operator."""

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from struct import pack

import pytest

from pipeline.errors import ServerRefused
from pipeline.settings import Settings
from stages.common import stage_process

BYTES: Mapping[str, bytes] = {
    "foreign": b"PK\x03\x04 a zip archive",
    "truncated": pack("<4sIQQ", b"GGUF", 3, 5, 0),
    "unsupported": pack("<4sIQQQ20sIQ4s", b"GGUF", 3, 0, 1, 20, b"general.architecture", 8, 4, b"bert"),
}


@pytest.mark.parametrize(
    ("kind", "sentence"),
    [
        ("foreign", "is not a GGUF file: it starts with"),
        ("truncated", "is cut short: it has 24 bytes"),
        ("unsupported", "holds a model of architecture 'bert'; only llama can be served"),
        ("absent", "cannot be read: No such file or directory"),
    ],
)
@pytest.mark.parametrize("stage", ["tokenizer", "compressor"])
def test_an_unusable_model_ends_a_stage_with_one_sentence(tmp_path: Path, stage: str, kind: str, sentence: str) -> None:
    path = tmp_path / "model.gguf"
    if kind in BYTES:
        path.write_bytes(BYTES[kind])
    environment = {name: value for name, value in os.environ.items() if not name.startswith("SLUICE_")}
    ended = subprocess.run(
        [sys.executable, "-m", f"stages.{stage}"],
        env=environment | {"SLUICE_MODEL": str(path), "SLUICE_HOME": str(tmp_path / "home")},
        cwd=Path(__file__).parents[3],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    output = ended.stdout + ended.stderr
    assert ended.returncode == 1, output
    assert f"{path}: {sentence}" in output
    assert "Traceback" not in output
    assert len(output.splitlines()) == 1


@pytest.mark.parametrize("wrapped", [False, True])
def test_what_the_operator_can_mend_is_said_in_a_sentence_also_from_inside_a_task_group(
    wrapped: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def serve(_: Settings) -> None:
        error = ServerRefused("redis://x", "says no")
        raise ExceptionGroup("tasks", [ExceptionGroup("inner", [error])]) if wrapped else error

    monkeypatch.setattr(stage_process, "load_settings", Settings)
    monkeypatch.setattr(stage_process, "configure_logs", lambda *_: None)
    monkeypatch.setattr(stage_process, "prepare_process", lambda _: None)  # this process computes already
    with pytest.raises(SystemExit) as ended:
        stage_process.run_stage("decode", serve)
    assert ended.value.code == 1
    assert "redis://x: says no" in capsys.readouterr().out


def test_what_nobody_foresaw_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    async def serve(_: Settings) -> None:
        raise ExceptionGroup("tasks", [ZeroDivisionError()])

    monkeypatch.setattr(stage_process, "load_settings", Settings)
    monkeypatch.setattr(stage_process, "configure_logs", lambda *_: None)
    monkeypatch.setattr(stage_process, "prepare_process", lambda _: None)  # this process computes already
    with pytest.raises(ExceptionGroup):
        stage_process.run_stage("decode", serve)
