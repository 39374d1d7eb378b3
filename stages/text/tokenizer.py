"""Text to token ids and back to bytes, for byte-level BPE vocabularies.

It owns the pre-tokenizers by name and the rule for control tokens: they are recognised only where the caller
says so, never in a user's text. It knows nothing about chat templates, requests or when output is complete.

A vocabulary need not hold all 256 bytes (SmolLM2's lacks 21: some control characters, and lead bytes of
unassigned planes). Bytes without a token are left out, as the published tokenizer does.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final

from tokenizers import Tokenizer as BpeTokenizer
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel, Digits, PreTokenizer
from tokenizers.pre_tokenizers import Sequence as PreTokenizers

from stages.text.byte_alphabet import to_bytes
from stages.text.errors import UnencodableText, UnknownTokenId, VocabularyUnsupported
from stages.text.prompt_parts import PartSplitter, PromptPart
from stages.text.vocabulary import CONTROL_TYPES, TokenType, Vocabulary

MODEL: Final = "gpt2"


def _smollm() -> PreTokenizer:
    # Each digit alone, then GPT-2's words. llama.cpp states the same as \p{N} followed by GPT-2's expression.
    return PreTokenizers([Digits(individual_digits=True), ByteLevel(add_prefix_space=False, use_regex=True)])


PRE_TOKENIZERS: Final[Mapping[str, Callable[[], PreTokenizer]]] = {"smollm": _smollm}


class Tokenizer:
    """Encodes and decodes for one vocabulary; immutable once built."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        """Build the merge table, which takes some tenths of a second.

        Raises:
            VocabularyUnsupported: Not byte-level BPE, an unknown pre-tokenizer, or merges that do not fit.
        """
        self.vocabulary = vocabulary
        self._bpe = _build_bpe(vocabulary)
        self._bytes = tuple(map(_token_bytes, vocabulary.tokens, vocabulary.types))
        # User-defined tokens are shorthand, not control: text that spells one means it (as in llama.cpp).
        shorthands = vocabulary.by_spelling(TokenType.USER_DEFINED)
        self._specials = vocabulary.by_spelling(TokenType.USER_DEFINED, *CONTROL_TYPES)
        self._split_plain = PartSplitter(shorthands)
        self._split_special = PartSplitter(self._specials)

    def encode(self, text: str, *, allow_special: bool) -> list[int]:
        """Return the ids of a text; control tokens that it spells are recognised only if `allow_special`.

        Adds no bos; see `with_bos`.

        Raises:
            UnencodableText: The text holds half of a surrogate pair.
        """
        _check_encodable(text)
        splitter = self._split_special if allow_special else self._split_plain
        ids: list[int] = []
        for part in splitter.split(text):
            if part.is_token:
                ids.append(self._specials[part.text])
            else:
                ids += self._bpe.encode(part.text, add_special_tokens=False).ids
        return ids

    def encode_parts(self, parts: Iterable[PromptPart]) -> list[int]:
        """Return the ids of a prompt whose control tokens are known, such as a rendered chat."""
        ids: list[int] = []
        for part in parts:
            if part.is_token:
                ids.append(self._specials[part.text])
            else:
                ids += self.encode(part.text, allow_special=False)
        return ids

    def with_bos(self, ids: Sequence[int]) -> list[int]:
        """Prepend the bos token where the model wants one and the sequence does not start with it."""
        bos_id = self.vocabulary.bos_id
        if not self.vocabulary.add_bos or bos_id is None or (ids and ids[0] == bos_id):
            return list(ids)
        return [bos_id, *ids]

    def token_bytes(self, token_id: int) -> bytes:
        """Return what a token spells; for a control token its name, though that is never output.

        Raises:
            UnknownTokenId: The id is outside the vocabulary.
        """
        if not 0 <= token_id < len(self._bytes):
            raise UnknownTokenId(token_id, len(self._bytes))
        return self._bytes[token_id]

    def output_bytes(self, token_id: int) -> bytes:
        """Return what a token adds to the output: what it spells, or nothing for a control token."""
        spelled = self.token_bytes(token_id)
        return b"" if token_id in self.vocabulary.control_ids else spelled

    def decode(self, ids: Iterable[int]) -> str:
        """Return the output text of a whole sequence; invalid UTF-8 becomes U+FFFD."""
        return b"".join(map(self.output_bytes, ids)).decode("utf-8", errors="replace")


def _build_bpe(vocabulary: Vocabulary) -> BpeTokenizer:
    if vocabulary.model != MODEL:
        raise VocabularyUnsupported("tokenizer.ggml.model", vocabulary.model, (MODEL,))
    make_pre_tokenizer = PRE_TOKENIZERS.get(vocabulary.pre)
    if make_pre_tokenizer is None:
        raise VocabularyUnsupported("tokenizer.ggml.pre", vocabulary.pre, tuple(PRE_TOKENIZERS))
    ids = {token: token_id for token_id, token in enumerate(vocabulary.tokens)}
    for left, right in vocabulary.merges:
        if not (left in ids and right in ids and left + right in ids):
            raise VocabularyUnsupported("tokenizer.ggml.merges", f"{left} {right}", ("tokens there are",))
    bpe = BpeTokenizer(BPE(vocab=ids, merges=list(vocabulary.merges)))
    bpe.pre_tokenizer = make_pre_tokenizer()
    return bpe


def _token_bytes(token: str, type_: TokenType) -> bytes:
    if type_ == TokenType.NORMAL:
        return to_bytes(token)
    return b"" if type_ == TokenType.UNUSED else token.encode("utf-8")


def _check_encodable(text: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise UnencodableText(error.start, text[error.start]) from error
