"""Proofs: the matrix covers what it says, equal means equal to the last bit, and a proof of nothing fails."""

from dataclasses import replace
from pathlib import Path

import pytest

from ops.outputs import Output, differences, digest
from ops.prove import __main__ as command
from ops.prove import run as prove_run
from ops.prove.batch import is_sampled, read_prompts, with_other_seeds
from ops.prove.matrix import Case, by_stack, covering_cases, every_case, pairs_of
from ops.prove.run import CaseRun, Proof, ProofFailed, run_matrix
from ops.prove.verdict import problems, table
from ops.stack import Stack
from pipeline.batch.results import Completion
from pipeline.errors import InvalidRequest
from pipeline.messages import TokenLogprobs, Usage
from pipeline.settings import Settings
from tests.ops.answering import FAIL_WORD

EXAMPLES = Path(__file__).parents[2] / "examples" / "prompts.jsonl"
MODEL = "smollm2-135m-instruct"
CASE = Case(num_decode=1, chunk_tokens=64, order="forward", speculate=True)


def test_every_pair_of_choices_meets_in_few_cases() -> None:
    cases = covering_cases()
    assert {pair for case in cases for pair in pairs_of(case)} == {
        pair for case in every_case() for pair in pairs_of(case)
    }
    assert len(cases) <= 6
    assert set(cases) <= set(every_case())


def test_full_matrix_has_every_combination_and_each_stack_once() -> None:
    assert len(set(every_case())) == 16
    stacks = by_stack(every_case())
    assert len(stacks) == 4
    assert sorted(map(len, stacks.values())) == [4] * 4
    assert len(by_stack(covering_cases())) == 4


def test_batch_is_half_sampled_with_seeds_and_has_logprobs() -> None:
    lines = read_prompts(EXAMPLES, MODEL, 24)
    assert len({line.custom_id for line in lines}) == 24
    assert sum(is_sampled(line) for line in lines) == 12
    assert {line.params.temperature for line in lines} == {0.0, 0.8}
    assert len({line.params.seed for line in lines}) == 24
    assert {line.params.max_tokens for line in lines} == {64, 72, 80, 88, 96}
    assert {line.params.logprobs for line in lines} == {3}


def test_control_differs_in_every_seed_and_in_nothing_else() -> None:
    lines = read_prompts(EXAMPLES, MODEL, 24)
    control = with_other_seeds(lines)
    seeds = {line.params.seed for line in lines}
    assert not seeds & {line.params.seed for line in control}
    for line, other in zip(lines, control, strict=True):
        assert replace(other, params=other.params.model_copy(update={"seed": line.params.seed})) == line


def test_too_few_prompts_and_wrong_ones_are_said(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match=r"has \d+ lines, 999 are needed"):
        read_prompts(EXAMPLES, MODEL, 999)
    (tmp_path / "wrong.jsonl").write_text('{"custom_id": "a"}\n')
    with pytest.raises(InvalidRequest, match="line 1"):
        read_prompts(tmp_path / "wrong.jsonl", MODEL, 2)


def completion(**changes: object) -> Completion:
    whole = Completion(
        token_ids=(1, 2),
        text="ab",
        finish_reason="length",
        usage=Usage(prompt_tokens=3, completion_tokens=2, draft_tokens=1, accepted_tokens=1),
        logprobs=(
            TokenLogprobs(token_id=1, logprob=-0.1, top=((1, -0.1), (7, -2.5))),
            TokenLogprobs(token_id=2, logprob=-0.3, top=((2, -0.3), (8, -1.5))),
        ),
    )
    return replace(whole, **changes)


def last_bit(completion: Completion) -> Completion:
    """The same but for the last bit of an alternative's logprob."""
    assert completion.logprobs is not None
    first, second = completion.logprobs
    return replace(completion, logprobs=(first, second.model_copy(update={"top": ((2, -0.3), (8, -1.5 - 2**-52))})))


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        (completion(token_ids=(1, 5)), "a: token 1 is 5 and not 2"),
        (completion(token_ids=(1, 2, 3)), "a: 3 tokens and not 2"),
        (completion(text="aB"), "a: the text differs at character 1"),
        (completion(text="abc"), "a: the text differs at character 2"),
        (completion(finish_reason="stop"), "a: ended with stop and not length"),
        (completion(logprobs=None), "a: 0 logprobs and not 2"),
        (last_bit(completion()), "a: the logprobs of token 1 are"),
    ],
)
def test_every_difference_is_named_and_changes_the_digest(changed: Completion, sentence: str) -> None:
    expected, actual = {"a": Output.of(completion())}, {"a": Output.of(changed)}
    [found] = differences(expected, actual)
    assert found.startswith(sentence)
    assert digest(expected) != digest(actual)


def test_drafts_and_the_order_of_requests_are_no_difference() -> None:
    other = completion(usage=Usage(prompt_tokens=3, completion_tokens=2))
    one = {"a": Output.of(completion()), "b": Output.of(completion(text="xy"))}
    two = {"b": Output.of(completion(text="xy")), "a": Output.of(other)}
    assert differences(one, two) == []
    assert digest(one) == digest(two)


