"""What the rows ask for: long answers, long prompts, many short ones; sampled and greedy, all with seeds and logprobs.

Owns nothing but their sizes. On a model of bytes a character is a token; on a real one there are fewer tokens.
"""

from ops.chaos.inquiry import Inquiry
from pipeline.client.asks import NewRequest

SOON_TOKENS = 40  # of a few long answers: all of them are under way, none is near its end
SAMPLED_TEMPERATURE = 0.8
OPENINGS = (
    "Three strangers meet on a ferry at night. The first one says:",
    "A list of things that nobody has ever put into a letter:",
    "The old map was wrong about the island, because",
    "What I would ask a whale, if it could answer:",
)
SENTENCES = (
    "The tide comes in, the tide goes out.",
    "A keeper counts the ships that pass at noon.",
    "Nobody knows who lit the lamp last night.",
    "Seven gulls sit on the wall and wait.",
    "The map shows a road where there is none.",
    "In spring the ferry runs an hour late.",
    "She wrote the number down and lost the page.",
    "Rain on the roof, and a door that does not close.",
    "He asked for salt and was given a stone.",
    "Under the pier it is colder than you think.",
    "The bell rings twice when the fog is thick.",
)


def long_answers(lab: Inquiry, number: int = 4, max_tokens: int = 300) -> list[NewRequest]:
    """Return requests that decode is busy with for seconds."""
    return [
        lab.ask(
            f"{index} and then " * (4 * index + 1),
            max_tokens,
            seed=index,
            temperature=_temperature(index),
            logprobs=2,
            frequency_penalty=0.1,
            ignore_eos=True,
        )
        for index in range(number)
    ]


def long_prompts(lab: Inquiry, number: int = 4, num_chars: int = 700, max_tokens: int = 40) -> list[NewRequest]:
    """Return requests whose KV is many chunks."""
    return [
        lab.ask(
            _story(index, num_chars),
            max_tokens,
            seed=100 + index,
            temperature=_temperature(index),
            logprobs=1,
            ignore_eos=True,
        )
        for index in range(number)
    ]


def open_ends(lab: Inquiry, number: int = 4, max_tokens: int = 200) -> list[NewRequest]:
    """Return requests whose answers another seed changes also on a real model: what comes next is anybody's guess."""
    return [
        lab.ask(
            f"{OPENINGS[index % len(OPENINGS)]} ({index})",
            max_tokens,
            seed=400 + index,
            temperature=_temperature(index),
            logprobs=3,
            ignore_eos=True,
        )
        for index in range(number)
    ]


def short_ones(lab: Inquiry, number: int, max_tokens: int = 12, distinct: int = 12) -> list[NewRequest]:
    """Return many small requests, of which only `distinct` differ."""
    return [
        lab.ask(f"request {index % distinct}", max_tokens, seed=200 + index % distinct, temperature=_temperature(index))
        for index in range(number)
    ]


def _story(index: int, num_chars: int) -> str:
    sentences = [SENTENCES[(index + 7 * number) % len(SENTENCES)] for number in range(num_chars // 16 + 1)]
    return f"{index}. {' '.join(sentences)}"[:num_chars]


def _temperature(index: int) -> float:
    return SAMPLED_TEMPERATURE if index % 2 else 0.0
