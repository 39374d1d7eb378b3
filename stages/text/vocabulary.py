"""The vocabulary of a model, as its GGUF file states it: tokens, merges, special ids, chat template.

It owns the reading of the `tokenizer.*` keys and their consistency. It knows nothing about how text becomes
tokens (tokenizer.py) or how a chat becomes text (chat_template.py).
"""

from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Final, Self, TypeVar

from stages.gguf.file import GgufFile
from stages.text.errors import VocabularyDamaged

# Models that end a turn with another token than their eos rarely say so in the metadata: llama.cpp knows
# them by their spelling (llama-vocab.cpp, special_eog_ids), and so do we. Only control tokens count.
END_OF_GENERATION_SPELLINGS: Final = frozenset({
    "<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|eom_id|>", "<EOT>", "_<EOT>",
    "<|end_of_text|>", "<end_of_utterance>",
})  # fmt: skip
_END_KEYS: Final = ("eos_token_id", "eot_token_id", "eom_token_id")
_PREFIX: Final = "tokenizer.ggml."
T = TypeVar("T", int, str, bool)


class TokenType(IntEnum):
    """What a token is for (llama_token_type of llama.cpp)."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


# llama.cpp treats the unknown token as a control token throughout.
CONTROL_TYPES: Final = (TokenType.CONTROL, TokenType.UNKNOWN)


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Everything the text code needs of a model; ids are positions in `tokens`.

    Normal tokens are spelled in GPT-2's byte alphabet, control and user-defined ones in plain text.
    """

    model: str  # the kind of tokenizer: "gpt2" is byte-level BPE
    pre: str  # the name of the pre-tokenizer
    tokens: tuple[str, ...]
    types: tuple[TokenType, ...]
    merges: tuple[tuple[str, str], ...]
    bos_id: int | None
    eos_id: int | None
    end_of_generation_ids: frozenset[int]
    control_ids: frozenset[int]
    add_bos: bool
    chat_template: str | None

    @classmethod
    def from_gguf(cls, path: Path) -> Self:
        """Read the vocabulary of a GGUF file; the weights are not touched.

        Raises:
            GgufError: The file cannot be read.
            VocabularyDamaged: A key is missing, of a wrong type or out of range.
        """
        with GgufFile.open(path) as file:
            return cls._from_keys(_Keys(file))

    @classmethod
    def _from_keys(cls, keys: "_Keys") -> Self:
        tokens = keys.strings("tokens")
        types = _types(keys, len(tokens))
        control = frozenset(id_ for id_, type_ in enumerate(types) if type_ in CONTROL_TYPES)
        return cls(
            model=keys.required("model", str),
            pre=keys.required("pre", str),
            tokens=tokens,
            types=types,
            merges=tuple(_pair(keys, merge) for merge in keys.strings("merges")),
            bos_id=keys.token_id("bos_token_id", len(tokens)),
            eos_id=keys.token_id("eos_token_id", len(tokens)),
            end_of_generation_ids=_end_ids(keys, tokens, control),
            control_ids=control,
            add_bos=keys.optional("add_bos_token", bool) or False,
            chat_template=keys.template(),
        )

    def by_spelling(self, *types: TokenType) -> dict[str, int]:
        """Return the ids of all tokens of these types, by spelling."""
        return {self.tokens[id_]: id_ for id_, type_ in enumerate(self.types) if type_ in types}

    def spelling(self, token_id: int | None) -> str:
        """Return how a token is spelled, "" for None: what templates expect as bos_token and eos_token."""
        return "" if token_id is None else self.tokens[token_id]


def _types(keys: "_Keys", num_tokens: int) -> tuple[TokenType, ...]:
    numbers = keys.numbers("token_type")
    if len(numbers) != num_tokens:
        raise keys.problem("token_type", f"has {len(numbers)} entries for {num_tokens} tokens")
    try:
        return tuple(map(TokenType, numbers))
    except ValueError as error:
        raise keys.problem("token_type", f"has an unknown type: {error}") from error


def _pair(keys: "_Keys", merge: str) -> tuple[str, str]:
    left, space, right = merge.partition(" ")  # the byte alphabet has no space, so there is exactly one
    if not (left and space and right) or " " in right:
        raise keys.problem("merges", f"has {merge!r}, expected two tokens and a space")
    return left, right


def _end_ids(keys: "_Keys", tokens: tuple[str, ...], control: frozenset[int]) -> frozenset[int]:
    stated = (keys.token_id(name, len(tokens)) for name in _END_KEYS)
    spelled = {id_ for id_ in control if tokens[id_] in END_OF_GENERATION_SPELLINGS}
    return frozenset(spelled | {id_ for id_ in stated if id_ is not None})


class _Keys:
    """The metadata with checked access: what is not as expected becomes an error that names the key."""

    def __init__(self, file: GgufFile) -> None:
        self._file = file

    def problem(self, name: str, what: str) -> VocabularyDamaged:
        return VocabularyDamaged(self._file.path, f"{_PREFIX}{name} {what}")

    def optional(self, name: str, kind: type[T]) -> T | None:
        value = self._file.value(_PREFIX + name)
        if value is None:
            return None
        if not (isinstance(value, kind) and type(value) is kind):  # a bool is an int, but not one of ours
            raise self.problem(name, f"is {type(value).__name__}, expected {kind.__name__}")
        return value

    def required(self, name: str, kind: type[T]) -> T:
        value = self.optional(name, kind)
        if value is None:
            raise self.problem(name, "is missing: the file holds no vocabulary that can be used")
        return value

    def strings(self, name: str) -> tuple[str, ...]:
        return self._array(name, str)

    def numbers(self, name: str) -> tuple[int, ...]:
        return self._array(name, int)

    def token_id(self, name: str, num_tokens: int) -> int | None:
        token_id = self.optional(name, int)
        if token_id is not None and not 0 <= token_id < num_tokens:
            raise self.problem(name, f"is {token_id}, but there are {num_tokens} tokens")
        return token_id

    def template(self) -> str | None:
        template = self._file.value("tokenizer.chat_template")
        return template if isinstance(template, str) else None

    def _array(self, name: str, kind: type[T]) -> tuple[T, ...]:
        value = self._file.value(_PREFIX + name)
        if not isinstance(value, tuple):
            raise self.problem(name, "is missing, or not an array")
        items = tuple(item for item in value if isinstance(item, kind))
        if len(items) != len(value):
            raise self.problem(name, f"has entries that are not {kind.__name__}")
        return items
