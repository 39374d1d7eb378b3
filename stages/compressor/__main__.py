"""Builds the compressor process and runs it."""

from kv_store.pool import FilePool
from pipeline.settings import Settings
from pipeline.worker import run_worker
from stages.common.stage_process import run_stage, stage_process
from stages.compressor.stage import CompressorStage
from stages.engine.config import ModelConfig
from stages.gguf.digest import file_digest
from stages.gguf.file import GgufFile
from stages.gguf.model_files import resolve


async def serve(settings: Settings) -> None:
    """Compress until told to stop."""
    model_path = resolve(settings.model, settings.home)
    with GgufFile.open(model_path) as file:
        layout = ModelConfig.from_gguf(file).kv_layout
    parts = {"layout": layout.fingerprint(), "model": file_digest(model_path)}
    with FilePool.open(settings.pool_dir, settings.kv_pool_bytes) as pool:
        async with stage_process("compressor", settings, parts, pool.pool_id) as process:
            stage = CompressorStage(pool, layout, "zstd" if settings.zstd_kv else "none")
            await run_worker(stage, process.transport, process.leases, process.stopping)


if __name__ == "__main__":
    run_stage("compressor", serve)
