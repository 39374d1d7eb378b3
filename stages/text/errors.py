"""Every error of the text code, in one tree. It knows nothing about requests or about who reports it.

    TextError
    ├── VocabularyError           the model file
    │   ├── VocabularyDamaged     its metadata lack something, or contradict themselves
    │   └── VocabularyUnsupported it needs a kind of tokenizer that we do not have
    ├── UnencodableText           the user's text is not Unicode: it holds half of a surrogate pair
    ├── UnknownTokenId            a token id outside the vocabulary
    └── TemplateError             the model's chat template
        ├── TemplateInvalid       it is not a template: syntax, size, constructs we refuse
        ├── TemplateFailed        it broke while it ran
        ├── TemplateLimit         it ran for too long, or made too much text
        ├── TemplateRejected      it refused the messages itself: the user's mistake, in the template's words
        └── AmbiguousPrompt       the user's text could not be kept apart from control tokens

None is retryable: every one is a pure function of the model file and the request (TemplateLimit nearly so:
its clock is a second line behind counters). `code` is the stable name for machines. Messages of the branch
TemplateError may quote what people wrote: they are for the author of the request, not for logs.
"""

# ruff: noqa: N818 - each name says what happened; "Error" is for the branches

from pathlib import Path
from typing import ClassVar


class TextError(Exception):
    """The root: catching it catches everything this package raises on purpose."""

    retryable: ClassVar[bool] = False
    code: ClassVar[str] = "text_error"


class VocabularyError(TextError):
    """A model file's vocabulary cannot be used."""

    code = "model_vocabulary"


class VocabularyDamaged(VocabularyError):
    """The metadata are not a vocabulary; the message names the file and the key."""

    def __init__(self, path: Path, problem: str) -> None:
        super().__init__(f"{path}: {problem}")
        self.path = path
        self.problem = problem


class VocabularyUnsupported(VocabularyError):
    """The vocabulary asks for something we do not have."""

    def __init__(self, key: str, actual: str, supported: tuple[str, ...]) -> None:
        super().__init__(f"{key} is {actual!r}, supported: {', '.join(supported)}")
        self.key = key
        self.actual = actual
        self.supported = supported


class UnencodableText(TextError):
    """Text that has no UTF-8 form, so no bytes and no tokens."""

    code = "invalid_text"

    def __init__(self, position: int, character: str) -> None:
        super().__init__(f"character {position} is U+{ord(character):04X}, half of a surrogate pair")
        self.position = position


class UnknownTokenId(TextError):
    """A token id that the vocabulary does not have."""

    code = "unknown_token_id"

    def __init__(self, token_id: int, num_tokens: int) -> None:
        super().__init__(f"token id {token_id} is not in a vocabulary of {num_tokens} tokens")
        self.token_id = token_id
        self.num_tokens = num_tokens


class TemplateError(TextError):
    """The chat template could not turn the messages into a prompt."""

    code = "chat_template"


class TemplateInvalid(TemplateError):
    """The model's chat template is refused before it runs."""


class TemplateFailed(TemplateError):
    """The chat template broke while it ran, or touched what a template may not touch."""


class TemplateLimit(TemplateError):
    """The chat template exceeded a limit; the message says which."""

    def __init__(self, what: str, limit: float) -> None:
        super().__init__(f"the chat template exceeds {what}: at most {limit:,}")
        self.limit = limit


class TemplateRejected(TemplateError):
    """The chat template refused the messages with raise_exception; the message is the template's own."""

    code = "invalid_messages"


class AmbiguousPrompt(TemplateError):
    """The template rewrites text that spells control tokens, so the two can no longer be told apart."""

    code = "invalid_messages"
