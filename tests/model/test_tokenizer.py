import json
import re
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from model_files import MARKERS, byte_level_bpe, header, tensors, vocabulary, write_gguf
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from northchat.model.gguf import GGUFFile
from northchat.model.gguf_tokenizer import tokenizer_json
from northchat.model.tokenizer import Tokenizer
from northchat.model.weights import ModelError

TEXTS = [
    "",
    "def f(a):\n\treturn a  +   1  # it's\r\n\r\n",
    "日本語の文章と中文的句子。漢字",
    "👩‍👩‍👧 emoji 🎉🇩🇪 é é",
    "12345 3.14159 x1y22 ½²٣٤",
    "\t\tTabs\u00a0and\u2003spaces \r\n \n end ",
    "\0\x7f\ufffd\u200b",
]


def saved(document: dict[str, Any], folder: Path) -> Path:
    (folder / "tokenizer.json").write_text(json.dumps(document), "utf-8")
    return folder / "tokenizer.json"


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(json.loads(byte_level_bpe().to_str()), tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def ours(file: Path) -> Tokenizer:
    return Tokenizer(file)


@pytest.fixture(scope="module")
def theirs(file: Path) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(tokenizer_file=str(file))


@pytest.mark.parametrize("text", TEXTS)
def test_ids_equal_transformers(text: str, ours: Tokenizer, theirs: PreTrainedTokenizerFast) -> None:
    ids = ours.encode(text)
    assert ids == theirs.encode(text, add_special_tokens=False)
    assert ours.decode(ids) == text


@settings(deadline=None)
@given(text=st.text(st.characters(exclude_categories=["Cs"])))
def test_any_text_comes_back_and_ids_equal_transformers(
    ours: Tokenizer, theirs: PreTrainedTokenizerFast, text: str
) -> None:
    ids = ours.encode(text)
    assert ours.decode(ids) == text
    assert ids == theirs.encode(text, add_special_tokens=False)


@settings(deadline=None)
@given(text=st.lists(st.sampled_from([*MARKERS, "<|", "im_end", "|>", " ", "x", "<|im_end|"])).map("".join))
def test_no_text_becomes_a_marker(ours: Tokenizer, text: str) -> None:
    ids = ours.encode(text)
    assert not set(ids) & set(ours.markers.values())
    assert ours.decode(ids) == text


def test_markers_are_found_by_name_and_decode_to_it(ours: Tokenizer) -> None:
    assert [ours.token_id(marker) for marker in MARKERS] == [0, 1, 2]
    assert ours.token_id("x") is None
    assert ours.token_id("<|nope|>") is None
    assert ours.decode([1, *ours.encode("hi"), 2]) == "<|im_start|>hi<|im_end|>"


def test_markers_that_merges_could_reach_or_that_are_not_flagged_special_are_not_reached(tmp_path: Path) -> None:
    document = json.loads(byte_level_bpe().to_str())
    model = document["model"]
    model["ignore_merges"] = True  # a whole word that is in the vocabulary is taken as it is
    size = len(model["vocab"])
    model["vocab"] |= {"<tool": size, "<tool>": size + 1, "<t": size + 2, "ool": size + 3, "oo": size + 4}
    model["merges"] += [["<", "t"], ["o", "o"], ["oo", "l"], ["<t", "ool"], ["<tool", ">"]]
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": False}
    document["added_tokens"] += [plain | {"id": size + 1, "content": "<tool>"}]
    document["pre_tokenizer"] = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": False,
    }
    tokenizer = Tokenizer(saved(document, tmp_path))
    assert tokenizer.encode("<tool>") == [size, model["vocab"][">"]]
    assert tokenizer.token_id("<tool>") == size + 1


