import itertools
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from northchat.sanitize import Cleaner, clean

FRAGMENTS = [
    *"\x1b\x07\x9b\x9c\x9d\x90\\[]P_^X(;?0m \n\r\tA\x7f\u202e\ud800",
    "\x1b]52;c;aGVsbG8=\x1b\\",
    "\x1b]0;title\x07",
    "\x1b[2J",
    "\x1b[38;5;1m",
    "\x1bPq#0\x1b\\",
    "é漢",
    "x" * 5000,
]
hostile = st.one_of(st.text(), st.lists(st.sampled_from(FRAGMENTS)).map("".join))


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain é 漢 👩‍💻\n\ttab", "plain é 漢 👩‍💻\n\ttab"),
        ("a\x1b[31mred\x1b[0mb", "aredb"),
        ("a\x1b]52;c;aGVsbG8=\x1b\\b", "ab"),
        ("a\x1b]0;PWNED\x07b", "ab"),
        ("a\x9d0;PWNED\x9cb", "ab"),
        ("a\x1bPq#0;2;0;0;0\x1b\\b", "ab"),
        ("a\x1b_Gf=100;AAAA\x1b\\b", "ab"),
        ("a\x1b[2Jb\x9b31mc", "abc"),
        ("a\x1b(Bb\x1bcd\x1b#8e", "abde"),
        ("bell\x07 back\x08 del\x7f nul\x00 cr\r\n", "bell back del nul cr\n"),
        ("if \u202e}admin\u2066", "if }admin"),
        ("\ud83d", "\ufffd"),
        ("a\x1b", "a"),
        ("a\x1b]never ends", "anever ends"),
        ("a\x1b]" + "y" * 5000 + "\x07b", "a" + "y" * 5000 + "b"),
        ("a\x1b]0;cut by\nnew line\x07b", "a0;cut by\nnew lineb"),
    ],
)
def test_clean(text: str, shown: str) -> None:
    assert clean(text) == shown


@given(hostile)
def test_nothing_that_commands_a_terminal_is_left(text: str) -> None:
    result = clean(text)
    for char in result:
        assert char in "\n\t" or unicodedata.category(char) not in ("Cc", "Cs")
        assert unicodedata.bidirectional(char) not in ("LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI")
    result.encode()
    assert clean(result) == result


@given(st.text(st.characters(exclude_categories=["Cc", "Cs", "Cf"])))
def test_ordinary_text_is_untouched(text: str) -> None:
    assert clean(text) == text


@given(hostile, st.lists(st.integers(0, 5100)))
def test_pieces_give_what_the_whole_gives(text: str, cuts: list[int]) -> None:
    cleaner = Cleaner()
    edges = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    pieces = [cleaner.feed(text[start:end]) for start, end in itertools.pairwise(edges)]
    assert "".join([*pieces, cleaner.flush()]) == clean(text)


def test_text_before_an_open_sequence_is_not_held_back() -> None:
    cleaner = Cleaner()
    assert cleaner.feed("shown\x1b]0;ti") == "shown"
    assert cleaner.feed("tle") == ""
    assert cleaner.feed("\x1b") == ""
    assert cleaner.feed("\\more") == "more"
