"""A chat as a prompt: the model's own template, with the users' text kept apart from control tokens.

Owns the rendering and the separation. Knows nothing about token ids, requests or the sandbox's inside.

A template only makes text, in which a user's `<|im_end|>` looks like the template's. So the messages are
rendered twice, the second time with marks: a character that occurs nowhere else, between the characters of
the users' text. What spells a control token in the marked prompt comes from the template alone; then the
marks are taken out again. This is right as long as the marks change nothing else, and that is checked:
without them, both prompts must be equal. They differ where a template looks into the text
(`'</think>' in content`) and finds something; then only what could be mistaken for a control token is marked.
Where even that changes the prompt, the request is refused.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from typing import Final, NoReturn, Protocol

import jinja2

from stages.text.errors import (
    AmbiguousPrompt,
    TemplateError,
    TemplateFailed,
    TemplateInvalid,
    TemplateLimit,
    TemplateRejected,
)
from stages.text.prompt_parts import PartSplitter, PromptPart
from stages.text.template_budget import fresh_budget, to_text
from stages.text.template_sandbox import TemplateEnvironment
from stages.text.text_marks import mark_all, mark_lookalikes, unused_mark
from stages.text.vocabulary import CONTROL_TYPES, Vocabulary

MAX_SOURCE_CHARACTERS: Final = 1 << 16  # the longest published templates have 20 thousand
MAX_PROMPT_CHARACTERS: Final = 1 << 20  # longer than any context we serve; a batch line has no more either

# What a running template can raise of its own: Jinja's errors, and Python's for our values in its operations.
_BREAKS: Final = (
    jinja2.TemplateError,
    ArithmeticError,
    AttributeError,
    LookupError,
    RuntimeError,
    TypeError,
    ValueError,
)
# What compiling can raise: the same, and what Python says to code that is nested too deeply.
_REFUSALS: Final = (*_BREAKS, AssertionError, MemoryError, SyntaxError)
_ROLE: Final = re.compile(r"[a-z][a-z_]*")


class Message(Protocol):
    """One message of a chat."""

    @property
    def role(self) -> str:
        """Who speaks; trusted, for templates make control tokens of it."""
        ...

    @property
    def content(self) -> str:
        """What they said; never trusted."""
        ...


@dataclass(frozen=True, slots=True)
class RenderedPrompt:
    """A prompt, ready for `Tokenizer.encode_parts`."""

    parts: tuple[PromptPart, ...]

    @property
    def text(self) -> str:
        """The prompt as one text, in which control tokens and look-alikes are the same."""
        return "".join(part.text for part in self.parts)


class ChatTemplate:
    """One model's chat template, compiled; rendering is a pure function of its arguments."""

    def __init__(self, source: str, *, bos: str = "", eos: str = "", controls: Iterable[str] = ()) -> None:
        """Compile a template.

        Args:
            source: The template.
            bos: What it gets as `bos_token`.
            eos: What it gets as `eos_token`.
            controls: The spellings of the vocabulary's control tokens.

        Raises:
            TemplateInvalid: It is too long, not Jinja, or uses what is refused at once.
        """
        self._template = _compile(source)
        self._variables = {"bos_token": bos, "eos_token": eos, "tools": None, "documents": None}
        self._controls = tuple(filter(None, controls))
        self._splitter = PartSplitter(self._controls)

    @classmethod
    def of(cls, vocabulary: Vocabulary) -> "ChatTemplate":
        """Return a model's template.

        Raises:
            TemplateInvalid: The model has none, or one that is refused.
        """
        if vocabulary.chat_template is None:
            raise TemplateInvalid("the model has no chat template; it can only continue a plain prompt")
        return cls(
            vocabulary.chat_template,
            bos=vocabulary.spelling(vocabulary.bos_id),
            eos=vocabulary.spelling(vocabulary.eos_id),
            controls=vocabulary.by_spelling(*CONTROL_TYPES),
        )

    def render(
        self, messages: Sequence[Message], *, now: datetime, add_generation_prompt: bool = True
    ) -> RenderedPrompt:
        """Return the prompt for a chat.

        `now` is what the template takes for the time: that of the request's admission, so that a repeated
        render gives the same prompt.

        Raises:
            TemplateRejected: The template does not accept these messages.
            TemplateFailed: It broke.
            TemplateLimit: It took or made too much.
            AmbiguousPrompt: Control tokens and the users' text cannot be told apart.
        """
        for message in messages:
            if not _ROLE.fullmatch(message.role):
                raise TemplateRejected(f"{message.role!r} is not a role")
        variables = self._variables | {
            "add_generation_prompt": add_generation_prompt,
            "strftime_now": _clock(now),
        }

        def render(mark_content: Callable[[str], str]) -> str:
            marked = [{"role": message.role, "content": mark_content(message.content)} for message in messages]
            return _run(self._template, variables | {"messages": marked})

        return RenderedPrompt(tuple(self._separate(render, [message.content for message in messages])))

    def _separate(self, render: Callable[[Callable[[str], str]], str], contents: list[str]) -> Iterator[PromptPart]:
        plain = render(str)
        if len(plain) > MAX_PROMPT_CHARACTERS:
            raise TemplateLimit("the length of a prompt, in characters", MAX_PROMPT_CHARACTERS)
        mark = unused_mark([plain, *contents])
        if mark is not None:
            for mark_content in (
                partial(mark_all, mark=mark),
                partial(mark_lookalikes, mark=mark, tokens=self._controls),
            ):
                with suppress(TemplateError):  # only of the marks: the same messages without them have passed
                    marked = render(mark_content)
                    if marked.replace(mark, "") == plain:
                        return self._unmarked_parts(marked, mark)
        raise AmbiguousPrompt("the chat template rewrites a message that spells control tokens of the model")

    def _unmarked_parts(self, marked: str, mark: str) -> Iterator[PromptPart]:
        for part in self._splitter.split(marked):
            text = part.text if part.is_token else part.text.replace(mark, "")
            if text:
                yield PromptPart(text, part.is_token)


def _compile(source: str) -> jinja2.Template:
    if len(source) > MAX_SOURCE_CHARACTERS:
        raise TemplateInvalid(f"the chat template has {len(source)} characters, at most {MAX_SOURCE_CHARACTERS}")
    try:
        return TemplateEnvironment().from_string(source)
    except jinja2.TemplateSyntaxError as error:
        raise TemplateInvalid(f"the chat template is not valid in line {error.lineno}: {error.message}") from error
    except _REFUSALS as error:
        raise TemplateInvalid(f"the chat template cannot be compiled: {error}") from error


def _run(template: jinja2.Template, variables: Mapping[str, object]) -> str:
    with fresh_budget():
        try:
            return template.render(variables, raise_exception=_reject)
        except _BREAKS as error:
            raise TemplateFailed(f"the chat template failed: {type(error).__name__}: {error}") from error


def _reject(message: object = "") -> NoReturn:
    raise TemplateRejected(f"the chat template does not accept these messages: {to_text(message)}")


def _clock(now: datetime) -> Callable[[object], str]:
    return lambda layout: now.strftime(to_text(layout))
