"""What a request may take up, checked where its tokens are first counted. Errors name the field and the limit."""

from dataclasses import dataclass

from pipeline.errors import InvalidRequest
from pipeline.params import SamplingParams


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """Limits of one stack.

    Attributes:
        max_model_len: Tokens of prompt and output together.
        default_max_tokens: Output tokens of a request that does not say how many.
        vocab_size: Token ids are below it.
        longest_token_bytes: No token spells more.
    """

    max_model_len: int
    default_max_tokens: int
    vocab_size: int
    longest_token_bytes: int

    def check_length(self, field: str, num_bytes: int) -> None:
        """Refuse what cannot fit however well it tokenises, before an encoder is busy with it for seconds.

        Raises:
            InvalidRequest: The text is longer than max_model_len of the longest tokens.
        """
        if num_bytes > self.max_model_len * self.longest_token_bytes:
            raise InvalidRequest(
                field, f"has {num_bytes} bytes of text; at most {self.max_model_len - 1} tokens fit, which is far less"
            )

    def max_tokens(self, field: str, num_prompt_tokens: int, params: SamplingParams) -> int:
        """Output tokens the request may have; `field` is what the user called its prompt.

        Raises:
            InvalidRequest: The prompt is empty or too long, max_tokens does not fit, or a biased id does not exist.
        """
        room = self.max_model_len - num_prompt_tokens
        if num_prompt_tokens == 0:
            raise InvalidRequest(field, "is empty")
        if room < 1:
            raise InvalidRequest(
                field,
                f"has {num_prompt_tokens} tokens; at most {self.max_model_len - 1} fit, with one left for the output",
            )
        if params.max_tokens is not None and params.max_tokens > room:
            raise InvalidRequest(
                "max_tokens",
                f"is {params.max_tokens}, but after a prompt of {num_prompt_tokens} tokens only {room} of "
                f"{self.max_model_len} are left",
            )
        outside = [token_id for token_id in params.logit_bias if token_id >= self.vocab_size]
        if outside:
            raise InvalidRequest(
                "logit_bias", f"token id {outside[0]} does not exist; ids end at {self.vocab_size - 1}"
            )
        return params.max_tokens or min(self.default_max_tokens, room)
