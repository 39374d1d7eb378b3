"""What the tests of the text code share: the default model's vocabulary, and a tiny one made here."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from gguf import GGUFWriter

from stages.text.byte_alphabet import BYTE_OF
from stages.text.tokenizer import Tokenizer
from stages.text.vocabulary import TokenType, Vocabulary

CONTROLS = ("<|end|>", "<|start|>", "<|endoftext|>")
WriteGguf = Callable[[Callable[[GGUFWriter], None]], Path]


@pytest.fixture(scope="session")
def model_path() -> Path:
    """The GGUF file of the default model; these tests never skip, for they hold the tokenizer to its promise."""
    stated = os.environ.get("SLUICE_TEST_MODEL")
    home = Path(os.environ.get("SLUICE_HOME") or "~/.sluice").expanduser()
    path = Path(stated) if stated else home / "models" / "smollm2-135m-instruct.gguf"
    if not path.is_file():
        pytest.fail(f"the test model is not at {path}: run `make setup`, or set SLUICE_TEST_MODEL", pytrace=False)
    return path


@pytest.fixture(scope="session")
def vocabulary(model_path: Path) -> Vocabulary:
    return Vocabulary.from_gguf(model_path)


@pytest.fixture(scope="session")
def tokenizer(vocabulary: Vocabulary) -> Tokenizer:
    return Tokenizer(vocabulary)


@pytest.fixture(scope="session")
def tiny_vocabulary() -> Vocabulary:
    """All 256 bytes, one merge, one shorthand and three control tokens."""
    normal = (*BYTE_OF, "he")
    tokens = (*normal, "<think>", *CONTROLS)
    num_other = len(tokens) - len(normal)
    return Vocabulary(
        model="gpt2",
        pre="smollm",
        tokens=tokens,
        types=(TokenType.NORMAL,) * len(normal) + (TokenType.USER_DEFINED,) + (TokenType.CONTROL,) * (num_other - 1),
        merges=(("h", "e"),),
        bos_id=tokens.index("<|start|>"),
        eos_id=tokens.index("<|end|>"),
        end_of_generation_ids=frozenset({tokens.index("<|end|>")}),
        control_ids=frozenset(map(tokens.index, CONTROLS)),
        add_bos=True,
        chat_template=None,
    )


@pytest.fixture(scope="session")
def tiny_tokenizer(tiny_vocabulary: Vocabulary) -> Tokenizer:
    return Tokenizer(tiny_vocabulary)


@pytest.fixture
def write_gguf(tmp_path: Path) -> WriteGguf:
    """Return a function that writes a GGUF file with a tiny vocabulary, after its argument has changed it."""

    def write(change: Callable[[GGUFWriter], None]) -> Path:
        path = tmp_path / "tiny.gguf"
        writer = GGUFWriter(path, "llama")
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("smollm")
        writer.add_token_list(["a", "b", "ab", "<|im_end|>", "<|endoftext|>", "<|eot_id|>"])
        writer.add_token_types([1, 1, 1, 3, 3, 1])
        writer.add_token_merges(["a b"])
        writer.add_eos_token_id(3)
        change(writer)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path

    return write
