"""What a Llama-family model is made of, read from GGUF metadata.

The one place that knows the names and quirks of model metadata. Knows nothing about tensors' contents.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from gguf import GGUFReader

from kv_store.layout import KvLayout


class UnsupportedModelError(ValueError):
    """The file is a model, but not one this engine can run; the message says what is missing."""


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
    def from_gguf(cls, reader: GGUFReader) -> "ModelConfig":
        """Read the configuration.

        Raises:
            UnsupportedModelError: Another architecture, a missing field, or a shape the kernels cannot take.
        """
        fields = {name: field.contents() for name, field in reader.fields.items() if name.startswith(_WANTED)}
        architecture = fields.get("general.architecture")
        if architecture != "llama":
            raise UnsupportedModelError(f"architecture is {architecture!r}; this engine runs 'llama'")
        names = {tensor.name for tensor in reader.tensors}
        embedding = next((t for t in reader.tensors if t.name == "token_embd.weight"), None)
        if embedding is None:
            raise UnsupportedModelError("tensor token_embd.weight is missing")
        hidden_size = _integer(fields, "llama.embedding_length")
        num_heads = _integer(fields, "llama.attention.head_count")
        config = cls(
            num_layers=_integer(fields, "llama.block_count"),
            hidden_size=hidden_size,
            num_heads=num_heads,
            num_kv_heads=int(fields.get("llama.attention.head_count_kv", num_heads)),
            head_dim=int(fields.get("llama.attention.key_length", hidden_size // num_heads)),
            intermediate_size=_integer(fields, "llama.feed_forward_length"),
            vocab_size=int(embedding.shape[1]),
            rms_norm_eps=float(_field(fields, "llama.attention.layer_norm_rms_epsilon")),
            rope_theta=float(fields.get("llama.rope.freq_base", 10_000.0)),
            max_model_len=_integer(fields, "llama.context_length"),
            tied_embedding="output.weight" not in names,
        )
        config._check(fields, names)
        return config

    def _check(self, fields: Mapping[str, object], names: set[str]) -> None:
        if self.num_heads % self.num_kv_heads:
            raise UnsupportedModelError(f"{self.num_heads} query heads do not divide over {self.num_kv_heads} kv heads")
        if self.head_dim & (self.head_dim - 1):
            raise UnsupportedModelError(f"head_dim is {self.head_dim}; the kernels need a power of two")
        if int(str(fields.get("llama.rope.dimension_count", self.head_dim))) != self.head_dim:
            raise UnsupportedModelError("only part of each head is rotated; this engine rotates all of it")
        scaled = [name for name in fields if name.startswith("llama.rope.scaling")]
        scaled += [name for name in names if name.startswith("rope_")]
        if scaled:
            raise UnsupportedModelError(f"rotary scaling is not supported: {', '.join(sorted(scaled))}")


_WANTED = ("general.architecture", "llama.")


def open_gguf(path: Path) -> GGUFReader:
    """Map a GGUF file; tensors are read when used."""
    return GGUFReader(path)


def _field(fields: Mapping[str, object], name: str) -> float:
    if name not in fields:
        raise UnsupportedModelError(f"metadata field {name} is missing")
    return float(str(fields[name]))


def _integer(fields: Mapping[str, object], name: str) -> int:
    return int(_field(fields, name))
