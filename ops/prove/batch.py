"""The batch of a proof: real prompts, half of them sampled with seeds, logprobs for every token.

Owns what is overridden in the lines of the file. Knows nothing about stacks.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from pipeline.batch.lines import BatchLine, BatchLineError, read_batch
from pipeline.errors import InvalidRequest

SAMPLED_TEMPERATURE = 0.8
LOGPROBS = 3  # alternatives a token
FIRST_SEED = 1000
CONTROL_SEED_STEP = 500_000
_LENGTHS = (64, 72, 80, 88, 96)  # different ones, so that requests end in different steps


def read_prompts(path: Path, model: str, count: int) -> list[BatchLine]:
    """Return the first lines of a batch file, every second one sampled, the others greedy.

    Raises:
        InvalidRequest: a line is wrong, or there are too few.
    """
    lines: list[BatchLine] = []
    with path.open("rb") as file:
        for line in read_batch(file, model):
            if isinstance(line, BatchLineError):
                raise InvalidRequest(path.name, str(line))
            lines.append(line)
            if len(lines) == count:
                return [_prepared(line, index) for index, line in enumerate(lines)]
    raise InvalidRequest(path.name, f"has {len(lines)} lines, {count} are needed")


def with_other_seeds(lines: Sequence[BatchLine]) -> list[BatchLine]:
    """Return the control: the same requests, each with another seed."""
    return [
        replace(line, params=line.params.model_copy(update={"seed": (line.params.seed or 0) + CONTROL_SEED_STEP}))
        for line in lines
    ]


def is_sampled(line: BatchLine) -> bool:
    """Whether the seed matters to a request."""
    return line.params.temperature > 0


def _prepared(line: BatchLine, index: int) -> BatchLine:
    changes: dict[str, object] = {
        "temperature": SAMPLED_TEMPERATURE if index % 2 else 0.0,
        "seed": FIRST_SEED + index,
        "max_tokens": _LENGTHS[index % len(_LENGTHS)],
        "logprobs": LOGPROBS,
    }
    return replace(line, params=line.params.model_copy(update=changes))
