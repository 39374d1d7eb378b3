"""Decode: requests come and go, and each gets what it gets alone."""

import pytest

from pipeline.transport import Outcome, Transaction
from tests.stages.alone import ascii_only, prompt_of, repetitive_prompt, result_alone
from tests.stages.line import CHUNK_TOKENS, NUM_PAGES, Line, holds, soon

ALL = ("prefill", "compressor", "decode")
LIVELY = {"temperature": 0.8, "presence_penalty": 0.5, "repetition_penalty": 1.2, "logprobs": 3}


def emits(transaction: Transaction) -> bool:
    return bool(transaction.effects)


async def test_requests_that_join_and_leave_a_batch_get_what_they_get_alone(line: Line) -> None:
    line.max_num_seqs = 3
    messages = [
        await line.submit(
            f"r{number}",
            repetitive_prompt(30 * number + 1),
            3 + 5 * (number % 4),
            speculate=number % 3 != 0,
            priority="interactive" if number % 2 else "batch",
            seed=number,
            **(LIVELY if number % 2 else {}),
        )
        for number in range(8)
    ]
    async with line.running(*ALL):
        answers = [await line.answer(message.request_id) for message in messages]
    assert [answer.result for answer in answers] == [result_alone(line, message) for message in messages]
    line.assert_nothing_left()


@pytest.mark.parametrize("speculate", [False, True])
async def test_drafts_change_the_number_of_steps_and_nothing_else(line: Line, speculate: bool) -> None:
    message = await line.submit("r", repetitive_prompt(60), 40, speculate=speculate)
    async with line.running(*ALL):
        answer = await line.answer("r")
    assert answer.result == result_alone(line, message)
    usage = answer.completion.usage
    assert (usage.prompt_tokens, usage.completion_tokens) == (60, 40)
    assert (usage.draft_tokens > 0) is speculate
    assert usage.accepted_tokens <= usage.draft_tokens
    # One delta a step: token 0 is prefill's, and every accepted draft saves a step.
    assert len(answer.deltas) == 40 - usage.accepted_tokens


@pytest.mark.parametrize("length", [1, 3, 6])
async def test_a_stop_string_ends_the_text_before_it_however_many_tokens_it_spans(line: Line, length: int) -> None:
    params = {"temperature": 0.9, "logit_bias": ascii_only()}
    plain = result_alone(line, await line.submit("probe", prompt_of(9), 30, **params))
    line.forget("probe")
    text = plain[1]
    assert isinstance(text, str)
    stop = text[11 : 11 + length]
    message = await line.submit("r", prompt_of(9), 30, stop=[stop, "never" * 9], **params)
    async with line.running(*ALL):
        answer = await line.answer("r")
    assert answer.completion.text == text[: text.index(stop)]
    assert answer.completion.finish_reason == "stop"
    assert answer.result == result_alone(line, message)


async def test_the_beginning_of_a_stop_string_is_held_back_and_comes_out_at_the_end(line: Line) -> None:
    params = {"temperature": 0.9, "logit_bias": ascii_only()}
    text = result_alone(line, await line.submit("probe", prompt_of(9), 12, **params))[1]
    line.forget("probe")
    assert isinstance(text, str)
    await line.submit("r", prompt_of(9), 12, stop=[text[-5:] + "\n"], **params)
    async with line.running(*ALL):
        answer = await line.answer("r")
    assert answer.terminal.text == text[-5:]
    assert (answer.completion.text, answer.completion.finish_reason) == (text, "length")


async def test_no_delta_holds_half_a_character(line: Line) -> None:
    lead, trail = "é".encode()
    only_two_bytes = {byte: -100.0 for byte in range(257) if byte not in (lead, trail)}
    message = await line.submit("r", prompt_of(5), 40, temperature=1.5, logit_bias=only_two_bytes)
    async with line.running(*ALL):
        answer = await line.answer("r")
    whole, shown = answer.completion.text, ""
    assert "é" in whole
    for delta in answer.deltas:
        shown += delta.text
        assert whole.startswith(shown)
    assert answer.result == result_alone(line, message)


@pytest.mark.parametrize("max_tokens", [1, 2, 5])
async def test_output_ends_after_max_tokens(line: Line, max_tokens: int) -> None:
    message = await line.submit("r", repetitive_prompt(30), max_tokens)
    async with line.running(*ALL):
        answer = await line.answer("r")
    assert len(answer.completion.token_ids) == max_tokens
    assert answer.completion.finish_reason == "length"
    assert answer.result == result_alone(line, message)
    line.assert_nothing_left()


