"""A stand-in for North Mini Code's tokenizer: as many entries, of the same kind, the same markers at the same ids.

The same bytes on every machine: pieces are drawn by a seeded generator, not learnt, so a text takes two to three times
as many ids as with the real one.

    python benchmarks/north_tokenizer.py tokenizer.json
"""

import json
import os
import random
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

SIZE = 262_144
MARKERS = {
    "<PAD>": 0,
    "<UNK>": 1,
    "<BOS_TOKEN>": 2,
    "<EOS_TOKEN>": 3,
    "<|START_OF_TURN_TOKEN|>": 255000,
    "<|END_OF_TURN_TOKEN|>": 255001,
    "<|USER_TOKEN|>": 255006,
    "<|CHATBOT_TOKEN|>": 255007,
    "<|SYSTEM_TOKEN|>": 255008,
    "<|START_THINKING|>": 255010,
    "<|END_THINKING|>": 255011,
    "<|START_TEXT|>": 255012,
    "<|END_TEXT|>": 255013,
    "<|START_ACTION|>": 255014,
    "<|END_ACTION|>": 255015,
    "<|START_TOOL_RESULT|>": 255016,
    "<|END_TOOL_RESULT|>": 255017,
}
PLAIN = (
    "<|START_THINKING|>",
    "<|END_THINKING|>",
    "<|START_TEXT|>",
    "<|END_TEXT|>",
    "<|START_ACTION|>",
    "<|END_ACTION|>",
)
"""Markers that are not flagged special."""
_LETTERS = "etaoinshrdlcumwfgypbvk"
_DIGITS = r"\d{1,3}(?=(?:\d{3})*\b)"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_END = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_WORDS = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_END}|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_END}|\p{{N}}{{1,3}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _alphabet() -> list[str]:
    """GPT-2's stand-ins for the 256 bytes, by byte."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]


def _merges(count: int) -> Iterator[tuple[str, str]]:
    """So many merges, each of two pieces that exist by then and giving a new one."""
    draw = random.Random(20260609)
    alphabet = _alphabet()
    known = set(alphabet)
    space = alphabet[ord(" ")]

    def new(left: str, right: str) -> bool:
        if left + right in known:
            return False
        known.add(left + right)
        return True

    digits = "0123456789"
    pairs = [a + b for a in digits for b in digits]
    fixed = [(a, b) for a in digits for b in digits] + [(pair, digit) for pair in pairs for digit in digits]
    fixed += [(space * size, space) for size in range(1, 16)]
    fixed += [(alphabet[lead], alphabet[next_]) for lead in range(0xC3, 0xEA) for next_ in range(0x80, 0xC0)]
    fixed += [(space, letter) for letter in _LETTERS + _LETTERS.upper()]
    made = 0
    for left, right in fixed:
        if made < count and new(left, right):
            made += 1
            yield left, right
    starts = [*_LETTERS, *_LETTERS.upper(), *(space + letter for letter in _LETTERS)]
    ends = [*_LETTERS]
    while made < count:
        # Squaring prefers early pieces, which are short and frequent, as learnt merges do.
        left = starts[int(draw.random() ** 2 * len(starts))]
        right = ends[int(draw.random() ** 2 * len(ends))]
        if len(left) + len(right) > 14 or not new(left, right):
            continue
        made += 1
        starts.append(left + right)
        if left.isalpha() and left.islower() and left.isascii():
            ends.append(left + right)
        yield left, right


def document() -> dict[str, Any]:
    """What its tokenizer.json holds."""
    free = iter(sorted(set(range(SIZE)) - set(MARKERS.values())))
    vocabulary = {character: next(free) for character in _alphabet()}
    merges = list(_merges(SIZE - len(MARKERS) - 256))
    vocabulary |= {left + right: next(free) for left, right in merges}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    added = [
        {"id": token, "content": marker, "special": marker not in PLAIN} | flags for marker, token in MARKERS.items()
    ]
    split = {"type": "Split", "behavior": "Isolated", "invert": False}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    bos = {"id": "<BOS_TOKEN>", "ids": [2], "tokens": ["<BOS_TOKEN>"]}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [
                split | {"pattern": {"Regex": _DIGITS}},
                split | {"pattern": {"Regex": _WORDS}},
                byte_level,
            ],
        },
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": "<BOS_TOKEN>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
            "special_tokens": {"<BOS_TOKEN>": bos},
        },
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": vocabulary | MARKERS,
            "merges": merges,
        },
    }


def write(path: Path) -> None:
    descriptor, name = tempfile.mkstemp(dir=path.parent)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        json.dump(document(), file, ensure_ascii=False)
    os.replace(name, path)


def cached() -> Path:
    """The file, made once per machine and version of this program."""
    stamp = int(os.stat(__file__).st_mtime)
    path = Path(tempfile.gettempdir()) / f"north-tokenizer-{os.getuid()}-{stamp}.json"
    if not path.exists():
        write(path)
    return path


if __name__ == "__main__":
    write(Path(sys.argv[1]))
