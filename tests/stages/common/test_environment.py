"""What a stage's environment is when it imports the engine, whoever started it and with whichever environment."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from stages.engine.kernel_cache import kernel_cache

ROOT = Path(__file__).parents[3]
STAGES_THAT_COMPUTE = ("prefill", "decode")
# A stage up to the moment at which it would begin to work.
STAGE = """
import importlib, json, os, sys

main = importlib.import_module(f"stages.{sys.argv[1]}.__main__")
early = [module for module in ("numba", "torch") if module in sys.modules]

async def serve(settings, heartbeat):
    import numba
    print(json.dumps([early, str(numba.config.CACHE_DIR), os.environ["OMP_WAIT_POLICY"]]))

main.run_engine_stage(sys.argv[1], serve)
"""


def run(code: str, home: Path, *words: str) -> subprocess.CompletedProcess[str]:
    environment = {"SLUICE_HOME": str(home), "NUMBA_CACHE_DIR": "/somewhere", "OMP_WAIT_POLICY": "ACTIVE"}
    command = [sys.executable, "-c", code, *words]
    return subprocess.run(command, check=False, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("stage", STAGES_THAT_COMPUTE)
def test_stage_compiles_into_its_home_whatever_it_inherited(tmp_path: Path, stage: str) -> None:
    result = run(STAGE, tmp_path, stage)
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout) == [[], str(kernel_cache(tmp_path)), "PASSIVE"]


def test_process_that_imported_the_engine_first_does_not_start(tmp_path: Path) -> None:
    result = run(f"import numba\n{STAGE}", tmp_path, "decode")
    assert result.returncode == 1
    assert "AssertionError: numba came first, and read an environment that nobody had set" in result.stderr


def test_lines_are_written_as_they_come(tmp_path: Path) -> None:
    code = """
import os
from pathlib import Path
from stages.common.environment import prepare_process

prepare_process(Path("home"))
print("said before the end")
os._exit(0)
"""
    assert run(code, tmp_path).stdout == "said before the end\n"
