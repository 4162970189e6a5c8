import itertools
import time

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from screens import lines_of, shown

from northchat.tui.inline import Span
from northchat.tui.markdown import Markdown, Row

TEXT = """\
# Title
Some **bold** text and `code`
on two lines

1. first
   ```python
   def f():
       return 1
   ```
2. second
   - nested *item*

> quoted
> - item

| a | b |
|---|--:|
| 1 | two |

---
~~~
plain
~~~
the end"""

FRAGMENTS = [
    *(
        "\n",
        "\n\n",
        " ",
        "    ",
        "\t",
        "\r\n",
        "-",
        "- ",
        "* ",
        "+ ",
        "1. ",
        "12) ",
        "> ",
        ">",
        "#",
        "## ",
        "=",
        "===",
        "---",
    ),
    *(
        "```",
        "```py\n",
        "~~~",
        "`",
        "``",
        "*",
        "**",
        "_",
        "~~",
        "[",
        "](",
        ")",
        "![",
        "<",
        ">",
        "|",
        "| a | b |\n",
        "|-|-|\n",
    ),
    *(
        "\\",
        "\\\\\n",
        "&amp;",
        "&#27;",
        "<b>",
        "<!-- ",
        "http://x.y",
        "word",
        "two words",
        "日本語。",
        "👩‍👩‍👧",
        "e\u0301",
        "\u200d",
    ),
    *("\x1b[31m", "\x00", "\u202e", "\ud800", "[/", "[red]", "- [x] ", ":-:", "def f():\n    pass\n"),
]
markdown_like = st.lists(st.sampled_from(FRAGMENTS) | st.text(max_size=6), max_size=25).map("".join)


@given(st.data(), markdown_like)
@example(None, TEXT)
def test_any_chunking_ends_in_the_same_screen_as_one_piece(data: st.DataObject | None, text: str) -> None:
    if data is None:
        cuts = list(range(len(text) + 1))
    else:
        cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=10)))
    bounds = [0, *cuts, len(text)]
    chunks = [text[begin:end] for begin, end in itertools.pairwise(bounds)]
    assert lines_of(chunks) == lines_of([text])


@given(markdown_like, st.integers(1, 40))
def test_odd_input_never_raises_and_lines_keep_to_the_width(text: str, width: int) -> None:
    for line in lines_of([text], width):
        assert line.strip.cell_length <= max(width, 4) + 3 * text.count("|") + 4 * text.count(">") + 12
        assert not set(line.strip.text) & set("\x1b\x00\n\r\x9b\u202e")


@given(markdown_like)
def test_finished_rows_never_change(text: str) -> None:
    markdown = Markdown()
    before: list[object] = []
    for character in text:
        markdown.write(character)
        assert markdown.rows[: len(before)] == before
        before = list(markdown.rows)


def test_blocks() -> None:
    assert shown(TEXT) == [
        "Title",
        "",
        "Some bold text and code",
        "on two lines",
        "",
        "1. first",
        "",
        "     python",
        "     def f():",
        "         return 1",
        "",
        "2. second",
        "   ◦ nested item",
        "",
        "▎ quoted",
        "▎ • item",
        "",
        "a │   b",
        "──┼────",
        "1 │ two",
        "",
        "─" * 60,
        "",
        "  plain",
        "",
        "the end",
    ]


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("a\n\n\n\nb", ["a", "", "b"]),
        ("- a\n\n- b", ["• a", "", "• b"]),
        ("- a\n  b\nc", ["• a", "  b", "  c"]),
        ("- [ ] open\n- [x] done", ["• ☐ open", "• ☑ done"]),
        ("2018. A year\nin prose 2. goes on", ["2018. A year", "      in prose 2. goes on"]),
        ("text\n2. no list", ["text", "2. no list"]),
        ("Setext\n---\nbelow", ["Setext", "", "below"]),
        ("*not closed", ["*not closed"]),
        ("snake_case_name", ["snake_case_name"]),
        ("a | b", ["a | b"]),
        ("``` not a fence ` here", ["``` not a fence ` here"]),
        ("```\n```", []),
        ("- ", ["•"]),
        ("> a\n>\n> b\n\nc", ["▎ a", "▎", "▎ b", "", "c"]),
        ("arr[/path] [b + [1", ["arr[/path] [b + [1"]),
        ("&lt;b> <i>x</i>", ["&lt;b> <i>x</i>"]),
    ],
)
def test_small_texts(text: str, lines: list[str]) -> None:
    assert shown(text) == lines


def test_a_link_shows_where_it_leads() -> None:
    assert shown("[docs](https://a.b/c)") == ["docs (https://a.b/c)"]
    assert shown("<https://a.b/c>") == ["https://a.b/c"]


def test_code_that_a_model_indented_less_than_its_list_item_keeps_its_shape() -> None:
    assert shown("1. do:\n   ```\ndef f():\n    return 1\n   ```\nafter") == [
        "1. do:",
        "",
        "     def f():",
        "         return 1",
        "",
        "after",
    ]


def test_an_open_fence_is_code_already_and_its_end_is_not_shown_half() -> None:
    markdown = Markdown()
    markdown.write("```\nx = 1\n``")
    assert markdown.rows == [Row("code", (Span("x = 1"),))]
    assert markdown.tail() == []


@pytest.mark.parametrize("line", ["- item {}\n", "x = {}  # code\n", "| {} | b |\n", "prose {} "])
def test_the_work_for_a_chunk_does_not_grow_with_the_text(line: str) -> None:
    """Counted in rows that a chunk makes anew, since time on a busy machine says little."""
    start = {"x": "```python\n", "|": "| a | b |\n|---|---|\n"}.get(line[0], "")
    markdown = Markdown()
    markdown.write(start)
    seen = []
    for number in range(300):
        done = len(markdown.rows)
        markdown.write(line.format(number))
        seen.append(len(markdown.rows) - done + len(markdown.tail()))
    assert max(seen[-50:]) <= max(seen[:50]) + 1


def test_a_pathological_line_takes_no_age() -> None:
    began = time.monotonic()
    for odd in (
        "*" * 3_000,
        "[" * 3_000,
        "`" * 3_001 + "x",
        "> " * 500 + "x",
        "- " * 500,
        "|" * 3_000 + "\n" + "|-" * 3_000,
    ):
        lines_of([odd])
    assert time.monotonic() - began < 20
