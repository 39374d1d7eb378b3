"""One request inside an engine: its tokens, pages and how far it has come. Plain bookkeeping, no tensors."""

from collections.abc import Sequence as Tokens
from dataclasses import dataclass, field
from typing import Literal

from stages.engine.sampling import SampledToken, SamplingSpec, TokenHistory
from stages.engine.speculation.drafter import Drafter

EndReason = Literal["stop", "length"]


@dataclass(slots=True)
class Sequence:
    """State of a request while it decodes.

    Attributes:
        prompt_token_ids: Never changes.
        spec: How tokens are chosen.
        max_tokens: Output tokens at most.
        end_token_ids: Tokens that end the text; empty with ignore_eos.
        block_table: Pages it owns, enough for prompt and max_tokens.
        num_computed_tokens: Positions whose KV is in the pages.
        output_token_ids: What has been chosen.
        drafter: Where drafts come from, or None without speculation.
        num_recomputed_tokens: Positions computed here that somebody had computed before.
    """

    prompt_token_ids: Tokens[int]
    spec: SamplingSpec
    max_tokens: int
    end_token_ids: frozenset[int]
    block_table: list[int]
    num_computed_tokens: int = 0
    output_token_ids: list[int] = field(default_factory=list)
    drafter: Drafter | None = None
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_recomputed_tokens: int = 0
    _history: TokenHistory | None = None

    @property
    def history(self) -> TokenHistory:
        """Tokens that penalties look at."""
        if self._history is None:
            self._history = TokenHistory.of(self.prompt_token_ids, self.output_token_ids)
        return self._history

    @property
    def num_tokens(self) -> int:
        """Prompt and output so far."""
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    def token_ids(self, start: int, end: int) -> list[int]:
        """The tokens at positions start to end - 1, of prompt and output."""
        num_prompt = len(self.prompt_token_ids)
        of_prompt = self.prompt_token_ids[start:end]
        return [*of_prompt, *self.output_token_ids[max(start - num_prompt, 0) : max(end - num_prompt, 0)]]

    def append(self, sampled: SampledToken) -> EndReason | None:
        """Add a chosen token; returns why the sequence ends with it, or None."""
        if self._history is not None:
            self._history.append(sampled.token_id)
        self.output_token_ids.append(sampled.token_id)
        if self.drafter is not None:
            self.drafter.extend([sampled.token_id])
        if sampled.token_id in self.end_token_ids:
            return "stop"
        return "length" if len(self.output_token_ids) >= self.max_tokens else None
