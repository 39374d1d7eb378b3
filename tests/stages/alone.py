"""What a request gives without pipeline, chunks, batches, drafts or interruptions: one engine, token after token.

The oracle of the stage tests. It uses the engine's row rule (docs/arithmetic.md) and none of the stages' code.
"""

from collections.abc import Sequence

import numpy as np

from kv_store.packing import PageArrays, pack
from pipeline.messages import TokenizedPrompt, TokenLogprobs
from stages.common.sampling_spec import end_token_ids, sampling_spec
from stages.engine.batch import RowBatch, Run
from stages.engine.engine import Engine
from stages.engine.kv_cache import pages_for
from stages.engine.sampling import SampledToken, TokenHistory, sample
from tests.stages.line import Line


def result_alone(line: Line, message: TokenizedPrompt) -> tuple[object, ...]:
    """Token ids, text, logprobs and finish reason: `Answer.result` of a request that nothing happens to."""
    params, vocabulary = message.params, line.tokenizer.vocabulary
    ends = end_token_ids(params, vocabulary.end_of_generation_ids)
    tokens: list[SampledToken] = []
    with line.engine() as engine:
        pages = engine.cache.allocate(len(message.prompt_token_ids) + message.max_tokens)
        new, start = list(message.prompt_token_ids), 0
        while True:
            run = Run(new, start, pages, 1)
            [row] = engine.model.logits(RowBatch.from_runs([run]), engine.cache)
            history = TokenHistory.of(message.prompt_token_ids, [token.token_id for token in tokens])
            tokens.append(sample(row, sampling_spec(params), len(tokens), history))
            start += len(new)
            new = [tokens[-1].token_id]
            text, stopped = text_of(line, tokens, params.stop)
            if stopped or new[0] in ends:
                return _result(tokens, text, "stop")
            if len(tokens) == message.max_tokens:
                return _result(tokens, text, "length")


def text_of(line: Line, tokens: Sequence[SampledToken], stops: Sequence[str]) -> tuple[str, bool]:
    """The text of some tokens, cut before the first stop string, and whether there was one."""
    text = line.tokenizer.decode(token.token_id for token in tokens)
    found = [at for stop in stops if (at := text.find(stop)) >= 0]
    return (text[: min(found)], True) if found else (text, False)


def packed_alone(line: Line, prompt_token_ids: Sequence[int], start: int, num_tokens: int) -> bytes:
    """KV of a part of a prompt that was computed in one go, as a sealed payload."""
    with line.engine() as engine:
        pages = engine.cache.allocate(len(prompt_token_ids))
        run = Run(list(prompt_token_ids), 0, pages, 0)
        engine.model.logits(RowBatch.from_runs([run]), engine.cache)
        wanted = pages_of_span(engine, pages, start, num_tokens)
        return pack(wanted, engine.config.kv_layout, engine.codec, num_tokens)


def pages_of_span(engine: Engine, pages: Sequence[int], start: int, num_tokens: int) -> list[PageArrays]:
    """Views of the pages that hold a chunk."""
    first = pages_for(start)
    return [engine.cache.page(index) for index in pages[first : first + pages_for(num_tokens)]]


def prompt_of(num_tokens: int, seed: int = 0) -> list[int]:
    """Some bytes; each seed gives another prompt."""
    return np.random.default_rng(seed).integers(32, 127, num_tokens).tolist()


def repetitive_prompt(num_tokens: int) -> list[int]:
    """A prompt in which prompt lookup finds drafts."""
    return (prompt_of(12) * num_tokens)[:num_tokens]


def ascii_only() -> dict[int, float]:
    """A logit bias after which the tiny model writes printable characters, each a token."""
    return {byte: -100.0 for byte in range(257) if not 32 <= byte < 127}


def _result(tokens: Sequence[SampledToken], text: str, reason: str) -> tuple[object, ...]:
    logprobs = None
    if tokens[0].logprob is not None:
        logprobs = tuple(
            TokenLogprobs(token_id=token.token_id, logprob=token.logprob, top=token.top)
            for token in tokens
            if token.logprob is not None
        )
    return tuple(token.token_id for token in tokens), text, logprobs, reason