def test_runs_of_white_space_that_are_added_tokens_stay_text(tmp_path: Path) -> None:
    document = json.loads(byte_level_bpe().to_str())
    size = len(document["model"]["vocab"])
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": False}
    document["added_tokens"] += [plain | {"id": size, "content": " " * 7}]
    file = saved(document, tmp_path)
    text = "a" + " " * 7 + "b"
    ids = Tokenizer(file).encode(text)
    assert size in ids
    assert ids == PreTrainedTokenizerFast(tokenizer_file=str(file)).encode(text, add_special_tokens=False)
    assert Tokenizer(file).decode(ids) == text
    assert size not in Tokenizer(file).markers.values()


def test_nothing_is_put_around_text(tmp_path: Path) -> None:
    document = json.loads(byte_level_bpe().to_str())
    document["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "<|im_start|>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
        "special_tokens": {"<|im_start|>": {"id": "<|im_start|>", "ids": [1], "tokens": ["<|im_start|>"]}},
    }
    document["truncation"] = {"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0}
    assert len(Tokenizer(saved(document, tmp_path)).encode("q w e r t y")) == len(
        byte_level_bpe().encode("q w e r t y")
    )


def test_lone_surrogates_become_replacement_characters(ours: Tokenizer) -> None:
    assert ours.decode(ours.encode("a\ud800b")) == "a\ufffdb"


def test_ids_beyond_the_vocabulary_are_nothing(ours: Tokenizer) -> None:
    assert ours.decode_bytes([-1, ours.vocab_size, 10**9]) == b""


def test_encoding_a_long_text_leaves_other_threads_running(ours: Tokenizer) -> None:
    text = "the other thing, " * 200_000
    worker = threading.Thread(target=ours.encode, args=(text,))
    gaps = []
    worker.start()
    last = time.perf_counter()
    while worker.is_alive():
        time.sleep(0.001)
        now = time.perf_counter()
        gaps.append(now - last)
        last = now
    # With the GIL held there would be one gap as long as the whole.
    assert max(gaps) < sum(gaps) / 3


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "can't be used"),
        (b"[]", "can't be used"),
        (b'{"model": {}}', "can't be used"),
        (b'{"model": {"type": "WordPiece"}, "added_tokens": []}', "WordPiece"),
        (b'{"model": {"type": "BPE", "vocab": {"a": 0}, "merges": []}, "added_tokens": []}', "neither byte-level"),
    ],
)
def test_files_that_are_no_tokenizer_are_refused_in_a_line(content: bytes, words: str, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(ModelError, match=words) as refused:
        Tokenizer(tmp_path / "tokenizer.json")
    assert "\n" not in str(refused.value)
    assert "tokenizer.json" in str(refused.value)


# ---- from GGUF ----


def from_gguf(fields: dict[str, Any], folder: Path) -> Tokenizer:
    path = write_gguf(folder / "a.gguf", fields, values={"token_embd.weight": tensors()["token_embd.weight"]})
    return Tokenizer(saved(tokenizer_json(GGUFFile(path).header, path), folder))


@pytest.mark.parametrize("text", TEXTS)
def test_a_gguf_vocabulary_gives_the_ids_of_the_tokenizer_it_came_from(
    text: str, ours: Tokenizer, tmp_path: Path
) -> None:
    tokenizer = from_gguf({}, tmp_path)
    assert tokenizer.encode(text) == ours.encode(text)
    assert tokenizer.markers == ours.markers


@pytest.mark.parametrize(
    ("pre", "text", "words"),
    [
        ("smollm", "it's 123 x", ["it", "'s", " ", "1", "2", "3", " x"]),
        ("gpt-2", "it's 123 x", ["it", "'s", " 123", " x"]),
        ("llama-bpe", "IT'S 12345\n\n x", ["IT", "'S", " ", "123", "45", "\n\n", " x"]),
        ("qwen2", "IT'S 123!\n x", ["IT", "'S", " ", "1", "2", "3", "!\n", " x"]),
        ("tekken", "fooBar IT's 12", ["foo", "Bar", " IT", "'s", " ", "1", "2"]),
        ("gpt-4o", "fooBar IT's 1234", ["foo", "Bar", " IT's", " ", "123", "4"]),
        ("tiny_aya", "x 1234567 y", ["x", " ", "1", "234", "567", " y"]),
        ("deepseek-coder", "it, 12\nx", ["it", ",", " ", "1", "2", "\n", "x"]),
    ],
)
def test_pre_tokenizers_split_as_their_models_do(pre: str, text: str, words: list[str], tmp_path: Path) -> None:
    document = tokenizer_json(vocabulary() | header() | {"tokenizer.ggml.pre": pre}, tmp_path)
    pieces = Backend.from_str(json.dumps(document)).pre_tokenizer.pre_tokenize_str(text)
    assert [word.replace("Ġ", " ").replace("Ċ", "\n") for word, _ in pieces] == words


def test_llama_3_takes_whole_words_and_qwen_composes(tmp_path: Path) -> None:
    fields = {"tokenizer.ggml.merges": vocabulary()["tokenizer.ggml.merges"][:1], "tokenizer.ggml.pre": "llama-bpe"}
    tokens = vocabulary()["tokenizer.ggml.tokens"]
    word = next(token for token in tokens if token.isascii() and token.isalpha() and len(token) == 3)
    assert len(from_gguf(fields, tmp_path).encode(word)) == 1
    assert len(from_gguf(fields | {"tokenizer.ggml.pre": "gpt-2"}, tmp_path).encode(word)) > 1
    composed = from_gguf({"tokenizer.ggml.pre": "qwen2"}, tmp_path)
    assert composed.encode("e\u0301") == composed.encode("é")


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"tokenizer.ggml.tokens": None}, "no vocabulary"),
        ({"tokenizer.ggml.model": "bert"}, "'bert'"),
        ({"tokenizer.ggml.pre": "strange"}, "'strange'; supported are .*smollm"),
        ({"tokenizer.ggml.merges": None}, "merges"),
        ({"tokenizer.ggml.token_type": [1, 2]}, "400 tokens but 2 token types"),
        ({"tokenizer.ggml.model": "llama"}, "no score"),
    ],
)
def test_vocabularies_that_we_cannot_use_are_refused(fields: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=words):
        from_gguf(fields, tmp_path)


