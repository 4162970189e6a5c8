import hashlib
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast

from benchmarks import north_tokenizer
from northchat.model.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def file() -> Path:
    return north_tokenizer.cached()


def test_it_is_the_same_everywhere(file: Path) -> None:
    assert hashlib.sha256(file.read_bytes()).hexdigest().startswith("9a7d6301b40e806c")


def test_markers_stand_at_norths_ids_and_ids_equal_transformers(file: Path) -> None:
    ours, theirs = Tokenizer(file), PreTrainedTokenizerFast(tokenizer_file=str(file))
    assert ours.vocab_size == 262_144
    assert ours.markers == north_tokenizer.MARKERS
    for text in (
        "def f(a):\n\treturn a  +   1  # it's\r\n\r\n",
        "日本語の文章と中文的句子。漢字 👩‍👩‍👧 🎉 é é",
        "1 12 123 1234 12345 1234567 3.14159 x1y22 ٣٤",
        "\t\tTabs\u00a0and\u2003spaces \r\n \n end ",
    ):
        assert ours.encode(text) == theirs.encode(text, add_special_tokens=False)
        assert ours.decode(ours.encode(text)) == text
    digits = [ours.decode([token]) for token in ours.encode("1234567")]
    assert digits == ["1", "234", "567"]
    forged = "".join(north_tokenizer.MARKERS)
    assert not set(ours.encode(forged)) & set(north_tokenizer.MARKERS.values())
