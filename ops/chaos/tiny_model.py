"""A whole Llama model of random weights in a few kilobytes: it computes, and its vocabulary is the 256 bytes.

A real GGUF file that every stage reads as any other. Knows nothing about who uses it: `sluice chaos`, and tests.
"""

from pathlib import Path

import gguf
import numpy as np

from stages.text.byte_alphabet import BYTE_OF

HIDDEN, HEADS, KV_HEADS, FEED_FORWARD, LAYERS = 64, 4, 2, 128, 2
HEAD_DIM = HIDDEN // HEADS
# One merge, because a GGUF file cannot hold an empty list.
TOKENS = [*sorted(BYTE_OF, key=BYTE_OF.__getitem__), "ab"]


def write_tiny_llama(path: Path, seed: int = 0, chat_template: str | None = None, num_layers: int = LAYERS) -> Path:
    """Write the model; another seed gives other weights. Without a template it only continues plain prompts."""
    generator = np.random.default_rng(seed)
    writer = gguf.GGUFWriter(path, "llama")
    _add_shape(writer, num_layers)
    _add_vocabulary(writer)
    if chat_template is not None:
        writer.add_chat_template(chat_template)
    for name, shape in _shapes(num_layers).items():
        tensor = generator.normal(0, 1 / np.sqrt(shape[-1]), shape) if len(shape) > 1 else np.ones(shape)
        writer.add_tensor(f"{name}.weight", tensor.astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_shape(writer: gguf.GGUFWriter, num_layers: int) -> None:
    writer.add_block_count(num_layers)
    writer.add_context_length(1024)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(FEED_FORWARD)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)


def _add_vocabulary(writer: gguf.GGUFWriter) -> None:
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(TOKENS)
    writer.add_token_types([gguf.TokenType.NORMAL] * len(TOKENS))
    writer.add_token_merges(["a b"])


def _shapes(num_layers: int) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {"token_embd": (len(TOKENS), HIDDEN), "output_norm": (HIDDEN,)}
    for layer in range(num_layers):
        shapes |= {
            f"blk.{layer}.attn_norm": (HIDDEN,),
            f"blk.{layer}.attn_q": (HIDDEN, HIDDEN),
            f"blk.{layer}.attn_k": (KV_HEADS * HEAD_DIM, HIDDEN),
            f"blk.{layer}.attn_v": (KV_HEADS * HEAD_DIM, HIDDEN),
            f"blk.{layer}.attn_output": (HIDDEN, HIDDEN),
            f"blk.{layer}.ffn_norm": (HIDDEN,),
            f"blk.{layer}.ffn_gate": (FEED_FORWARD, HIDDEN),
            f"blk.{layer}.ffn_up": (FEED_FORWARD, HIDDEN),
            f"blk.{layer}.ffn_down": (HIDDEN, FEED_FORWARD),
        }
    return shapes
