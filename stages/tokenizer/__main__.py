"""Builds the tokenizer process and runs it."""

from functools import cache

from pipeline.settings import Settings
from pipeline.worker import run_worker
from stages.common.stage_process import run_stage, stage_process
from stages.engine.config import ModelConfig
from stages.gguf.digest import file_digest
from stages.gguf.file import GgufFile
from stages.gguf.model_files import resolve
from stages.text.chat_template import ChatTemplate
from stages.text.tokenizer import Tokenizer
from stages.text.vocabulary import Vocabulary
from stages.tokenizer.limits import RequestLimits
from stages.tokenizer.stage import TokenizerStage


async def serve(settings: Settings) -> None:
    """Tokenise until told to stop."""
    model_path = resolve(settings.model, settings.home)
    with GgufFile.open(model_path) as file:  # first: what is wrong with a foreign model is not its vocabulary
        trained_len = ModelConfig.from_gguf(file).max_model_len
    vocabulary = Vocabulary.from_gguf(model_path)
    limits = RequestLimits(
        max_model_len=min(settings.max_model_len or trained_len, trained_len),
        default_max_tokens=settings.default_max_tokens,
        vocab_size=len(vocabulary.tokens),
        longest_token_bytes=max(len(token.encode()) for token in vocabulary.tokens),
    )
    # A model without a template, or with a bad one, can still continue plain prompts.
    template = cache(lambda: ChatTemplate.of(vocabulary))
    stage = TokenizerStage(settings.model, Tokenizer(vocabulary), template, limits)
    async with stage_process("tokenizer", settings, {"model": file_digest(model_path)}) as process:
        await run_worker(stage, process.transport, process.leases, process.stopping)


if __name__ == "__main__":
    run_stage("tokenizer", serve)
