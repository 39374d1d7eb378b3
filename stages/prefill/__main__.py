"""Builds the prefill process and runs it."""

import socket

from kv_store.pool import FilePool
from pipeline.settings import Settings
from stages.common.stage_process import run_engine_stage, stage_process
from stages.engine.config import ModelConfig
from stages.gguf.file import GgufFile
from stages.gguf.model_files import resolve
from stages.text.tokenizer import Tokenizer
from stages.text.vocabulary import Vocabulary


async def serve(settings: Settings, heartbeat: socket.socket) -> None:
    """Prefill until told to stop."""
    # Here and not above: numba and torch read their environment while they are imported, which is set by now.
    from stages.engine.engine import Engine
    from stages.engine.kv_cache import pages_for
    from stages.prefill.handover import Handover
    from stages.prefill.stage import PrefillLimits, PrefillStage

    model_path = resolve(settings.model, settings.home)
    with GgufFile.open(model_path) as file:
        trained_len = ModelConfig.from_gguf(file).max_model_len
    # One prompt is in the engine at a time, so the longest one is all the cache has to hold.
    num_pages = pages_for(min(settings.max_model_len or trained_len, trained_len))
    with (
        Engine(model_path, settings.kv_codec, num_pages, settings.engine_threads, settings.weight_cache) as engine,
        FilePool.open(settings.pool_dir, settings.kv_pool_bytes) as pool,
    ):
        handover = Handover(
            engine,
            pool,
            chunk_tokens=settings.chunk_tokens,
            seal=settings.seal_in_prefill,
            compression="zstd" if settings.zstd_kv else "none",
        )
        parts = engine.fingerprint.parts()
        async with stage_process("prefill", settings, parts, pool.pool_id, heartbeat=heartbeat) as process:
            stage = PrefillStage(
                process.transport,
                process.leases,
                engine,
                pool,
                Tokenizer(Vocabulary.from_gguf(model_path)),
                handover,
                PrefillLimits(settings.chunk_tokens, settings.max_decode_queue, settings.keep_kv),
            )
            await stage.run(process.stopping)


if __name__ == "__main__":
    run_engine_stage("prefill", serve)
