"""The vocabulary in a GGUF header as a tokenizer.json for the `tokenizers` library.

Which regular expressions a pre-tokenizer's name stands for is what the models' own tokenizer.json files say (and what
llama.cpp's src/llama-vocab.cpp lists).
"""

from pathlib import Path
from typing import Any

from northchat.model.weights import ModelError

_CONTROL, _USER_DEFINED = 3, 4
_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_LINES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"


def _words(digits: str) -> str:
    return rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_LINES}"


def _cased_words(contraction: str, digits: str) -> str:
    lead = r"[^\r\n\p{L}\p{N}]?"
    return (
        rf"{lead}{_UPPER}*{_LOWER}+{contraction}|{lead}{_UPPER}+{_LOWER}*{contraction}|{digits}"
        rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_LINES}"
    )


_LLAMA3 = [_words(r"\p{N}{1,3}")]
_QWEN2 = [_words(r"\p{N}")]
_GPT4O = _cased_words(_CONTRACTIONS + "?", r"\p{N}{1,3}")
_DIGITS = [r"\p{N}"]

# Splits made before the byte-level step, and whether that step then splits by GPT-2's expression.
_PRE: dict[str, tuple[list[str], bool]] = (
    dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "dbrx", "smaug-bpe", "falcon3", "pixtral"), (_LLAMA3, False))
    | dict.fromkeys(("qwen2", "deepseek-r1-qwen", "stablelm2", "megrez"), (_QWEN2, False))
    | dict.fromkeys(
        ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"), (_DIGITS, True)
    )
    | dict.fromkeys(("gpt-2", "gpt2", "mpt", "olmo", "jais", "phi-2", "granite-docling"), ([], True))
    | {
        "tekken": ([_cased_words("", r"\p{N}")], False),
        "gpt-4o": ([_GPT4O], False),
        "tiny_aya": ([r"\d{1,3}(?=(?:\d{3})*\b)", _GPT4O], False),
        "deepseek-coder": ([r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+", r"\p{N}"], False),
    }
)
_WHOLE_WORDS = {"llama-bpe", "llama3", "llama-v3", "tekken", "pixtral", "falcon3"}
"""Pre-tokenizers whose models take a word that is in the vocabulary without trying merges."""
_COMPOSED = {"qwen2", "deepseek-r1-qwen"}
"""Those whose models bring text to Unicode's form C first."""


def tokenizer_json(header: dict[str, Any], path: Path) -> dict[str, Any]:
    """What tokenizer.json holds, made from the `tokenizer.ggml.*` fields; `path` is for messages.

    Raises ModelError when fields are missing, contradict each other, or name a vocabulary that isn't supported.
    """
    model = header.get("tokenizer.ggml.model")
    tokens = header.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list) or not tokens or not all(isinstance(token, str) for token in tokens):
        raise ModelError(f"{path} has no vocabulary in its header; convert the model anew")
    kinds = header.get("tokenizer.ggml.token_type") or [1] * len(tokens)
    if len(kinds) != len(tokens):
        raise ModelError(f"{path} has {len(tokens)} tokens but {len(kinds)} token types; it is damaged")
    if model == "gpt2":
        parts = _byte_level(header, tokens, path)
    elif model == "llama":
        parts = _sentencepiece(header, tokens, kinds, path)
    else:
        raise ModelError(f"{path} has a vocabulary of kind {model!r}; gpt2 (byte-level BPE) and llama are supported")
    added = [
        {
            "id": index,
            "content": token,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": kind == _CONTROL,
        }
        for index, (token, kind) in enumerate(zip(tokens, kinds, strict=True))
        if kind in (_CONTROL, _USER_DEFINED)
    ]
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "post_processor": None,
    } | parts


def _byte_level(header: dict[str, Any], tokens: list[str], path: Path) -> dict[str, Any]:
    pre = header.get("tokenizer.ggml.pre", "gpt-2")
    if pre not in _PRE:
        raise ModelError(f"{path} wants pre-tokenizer {pre!r}; supported are {', '.join(sorted(_PRE))}")
    merges = header.get("tokenizer.ggml.merges")
    if not isinstance(merges, list):
        raise ModelError(f"{path} has no tokenizer.ggml.merges in its header; convert the model anew")
    splits, by_gpt2 = _PRE[pre]
    steps: list[dict[str, Any]] = [
        {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False} for regex in splits
    ]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": by_gpt2}
    return {
        "normalizer": {"type": "NFC"} if pre in _COMPOSED else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [*steps, byte_level]},
        "decoder": byte_level | {"use_regex": True},
        "model": _bpe(
            # The last of equal entries wins, as it does in llama.cpp; a token can't hold a space, so merges split well.
            {token: index for index, token in enumerate(tokens)},
            [merge.split(" ") for merge in merges],
            ignore_merges=pre in _WHOLE_WORDS,
        ),
    }


def _sentencepiece(header: dict[str, Any], tokens: list[str], kinds: list[int], path: Path) -> dict[str, Any]:
    scores = header.get("tokenizer.ggml.scores")
    if not isinstance(scores, list) or len(scores) != len(tokens):
        raise ModelError(f"{path} has no score for each token in its header; convert the model anew")
    vocabulary = {token: index for index, token in enumerate(tokens)}
    plain = {token for token, kind in zip(tokens, kinds, strict=True) if kind == 1}
    # SentencePiece joins the neighbours whose union scores highest, so each way to join a token is a merge of its rank.
    merges = [
        (-scores[vocabulary[token]], vocabulary[token[:cut]], vocabulary[token[cut:]], token[:cut], token[cut:])
        for token in plain
        for cut in range(1, len(token))
        if token[:cut] in plain and token[cut:] in plain
    ]
    merges.sort()
    prefix = header.get("tokenizer.ggml.add_space_prefix", True)
    unknown = header.get("tokenizer.ggml.unknown_token_id", 0)
    space = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    strip = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if prefix else []
    return {
        "normalizer": {
            "type": "Sequence",
            "normalizers": [{"type": "Prepend", "prepend": "▁"}, space] if prefix else [space],
        },
        "pre_tokenizer": None,
        "decoder": {
            "type": "Sequence",
            "decoders": [
                {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
                {"type": "ByteFallback"},
                {"type": "Fuse"},
                *strip,
            ],
        },
        "model": _bpe(
            vocabulary,
            [[left, right] for *_, left, right in merges],
            byte_fallback=True,
            fuse_unk=True,
            unk_token=tokens[unknown] if 0 <= unknown < len(tokens) else None,
        ),
    }


def _bpe(vocabulary: dict[str, int], merges: list[list[str]], **options: Any) -> dict[str, Any]:
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": False,
        "vocab": vocabulary,
        "merges": merges,
    } | options
