"""Builds the decode process and runs it."""

import socket

from kv_store.pool import FilePool
from pipeline.settings import Settings
from stages.common.stage_process import run_engine_stage, stage_process
from stages.gguf.model_files import resolve
from stages.text.tokenizer import Tokenizer
from stages.text.vocabulary import Vocabulary


async def serve(settings: Settings, heartbeat: socket.socket) -> None:
    """Decode until told to stop."""
    # Here and not above: numba and torch read their environment while they are imported, which is set by now.
    from stages.decode.admission import Admission
    from stages.decode.checkpoints import Checkpoints
    from stages.decode.stage import DecodeLimits, DecodeStage
    from stages.engine.engine import Engine

    model_path = resolve(settings.model, settings.home)
    tokenizer = Tokenizer(Vocabulary.from_gguf(model_path))
    with (
        Engine(
            model_path, settings.kv_codec, settings.num_pages, settings.engine_threads, settings.weight_cache
        ) as engine,
        FilePool.open(settings.pool_dir, settings.kv_pool_bytes) as pool,
    ):
        capacity = {"slots": settings.max_num_seqs, "pages": settings.num_pages}
        parts = engine.fingerprint.parts()
        async with stage_process(
            "decode", settings, parts, pool.pool_id, capacity=capacity, heartbeat=heartbeat
        ) as process:
            admission = Admission(
                process.transport,
                process.leases,
                engine,
                pool,
                tokenizer,
                process.counters,
                keep_kv=settings.keep_kv,
            )
            compression = "zstd" if settings.zstd_kv else "none"
            stage = DecodeStage(
                process.transport,
                process.leases,
                engine,
                admission,
                Checkpoints(engine, pool, admission.format, compression),
                process.counters,
                DecodeLimits(settings.max_num_seqs, settings.num_speculative_tokens),
            )
            await stage.run(process.stopping)


if __name__ == "__main__":
    run_engine_stage("decode", serve)
