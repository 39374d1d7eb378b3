"""Makes token_ids.json and logits.npz: what the model's tokenizer and weights give elsewhere.

Runs in an environment of its own, outside the project, whose packages are never a dependency of it:

    pip install torch==2.13.0 gguf==0.19.0 transformers==5.24.0 accelerate regex
    python tests/reference/make_reference.py MODEL.gguf

**Weights.** transformers reads the very GGUF file that Sluice serves and dequantises it (Q4_1 and Q8_0) to
fp32. Here every tensor is compared with gguf's own dequantisation, the row permutation of Q and K undone.

**Tokens.** transformers ignores `tokenizer.ggml.pre`: its conversion leaves out the splitting of digits, so
that "  12" becomes other tokens than in the tokenizer the model was trained with (tokenizer.json of
HuggingFaceTB/SmolLM2-135M-Instruct: Digits with individual_digits, then ByteLevel; in llama.cpp the
pre-tokenizer "smollm": \\p{N}, then GPT-2's expression). The published definition is right. So the ids come
from published_tokenizer.py, which follows it with the regex package and plain merging, and must equal those
of transformers once its tokenizer has the Digits step in front. Each text says whether transformers agreed
without it.
"""

# The packages are those of the other environment.
# pyright: reportMissingImports=false, reportUnknownMemberType=false, reportAttributeAccessIssue=false

import hashlib
import json
import re
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import tokenizers
import torch
import transformers
from gguf.quants import dequantize
from inputs import CHATS, PROMPTS, TEXTS
from published_tokenizer import Published
from tokenizers.pre_tokenizers import Digits
from tokenizers.pre_tokenizers import Sequence as PreTokenizers

HERE = Path(__file__).parent
VOCABULARY_STEP = 97  # every 97th token: 507 of 49,152
NUM_POSITIONS = 2
NUM_TOP = 20


def main(path: Path) -> None:
    """Write both files beside this script."""
    torch.set_num_threads(1)
    reader = gguf.GGUFReader(path)
    source = {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name}
    converted = transformers.AutoTokenizer.from_pretrained(**source)
    published = Published(reader)
    write_token_ids(converted, published, path)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        **source, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    check_weights(model, reader)
    write_logits(model, [published.ids(prompt, allow_special=True) for prompt in PROMPTS])


def write_token_ids(converted: Any, published: "Published", path: Path) -> None:
    """Write the ids of all texts and chats; they must be the same from two implementations."""
    as_converted = {name: plain_ids(converted, text) for name, text in TEXTS.items()}
    backend = converted.backend_tokenizer
    backend.pre_tokenizer = PreTokenizers([Digits(individual_digits=True), backend.pre_tokenizer])
    texts = []
    for name, text in TEXTS.items():
        ids, special_ids = published.ids(text, allow_special=False), published.ids(text, allow_special=True)
        assert ids == plain_ids(converted, text), name
        assert special_ids == converted.encode(text, add_special_tokens=False), name
        agrees = as_converted[name] == ids
        entry = {"name": name, "text": text, "ids": ids, "ids_with_special": special_ids}
        texts.append(entry | {"transformers_agrees": agrees})
    content = {
        "model_sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
        "made_with": {"transformers": transformers.__version__, "tokenizers": tokenizers.__version__},
        "texts": texts,
        "chats": [chat_entry(converted, chat) for chat in CHATS],
    }
    # One line per list of ids, all of it ASCII.
    lines = re.sub(r"\[\s+\d[\d,\s]*\]", lambda ids: re.sub(r"\s+", "", ids[0]), json.dumps(content, indent=1))
    (HERE / "token_ids.json").write_text(lines + "\n", encoding="ascii")


def plain_ids(tokenizer: Any, text: str) -> list[int]:
    """Return the ids of a text in which no control token is recognised."""
    return tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True)


def chat_entry(tokenizer: Any, chat: tuple[tuple[str, str], ...]) -> dict[str, Any]:
    """Return one chat with its prompt and the prompt's ids."""
    messages = [{"role": role, "content": content} for role, content in chat]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return {"messages": messages, "prompt": text, "ids": tokenizer.encode(text, add_special_tokens=False)}


def check_weights(model: Any, reader: gguf.GGUFReader) -> None:
    """Compare every weight with gguf's dequantisation, to the last bit."""
    state = model.state_dict()
    heads = {"attn_q": model.config.num_attention_heads, "attn_k": model.config.num_key_value_heads}
    for tensor in reader.tensors:
        expected = dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        kind = tensor.name.split(".")[-2]
        if kind in heads:
            rows, columns = expected.shape
            pairs = expected.reshape(heads[kind], rows // heads[kind] // 2, 2, columns)
            expected = pairs.swapaxes(1, 2).reshape(rows, columns)
        actual = state[transformers_name(tensor.name)].numpy()
        assert np.array_equal(actual, expected), tensor.name


def transformers_name(name: str) -> str:
    """Return what a tensor of a GGUF file is called in transformers."""
    parts = {
        "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj",
        "attn_output": "self_attn.o_proj",
        "attn_norm": "input_layernorm",
        "ffn_norm": "post_attention_layernorm",
        "ffn_gate": "mlp.gate_proj",
        "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj",
        "token_embd": "model.embed_tokens",
        "output_norm": "model.norm",
    }
    *block, kind, _ = name.split(".")
    prefix = f"model.layers.{block[1]}." if block else ""
    return f"{prefix}{parts[kind]}.weight"


def write_logits(model: Any, prompts: list[list[int]]) -> None:
    """Write logits.npz, as README.md describes it."""
    vocabulary_ids = np.arange(0, model.config.vocab_size, VOCABULARY_STEP, dtype=np.int32)
    arrays = {"vocabulary_ids": vocabulary_ids, "num_prompts": np.int32(len(prompts))}
    for index, ids in enumerate(prompts):
        with torch.no_grad():
            logits = model(torch.tensor([ids])).logits[0, -NUM_POSITIONS:]  # [2, V]
        top = logits.topk(NUM_TOP)
        arrays |= {
            f"token_ids_{index}": np.array(ids, dtype=np.int32),
            f"logits_{index}": logits[:, torch.from_numpy(vocabulary_ids).long()].numpy(),
            f"argmax_{index}": logits.argmax(dim=-1).numpy().astype(np.int32),
            f"logsumexp_{index}": logits.double().logsumexp(dim=-1).numpy(),
            f"top_ids_{index}": top.indices.numpy().astype(np.int32),
            f"top_logits_{index}": top.values.numpy(),
        }
    np.savez_compressed(HERE / "logits.npz", allow_pickle=False, **arrays)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