def test_a_request_of_one_run_only_is_a_difference() -> None:
    assert differences({"a": Output.of(completion())}, {}) == ["a: is in one run only"]


LINES = read_prompts(EXAMPLES, MODEL, 2)
GREEDY, SAMPLED = LINES


def case_run(texts: tuple[str, str] = ("greedy", "sampled"), *, accepted: int = 5, case: Case = CASE) -> CaseRun:
    outputs = {line.custom_id: Output.of(completion(text=text)) for line, text in zip(LINES, texts, strict=True)}
    drafted = 9 if case.speculate else 0
    return CaseRun(case, outputs, drafted, accepted if case.speculate else 0, 1.0)


def proof(**changes: object) -> Proof:
    runs = (case_run(), case_run(case=replace(CASE, speculate=False)))
    return replace(Proof(runs, case_run(("greedy", "other"))), **changes)


def test_equal_runs_and_a_different_control_prove_it() -> None:
    assert problems(proof(), LINES) == []
    shown = table(proof())
    assert shown.count(" equal ") == 2
    assert "NOT" not in shown
    assert "DIFFERENT" not in shown


def test_an_unequal_run_is_named_with_its_case() -> None:
    unequal = proof(runs=(case_run(), case_run(("greedy", "samplet"))))
    [problem] = problems(unequal, LINES)
    assert SAMPLED.custom_id in problem
    assert "order='forward'" in problem
    assert "DIFFERENT" in table(unequal)


@pytest.mark.parametrize(
    ("broken", "problem"),
    [
        ({"control": case_run()}, "other seeds changed no sampled request"),
        ({"control": case_run(("x", "other"))}, "is greedy, and another seed changed it"),
        ({"runs": (case_run(accepted=0),)}, "no draft was accepted"),
        (
            {"runs": (case_run(), replace(case_run(case=replace(CASE, speculate=False)), draft_tokens=3))},
            "3 tokens were drafted although speculation is off",
        ),
    ],
)
def test_a_proof_of_nothing_is_no_proof(broken: dict[str, object], problem: str) -> None:
    [found] = problems(proof(**broken), LINES)
    assert problem in found


Started = list[tuple[Settings, dict[str, int]]]


@pytest.fixture
def started(procfile: Path, monkeypatch: pytest.MonkeyPatch) -> Started:
    """Stacks of the stage that answers everything; its text ends with the seed."""
    stacks: Started = []

    def start(settings: Settings, replicas: dict[str, int]) -> Stack:
        stacks.append((settings, replicas))
        return Stack(settings, {}, procfile=procfile)

    monkeypatch.setattr(prove_run, "Stack", start)
    return stacks


async def test_each_stack_is_started_once_and_the_control_runs_on_the_first(
    started: Started, stack_settings: Settings
) -> None:
    cases = [CASE, replace(CASE, order="backward", speculate=False), replace(CASE, num_decode=3, chunk_tokens=512)]
    notes: list[str] = []
    found = await run_matrix(stack_settings, cases, LINES, notes.append)
    assert [(settings.chunk_tokens, replicas) for settings, replicas in started] == [
        (64, {"decode": 1}),
        (512, {"decode": 3}),
    ]
    assert [run.case for run in found.runs] == cases
    assert len({digest(run.outputs) for run in found.runs}) == 1
    assert found.runs[0].outputs[SAMPLED.custom_id].text.endswith(f"seed {SAMPLED.params.seed}")
    assert digest(found.control.outputs) != digest(found.runs[0].outputs)
    assert notes


async def test_a_failed_request_is_no_difference_but_an_error(started: Started, stack_settings: Settings) -> None:
    failing = replace(GREEDY, messages=None, prompt=FAIL_WORD)
    with pytest.raises(ProofFailed, match=f"{failing.custom_id} failed in tokenizer: no"):
        await run_matrix(stack_settings, [CASE], [failing], lambda _: None)


def command_result(found: Proof, monkeypatch: pytest.MonkeyPatch) -> int:
    async def give(*_: object) -> Proof:
        return found

    monkeypatch.setattr(command, "run_matrix", give)
    monkeypatch.setattr(command, "checked_model", lambda _: Path())
    with pytest.raises(command.typer.Exit) as ended:
        command.prove(prompts=EXAMPLES, requests=2)
    return ended.value.exit_code


def test_command_succeeds_only_with_a_proof(
    monkeypatch: pytest.MonkeyPatch, stack_env: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SLUICE_MODEL", MODEL)
    assert command_result(proof(), monkeypatch) == 0
    assert "all 2 runs gave the same" in capsys.readouterr().out
    assert command_result(proof(runs=(case_run(), case_run(("x", "sampled")))), monkeypatch) == 1
    assert GREEDY.custom_id in capsys.readouterr().err
