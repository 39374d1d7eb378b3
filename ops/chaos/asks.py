"""What the rows ask for: long answers, long prompts, many short ones; sampled and greedy, all with seeds and logprobs.

Owns nothing but their sizes. On a model of bytes a character is a token; on a real one there are fewer tokens.
"""

from ops.chaos.lab import Lab
from pipeline.client.asks import NewRequest

SOON_TOKENS = 40  # of a few long answers: all of them are under way, none is near its end
SAMPLED_TEMPERATURE = 0.8


def long_answers(lab: Lab, number: int = 4, max_tokens: int = 300) -> list[NewRequest]:
    """Return requests that decode is busy with for seconds."""
    return [
        lab.ask(
            f"{index} and then " * (4 * index + 1),
            max_tokens,
            seed=index,
            temperature=_temperature(index),
            logprobs=2,
            frequency_penalty=0.1,
        )
        for index in range(number)
    ]


def long_prompts(lab: Lab, number: int = 4, num_chars: int = 700, max_tokens: int = 40) -> list[NewRequest]:
    """Return requests whose KV is many chunks."""
    return [
        lab.ask(
            f"prompt {index}: {'a story of the sea, ' * num_chars}"[:num_chars],
            max_tokens,
            seed=100 + index,
            temperature=_temperature(index),
            logprobs=1,
        )
        for index in range(number)
    ]


def short_ones(lab: Lab, number: int, max_tokens: int = 12, distinct: int = 12) -> list[NewRequest]:
    """Return many small requests, of which only `distinct` differ."""
    return [
        lab.ask(f"request {index % distinct}", max_tokens, seed=200 + index % distinct, temperature=_temperature(index))
        for index in range(number)
    ]


def _temperature(index: int) -> float:
    return SAMPLED_TEMPERATURE if index % 2 else 0.0
