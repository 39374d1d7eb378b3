"""The tokenizer as a map from one message to the next: chat or prompt in, token ids out.

A request that can never be served ends here, with an error that names the field. Knows nothing about tensors.
"""

import asyncio
from collections.abc import Callable
from datetime import UTC, datetime

from pipeline import wire
from pipeline.boundaries import TOKENIZED, TOKENIZER_CLAIMED
from pipeline.clock import now_us
from pipeline.errors import InvalidRequest
from pipeline.messages import GenerateRequest, TokenizedPrompt
from pipeline.transport import Delivery, Outcome, Publish, Transaction
from stages.text.chat_template import ChatTemplate
from stages.text.errors import TextError
from stages.text.tokenizer import Tokenizer
from stages.tokenizer.limits import RequestLimits


class TokenizerStage:
    """Serves one model."""

    name = "tokenizer"

    def __init__(
        self, model: str, tokenizer: Tokenizer, template: Callable[[], ChatTemplate], limits: RequestLimits
    ) -> None:
        """Wire it up.

        Args:
            model: The name requests must ask for.
            tokenizer: Encodes.
            template: Gives the model's chat template, or says why there is none.
            limits: What a request may take up.
        """
        self._model = model
        self._tokenizer = tokenizer
        self._template = template
        self._limits = limits

    async def handle(self, delivery: Delivery) -> Transaction:
        """Encode one request.

        Raises:
            WireError: The payload is not a GenerateRequest.
            InvalidRequest: It can never be served; the harness ends it with that error.
        """
        by = delivery.consumer
        request = wire.unpack(delivery.payload, GenerateRequest)
        if not request.stamps:  # templates may print the date, and it must be the same in every try
            raise InvalidRequest("stamps", "must begin with the moment at which the request was submitted")
        request = request.stamped(TOKENIZER_CLAIMED, now_us(), by)
        tokenized = (await asyncio.to_thread(self._tokenize, request)).stamped(TOKENIZED, now_us(), by)
        publish = Publish("prefill", request.priority, wire.pack(tokenized))
        return Transaction(delivery, request.request_id, request.attempt, (publish,), ack=True)

    async def give_up(self, delivery: Delivery) -> None:
        """Without token ids nobody can go on: the request fails."""

    async def settled(self, transaction: Transaction, outcome: Outcome) -> None:
        """Nothing outside the transaction to clean up."""

    def _tokenize(self, request: GenerateRequest) -> TokenizedPrompt:
        if request.model != self._model:
            raise InvalidRequest("model", f"is {request.model!r}; this stack serves {self._model!r}")
        field = "prompt" if request.messages is None else "messages"
        texts = [request.prompt] if request.prompt is not None else [turn.content for turn in request.messages or ()]
        self._limits.check_length(field, sum(len(text.encode(errors="surrogatepass")) for text in texts))
        try:
            prompt_token_ids = self._encode(request)
        except TextError as error:
            raise InvalidRequest(field, str(error)) from error
        max_tokens = self._limits.max_tokens(field, len(prompt_token_ids), request.params)
        return TokenizedPrompt(
            request_id=request.request_id,
            attempt=request.attempt,
            priority=request.priority,
            prompt_token_ids=tuple(prompt_token_ids),
            params=request.params,
            max_tokens=max_tokens,
            speculate=request.speculate,
            stamps=request.stamps,
        )

    def _encode(self, request: GenerateRequest) -> list[int]:
        if request.messages is None:
            assert request.prompt is not None, "a request has a prompt or messages"
            return self._tokenizer.with_bos(self._tokenizer.encode(request.prompt, allow_special=False))
        # Templates may print the date: the one of admission, so that a second try renders the same prompt.
        admitted = datetime.fromtimestamp(request.stamps[0].at_us / 1e6, UTC)
        rendered = self._template().render(request.messages, now=admitted)
        return self._tokenizer.with_bos(self._tokenizer.encode_parts(rendered.parts))
