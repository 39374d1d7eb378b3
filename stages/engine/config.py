"""What a Llama-family model is made of, read from GGUF metadata.

The one place that knows the names and quirks of model metadata, and which tensors such a model has. Knows nothing
about tensors' contents.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from kv_store.layout import KvLayout
from stages.gguf.errors import UnsupportedModelError
from stages.gguf.file import GgufFile
from stages.gguf.supported import require_supported

_PREFIX = "llama."


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Shape of one model.

    Attributes:
        num_layers: Transformer blocks.
        hidden_size: Width of the residual stream.
        num_heads: Query heads.
        num_kv_heads: Key/value heads; num_heads is a multiple of it.
        head_dim: Width of one head.
        intermediate_size: Width inside the feed-forward block.
        vocab_size: Rows of the embedding.
        rms_norm_eps: Added to the mean square before the root.
        rope_theta: Base of the rotary frequencies.
        max_model_len: Positions the model was trained for, in tokens.
        tied_embedding: Whether the head is the embedding.
    """

    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    rms_norm_eps: float
    rope_theta: float
    max_model_len: int
    tied_embedding: bool

    @property
    def kv_layout(self) -> KvLayout:
        """The part of the shape that KV blobs depend on."""
        return KvLayout(self.num_layers, self.num_kv_heads, self.head_dim)

    @property
    def num_queries_per_kv(self) -> int:
        """Query heads that share one kv head."""
        return self.num_heads // self.num_kv_heads

    @classmethod
    def from_gguf(cls, file: GgufFile) -> "ModelConfig":
        """Read the configuration, and refuse a file whose tensors are not those of such a model.

        Raises:
            UnsupportedModelError: Another architecture, a missing field or tensor, or a shape the kernels cannot take.
        """
        require_supported(file)
        fields = _Fields(file)
        embedding = file.tensors.get("token_embd.weight")
        if embedding is None:
            raise UnsupportedModelError(file.path, "tensor token_embd.weight is missing")
        hidden_size = fields.count("embedding_length")
        num_heads = fields.count("attention.head_count")
        config = cls(
            num_layers=fields.count("block_count"),
            hidden_size=hidden_size,
            num_heads=num_heads,
            num_kv_heads=fields.count("attention.head_count_kv", num_heads),
            head_dim=fields.count("attention.key_length", hidden_size // num_heads),
            intermediate_size=fields.count("feed_forward_length"),
            vocab_size=embedding.shape[0],
            rms_norm_eps=fields.real("attention.layer_norm_rms_epsilon"),
            rope_theta=fields.real("rope.freq_base", 10_000.0),
            max_model_len=fields.count("context_length"),
            tied_embedding="output.weight" not in file.tensors,
        )
        config._check_shape(fields)
        config._check_rotation(fields)
        config._check_tensors(file)
        return config

    def _check_shape(self, fields: "_Fields") -> None:
        if self.num_heads % self.num_kv_heads:
            raise fields.unsupported(f"{self.num_heads} query heads do not divide over {self.num_kv_heads} kv heads")
        if self.head_dim < 8 or self.head_dim & (self.head_dim - 1):
            raise fields.unsupported(f"head_dim is {self.head_dim}; the kernels need a power of two from 8 on")

    def _check_rotation(self, fields: "_Fields") -> None:
        if fields.count("rope.dimension_count", self.head_dim) != self.head_dim:
            raise fields.unsupported("only part of each head is rotated; this engine rotates all of it")
        scaled = [name for name in fields.file.keys if name.startswith(f"{_PREFIX}rope.scaling")]
        scaled += [name for name in fields.file.tensors if name.startswith("rope_")]
        if scaled:
            raise fields.unsupported(f"rotary scaling is not supported: {', '.join(sorted(scaled))}")

    def _check_tensors(self, file: GgufFile) -> None:
        """All that the engine reads is there, and nothing that it would leave out, such as a bias."""
        left = set(file.tensors)
        for name, shape in self._tensor_shapes():
            tensor = file.tensors.get(name)
            if tensor is None:
                raise UnsupportedModelError(file.path, f"tensor {name} is missing")
            if tensor.shape != shape:
                raise UnsupportedModelError(file.path, f"tensor {name} has shape {tensor.shape}, expected {shape}")
            left.discard(name)
        if left:
            raise UnsupportedModelError(
                file.path, f"holds {len(left)} tensors that this engine would not use, such as {min(left)}"
            )

    def _tensor_shapes(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Name and [out, in] of each tensor; lazily, because a damaged file may claim any number of layers."""
        hidden, wide = self.hidden_size, self.intermediate_size
        queries, keys = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        yield "token_embd.weight", (self.vocab_size, hidden)
        yield "output_norm.weight", (hidden,)
        if not self.tied_embedding:
            yield "output.weight", (self.vocab_size, hidden)
        for layer in range(self.num_layers):
            block = f"blk.{layer}"
            yield f"{block}.attn_norm.weight", (hidden,)
            yield f"{block}.attn_q.weight", (queries, hidden)
            yield f"{block}.attn_k.weight", (keys, hidden)
            yield f"{block}.attn_v.weight", (keys, hidden)
            yield f"{block}.attn_output.weight", (hidden, queries)
            yield f"{block}.ffn_norm.weight", (hidden,)
            yield f"{block}.ffn_gate.weight", (wide, hidden)
            yield f"{block}.ffn_up.weight", (wide, hidden)
            yield f"{block}.ffn_down.weight", (hidden, wide)


@dataclass(frozen=True, slots=True)
class _Fields:
    """The metadata with checked access: what is not as expected becomes an error that names the field."""

    file: GgufFile

    def unsupported(self, problem: str) -> UnsupportedModelError:
        return UnsupportedModelError(self.file.path, problem)

    def count(self, name: str, default: int | None = None) -> int:
        value = self._number(name, default)
        if not isinstance(value, int) or value < 1:
            raise self.unsupported(f"metadata field {_PREFIX}{name} is {value}, expected a whole number of at least 1")
        return value

    def real(self, name: str, default: float | None = None) -> float:
        value = float(self._number(name, default))
        if not (math.isfinite(value) and value > 0):
            raise self.unsupported(f"metadata field {_PREFIX}{name} is {value}, expected a number above 0")
        return value

    def _number(self, name: str, default: float | None) -> float:
        value = self.file.value(_PREFIX + name)
        if value is None:
            value = default
        if value is None:
            raise self.unsupported(f"metadata field {_PREFIX}{name} is missing")
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.unsupported(f"metadata field {_PREFIX}{name} is not a single number")  # one per layer, say
        return value
