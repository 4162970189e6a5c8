"""A small tokenizer with North's markers, some of them not flagged special, and a way to write marked text as ids."""

import json
import re
from functools import cache
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Backend
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.trainers import BpeTrainer

from northchat.chat.north_parser import Marker
from northchat.model.tokenizer import Tokenizer

MARKERS = tuple(marker.value for marker in Marker)
CORPUS = [
    'Be terse. Run a command, {"tool_call_id": "0", "tool_name": "read", "parameters": {"path": "a.py"}}',
    "def reverse(text):\n    return text[::-1]\n\nÜber größere Wörter, 日本語のテキスト, 🎉🎉 emoji",
]


@cache
def _document() -> str:
    backend = Backend(BPE())
    backend.pre_tokenizer = ByteLevel(add_prefix_space=False)
    backend.decoder = ByteLevelDecoder()
    trainer = BpeTrainer(vocab_size=330, initial_alphabet=ByteLevel.alphabet(), show_progress=False)
    backend.train_from_iterator(CORPUS, trainer)
    return backend.to_str()


def north_tokenizer_file(folder: Path, without: str = "") -> Path:
    document: dict[str, Any] = json.loads(_document())
    size = len(document["model"]["vocab"])
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    document["added_tokens"] = [
        flags | {"id": size + index, "content": marker, "special": "START_OF" in marker or "END_OF" in marker}
        for index, marker in enumerate((*MARKERS, "<|UNRELATED_TOKEN|>"))
        if marker != without
    ]
    path = folder / "tokenizer.json"
    path.write_text(json.dumps(document), "utf-8")
    return path


def encode_with_markers(tokenizer: Tokenizer, text: str) -> list[int]:
    """Ids of what a model writes: marker strings become their ids."""
    ids: list[int] = []
    for part in re.split(r"(<\|[A-Z_]+\|>|<BOS_TOKEN>)", text):
        token = tokenizer.token_id(part)
        ids += tokenizer.encode(part) if token is None else [token]
    return ids
