from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len
from screens import PALETTE, lines_of, shown

from northchat.tui import theme
from northchat.tui.inline import Look, Span
from northchat.tui.layout import Palette, wrap

words = st.text(st.sampled_from("ab. ,é日本、👍👩‍👩‍👧e\u0301"), max_size=60).map(str.strip)


def texts(spans: list[Span], width: int) -> list[str]:
    return ["".join(span.text for span in line) for _, line in wrap(spans, width)]


@given(words, st.integers(2, 30))
def test_lines_fit_and_joined_again_they_are_the_text(text: str, width: int) -> None:
    joined = ""
    for joint, line in wrap([Span(text)], width):
        part = "".join(span.text for span in line)
        assert cell_len(part) <= width
        joined += part if joint == "\n" else joint + part
    assert joined == text


def test_words_stay_whole_where_they_can() -> None:
    assert texts([Span("one two three")], 8) == ["one two", "three"]
    assert texts([Span("incomprehensible")], 6) == ["incomp", "rehens", "ible"]
    assert texts([Span("bold", Look(bold=True)), Span("ly so")], 6) == ["boldly", "so"]


def test_japanese_breaks_between_characters_but_not_before_punctuation() -> None:
    assert texts([Span("日本語です。はい")], 10) == ["日本語で", "す。はい"]


def test_an_emoji_of_several_code_points_is_never_cut() -> None:
    family = "👩‍👩‍👧"
    assert texts([Span(family * 3)], 4) == [family * 2, family]


def test_code_fills_its_ground_to_the_edge() -> None:
    lines = lines_of(["```\nx\n```"], 20)
    assert [line.strip.cell_length for line in lines] == [20]
    bars = [Palette(theme.load("ansi")), PALETTE]
    assert [palette.theme.ui["surface"] == palette.theme.ui["background"] for palette in bars] == [True, False]


def test_long_code_goes_on_in_the_next_line_and_is_copied_as_one() -> None:
    lines = lines_of(["```\n" + "x" * 30 + "\n```"], 20)
    assert [line.text for line in lines] == ["x" * 17, "x" * 13]
    assert [line.joint for line in lines] == ["\n", ""]


def test_a_table_gives_way_where_it_is_widest() -> None:
    table = "| a | text |\n|---|---|\n| 1 | a long cell that must wrap |\n"
    assert shown(table, 20) == [
        "a │ text",
        "──┼─────────────────",
        "1 │ a long cell that",
        "  │ must wrap",
    ]


def test_wide_characters_keep_a_table_straight() -> None:
    assert shown("| 名前 | n |\n|---|---|\n| a | 1 |\n", 30) == ["名前 │ n", "─────┼──", "a    │ 1"]
