"""A real byte-level BPE tokenizer with ChatML's and other markers, small enough to train here."""

import json
from pathlib import Path

import pytest
from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.trainers import BpeTrainer

from northchat.model.tokenizer import Tokenizer

MARKERS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>", "<tool_call>", "</tool_call>")
CORPUS = [
    "user assistant system tool You are a helpful assistant. Hello, how are you? \n\n{'name': 'get', 'arguments': {}}",
    "def reverse(text):\n    return text[::-1]\n\nÜber größere Wörter, naïve café, 日本語のテキスト, 🎉🎉 emoji",
]


@pytest.fixture(scope="session")
def tokenizer_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    backend = Backend(BPE())
    backend.pre_tokenizer = ByteLevel(add_prefix_space=False)
    backend.decoder = ByteLevelDecoder()
    backend.train_from_iterator(
        CORPUS, BpeTrainer(vocab_size=400, initial_alphabet=ByteLevel.alphabet(), show_progress=False)
    )
    backend.add_special_tokens([AddedToken(marker, special=True, normalized=False) for marker in MARKERS[:3]])
    backend.add_tokens([AddedToken(marker, special=False, normalized=False) for marker in MARKERS[3:]])
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    backend.save(str(path))
    assert {token["content"] for token in json.loads(path.read_text())["added_tokens"]} == set(MARKERS)
    return path


@pytest.fixture(scope="session")
def tokenizer(tokenizer_file: Path) -> Tokenizer:
    return Tokenizer(tokenizer_file)