async def test_the_end_token_ends_the_text_unless_it_is_ignored(line: Line) -> None:
    token_ids = result_alone(line, await line.submit("probe", prompt_of(9), 20, temperature=0.8))[0]
    line.forget("probe")
    assert isinstance(token_ids, tuple)
    line.end_text_with(token_ids[6])
    obeying = await line.submit("r", prompt_of(9), 20, temperature=0.8)
    ignoring = await line.submit("s", prompt_of(9), 20, temperature=0.8, ignore_eos=True)
    async with line.running(*ALL):
        first, second = await line.answer("r"), await line.answer("s")
    assert first.completion.token_ids == token_ids[: token_ids.index(token_ids[6]) + 1]
    assert first.completion.finish_reason == "stop"
    assert (second.completion.token_ids, second.completion.finish_reason) == (token_ids, "length")
    assert first.result == result_alone(line, obeying)
    assert second.result == result_alone(line, ignoring)


async def test_requests_wait_for_pages_in_turn(line: Line) -> None:
    line.num_pages = 3
    messages = [await line.submit(f"r{n}", prompt_of(CHUNK_TOKENS - 4, n), 2 * CHUNK_TOKENS) for n in range(3)]
    async with line.process("prefill") as prefill, line.running("compressor", "decode"):
        answers = [await line.answer(message.request_id) for message in messages]
    assert prefill.task.exception() is None
    assert [answer.result for answer in answers] == [result_alone(line, message) for message in messages]


@pytest.mark.parametrize(("num_pages", "stage"), [(NUM_PAGES, "prefill"), (2, "decode")])
async def test_a_request_that_a_decode_process_has_no_pages_for_fails_and_others_go_on(
    line: Line, num_pages: int, stage: str
) -> None:
    """Before it is computed, where none has them; a process that has fewer than others says so itself."""
    line.num_pages = num_pages  # of the process; NUM_PAGES are announced
    await line.submit("large", prompt_of(CHUNK_TOKENS), num_pages * CHUNK_TOKENS)
    message = await line.submit("small", prompt_of(5), 4)
    async with line.running(*ALL):
        failure = (await line.answer("large")).failure
        answer = await line.answer("small")
    assert (failure.stage, failure.code, failure.retryable) == (stage, "kv_cache_too_small", stage == "prefill")
    assert f"needs {num_pages + 1} pages of KV cache" in failure.message
    assert answer.result == result_alone(line, message)
    line.assert_nothing_left()


async def test_a_request_whose_lease_is_lost_is_dropped_quietly_and_goes_on_elsewhere(line: Line) -> None:
    message = await line.submit("r", prompt_of(20), 12, **LIVELY)

    def third_step(transaction: Transaction) -> bool:
        return emits(transaction) and len(line.queues.broker.requests()["r"].results) == 3

    async with line.running("prefill", "compressor"), line.process("decode", hold=third_step) as slow:
        await soon(slow.transport.holding.wait())
        line.clock.end_leases()
        async with line.running("decode"):
            answer = await line.answer("r")
        slow.transport.go_on.set()
        await holds(lambda: slow.transport.committed[-1][1] is not Outcome.OK)
        other = await line.submit("s", prompt_of(21), 5)
        assert (await line.answer("s")).result == result_alone(line, other)
    assert answer.result == result_alone(line, message)
    assert [outcome for _, outcome in slow.transport.committed if outcome is not Outcome.OK] == [Outcome.ALREADY]
    assert line.dead_letters("decode") == []
    line.assert_nothing_left()


async def test_a_request_that_is_taken_back_leaves_its_place_to_others(line: Line) -> None:
    line.max_num_seqs = 1
    await line.submit("r", prompt_of(20), 500)
    message = await line.submit("s", prompt_of(21), 5)
    async with line.running("prefill", "compressor"), line.process("decode") as decode:
        await holds(lambda: len(line.queues.broker.requests()["r"].results) > 3)
        line.forget("r")
        assert (await line.answer("s")).result == result_alone(line, message)
    assert [outcome for _, outcome in decode.transport.committed if outcome is not Outcome.OK] == [Outcome.GONE]
    line.assert_nothing_left()