@pytest.fixture(scope="module")
def pieces() -> dict[str, Any]:
    """A SentencePiece-like vocabulary as GGUF has it: scores fall in the order in which pieces were learnt."""
    trained = Backend(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.Metaspace()
    trained.decoder = decoders.Metaspace()
    trained.train_from_iterator(["the other thing, and then another thing"] * 3, trainers.BpeTrainer(vocab_size=80))
    model = json.loads(trained.to_str())["model"]
    learnt = ["".join(merge) for merge in model["merges"]]
    single = [token for token in model["vocab"] if token not in learnt]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *learnt, *single]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": None,
        "tokenizer.ggml.merges": None,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [2, 3, 3, *[6] * 256, *[1] * (len(learnt) + len(single))],
        "tokenizer.ggml.scores": [0.0] * 259 + [-float(rank) for rank in range(len(learnt))] + [-1e9] * len(single),
        "tokenizer.ggml.unknown_token_id": 0,
    }


def test_a_sentencepiece_vocabulary_merges_by_score_and_falls_back_to_bytes(
    pieces: dict[str, Any], tmp_path: Path
) -> None:
    tokenizer = from_gguf(pieces, tmp_path)
    tokens = pieces["tokenizer.ggml.tokens"]
    shown = [tokens[token] for token in tokenizer.encode("the other é")]
    assert shown == ["▁the", "▁other", "▁", "<0xC3>", "<0xA9>"]
    assert tokenizer.decode(tokenizer.encode("the other é")) == " the other é"
    assert not set(tokenizer.encode("<s></s><unk><0x41>")) & {0, 1, 2, 3 + 0x41}
    without = from_gguf(pieces | {"tokenizer.ggml.add_space_prefix": False}, tmp_path)
    assert without.decode(without.encode("the  other\n")) == "the  other\n"
    assert re.fullmatch("the", without.decode(without.encode("the")))
