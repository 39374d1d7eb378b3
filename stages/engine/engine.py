"""An engine ready to serve: model, cache, fingerprint, and the one thread that may compute.

Owns that thread: numpy, torch and numba release the interpreter lock, so the event loop that feeds the engine stays
awake while it computes. Page bookkeeping (allocate, free) belongs to the event loop's thread, never to this one.
"""

import asyncio
import ctypes
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import ParamSpec, TypeVar

import numba
import torch

from kv_store.codecs.registry import codec_named
from stages.engine.config import ModelConfig
from stages.engine.fingerprint import Fingerprint, fingerprint
from stages.engine.gguf_weights import GgufWeights
from stages.engine.kv_cache import PagedKvCache
from stages.engine.model import Model
from stages.engine.weight_cache import load_or_fold
from stages.gguf.digest import file_digest
from stages.gguf.file import GgufFile

P = ParamSpec("P")
T = TypeVar("T")

THREAD_NAME = "engine"
_PR_SET_NAME = 15


class Engine:
    """Use as a context manager; leaving it ends the thread."""

    def __init__(self, model_path: Path, codec_name: str, num_pages: int, num_threads: int, weight_cache: Path) -> None:
        """Load the model and compute its fingerprint; takes seconds.

        Raises:
            GgufError: The file cannot be read, or holds a model this engine cannot run.
        """
        self._thread = ThreadPoolExecutor(1, THREAD_NAME, initializer=_use_threads, initargs=(num_threads,))
        codec = codec_named(codec_name)
        self.model, self.fingerprint = self._thread.submit(_load, model_path, codec_name, weight_cache).result()
        self.config: ModelConfig = self.model.config
        self.codec = codec
        self.cache = PagedKvCache(self.config.kv_layout, codec, num_pages)

    async def compute(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a function in the engine's thread; calls are served one after the other."""
        future = self._thread.submit(function, *args, **kwargs)
        return await asyncio.wrap_future(future)

    def __enter__(self) -> "Engine":
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.shutdown(wait=True, cancel_futures=True)


def _use_threads(num_threads: int) -> None:
    """Both libraries keep the setting per calling thread, so the engine's thread makes it."""
    if sys.platform == "linux":  # the threads that it starts inherit the name: CPU time in /proc is that of computing
        ctypes.CDLL(None).prctl(_PR_SET_NAME, THREAD_NAME.encode(), 0, 0, 0)
    torch.set_num_threads(num_threads)
    numba.set_num_threads(min(num_threads, numba.get_num_threads()))  # a new thread has as many as there are


def _load(model_path: Path, codec_name: str, weight_cache: Path) -> tuple[Model, Fingerprint]:
    model, digest = load_model(model_path, weight_cache)
    return model, fingerprint(digest, model, codec_named(codec_name))


def load_model(model_path: Path, weight_cache: Path) -> tuple[Model, str]:
    """The model, and the SHA-256 of its file.

    Raises:
        GgufError: The file cannot be read, or holds a model this engine cannot run.
    """
    with GgufFile.open(model_path) as file:
        config = ModelConfig.from_gguf(file)
        digest = file_digest(model_path)
        return Model(config, load_or_fold(GgufWeights(file, config), config, digest, weight_cache)), digest
