import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from northchat.lines import AnswerWriter

CODE = "Here:\n\n```python\ndef f():\n    return 'x'\n```\nDone"


def write(*pieces: str) -> list[tuple[str, str]]:
    put: list[tuple[str, str]] = []
    writer = AnswerWriter(put.extend)
    for piece in pieces:
        writer.feed(piece)
    writer.end()
    return put


def test_code_in_a_fence_has_roles_and_prose_has_none() -> None:
    put = write(CODE)
    assert ("def", "keyword") in put
    assert ("'x'", "string") in put
    assert [text for text, role in put if role == "foreground" and "Here" in text] == ["Here:\n"]
    assert all(role == "foreground" for text, role in put if "```" in text)


def test_prose_is_put_as_it_comes() -> None:
    put: list[tuple[str, str]] = []
    writer = AnswerWriter(put.extend)
    for piece in ("Hel", "lo", " `co", "de` "):
        writer.feed(piece)
        assert "".join(text for text, _ in put).endswith(piece)


@pytest.mark.parametrize("text", ["```", "~~~", "   ```py", "a ``` b", "````\n```\nx = 1\n````", "```py\nx = '''\n1"])
def test_the_text_is_never_changed(text: str) -> None:
    assert "".join(piece for piece, _ in write(text)) == text + "\n"


def test_an_inner_shorter_fence_does_not_close() -> None:
    put = write("````md\n```\nx\n````\ndef after\n")
    assert ("def after\n", "foreground") in put


markdown = st.lists(st.sampled_from(["```", "~~~~", "py", "\n", " ", "def f():", "x = '''", "`", "é", "\f", "\u2028"]))


@given(markdown.map("".join), st.lists(st.integers(0, 60)))
def test_every_split_gives_the_same_lines(text: str, cuts: list[int]) -> None:
    edges = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    pieces = [text[start:end] for start, end in itertools.pairwise(edges)]
    whole, split = write(text), write(*pieces)
    assert "".join(piece for piece, _ in split) == "".join(piece for piece, _ in whole)
    assert "".join(piece for piece, _ in whole) == text + ("" if text.endswith("\n") or not text else "\n")
    assert [pair for pair in split if pair[1] != "foreground"] == [pair for pair in whole if pair[1] != "foreground"]
