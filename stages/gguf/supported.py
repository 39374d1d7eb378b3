"""Which GGUF files hold a model that can be served, judged by architecture and tensor formats alone.

The one list of both. What a model of a served architecture must look like in detail is the engine's to say.
"""

from typing import Final

from stages.gguf.errors import UnsupportedModelError
from stages.gguf.file import GgufFile

ARCHITECTURES: Final = ("llama",)
TENSOR_FORMATS: Final = ("F32", "Q4_1", "Q8_0")  # those the engine's weight loader is tested with


def require_supported(file: GgufFile) -> str:
    """Return the architecture of a file that can be served.

    Raises:
        UnsupportedModelError: Another architecture, no tensors, or a tensor in another format.
    """
    architecture = file.value("general.architecture")
    if not isinstance(architecture, str) or architecture not in ARCHITECTURES:
        raise UnsupportedModelError(
            file.path,
            f"holds a model of architecture {architecture!r:.80}; only {', '.join(ARCHITECTURES)} can be served",
        )
    if not file.tensors:
        raise UnsupportedModelError(file.path, "holds no tensors")
    for tensor in file.tensors.values():
        if tensor.type_name not in TENSOR_FORMATS:
            raise UnsupportedModelError(
                file.path, f"tensor {tensor.name} is {tensor.type_name}; only {', '.join(TENSOR_FORMATS)} can be served"
            )
    return architecture
