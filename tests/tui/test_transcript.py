import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from screens import PALETTE, screen
from textual.app import App, ComposeResult
from textual.geometry import Offset
from textual.pilot import Pilot
from textual.selection import SELECT_ALL, Selection

from northchat.tui import theme
from northchat.tui.blocks import Answer, Notice, Thinking, UserText
from northchat.tui.layout import Palette
from northchat.tui.transcript import Transcript


class Alone(App[None]):
    def __init__(self) -> None:
        super().__init__()
        self.register_theme(theme.textual_theme(theme.load("dark")))
        self.theme = "dark"

    def compose(self) -> ComposeResult:
        yield Transcript(PALETTE)

    def get_theme_variable_defaults(self) -> dict[str, str]:
        return theme.variables(theme.load("dark"))


@asynccontextmanager
async def showing(width: int = 40, height: int = 12) -> AsyncIterator[tuple[Pilot[None], Transcript]]:
    app = Alone()
    async with app.run_test(size=(width, height)) as pilot:
        await pilot.pause()
        yield pilot, app.query_one(Transcript)


def said(text: str) -> Answer:
    block = Answer()
    block.write(text)
    block.end()
    return block


LONG = "one two three four five six seven eight nine ten eleven twelve"


async def test_copied_text_is_what_was_written_not_what_was_drawn() -> None:
    async with showing() as (_, transcript):
        transcript.add(UserText("a question"))
        transcript.add(said(f"{LONG}\n\n> quoted\n\n```py\n{'x' * 60}\n```\n"))
        copied = transcript.get_selection(SELECT_ALL)
    assert copied is not None
    assert [line for line in copied[0].split("\n") if line] == ["a question", LONG, "quoted", "py", "x" * 60]


async def test_a_part_of_a_line_is_copied_without_the_gutter() -> None:
    async with showing() as (_, transcript):
        transcript.add(said("hello world"))
        assert transcript.get_selection(Selection(Offset(0, 1), Offset(7, 1))) == ("hello", "\n")
        assert transcript.get_selection(Selection(Offset(8, 1), Offset(13, 1))) == ("world", "\n")


async def test_dragging_selects_and_shows_it() -> None:
    async with showing() as (pilot, transcript):
        transcript.add(said("hello wörld 日本"))
        await pilot.pause()
        await pilot.mouse_down(offset=(2, 1))
        await pilot.hover(offset=(13, 1))
        await pilot.mouse_up(offset=(13, 1))
        await pilot.pause()
        assert (pilot.app.screen.get_selected_text() or "").startswith("hello wörld")
        assert screen(pilot.app)[0] == "  hello wörld 日本"


async def test_the_answer_so_far_and_the_whole_look_the_same() -> None:
    text = f"# Title\n\n{LONG}\n\n- a\n- b\n\n```py\ndef f(): ...\n```\n\n| a | b |\n|---|---|\n| 1 | 2 |\n"
    async with showing(height=40) as (pilot, transcript):
        block = Answer()
        transcript.add(block)
        for character in text:
            block.write(character)
            transcript.changed(block)
        block.end()
        transcript.changed(block)
        await pilot.pause()
        bit_by_bit = screen(pilot.app)
        transcript.clear()
        transcript.add(said(text))
        await pilot.pause()
        assert screen(pilot.app) == bit_by_bit


async def test_reasoning_unfolds_by_a_click() -> None:
    async with showing() as (pilot, transcript):
        block = Thinking()
        block.write("first thought\nsecond thought")
        block.end()
        transcript.add(block)
        transcript.add(said("answer"))
        assert transcript.plain == ["", "  ▸ Thought for 0 s", "", "  answer"]
        await pilot.click(offset=(4, 1))
        assert transcript.plain[1:4] == ["  ▾ Thought for 0 s", "    first thought", "    second thought"]
        assert transcript.plain[-1] == "  answer"
        assert "  answer" in screen(pilot.app)


async def test_a_long_message_of_the_users_is_folded() -> None:
    async with showing(height=30) as (pilot, transcript):
        transcript.add(UserText("\n".join(f"line {number}" for number in range(100))))
        assert transcript.plain[-2:] == ["▌ line 11", "▌ ▸ 88 more lines"]
        await pilot.click(offset=(4, 13))
        assert transcript.plain[-1] == "▌ line 99"


async def test_it_follows_the_end_unless_scrolled_up() -> None:
    async with showing() as (pilot, transcript):
        for number in range(30):
            transcript.add(Notice(f"notice {number}"))
        await pilot.pause()
        assert "  notice 29" in " ".join(screen(pilot.app))
        transcript.scroll_relative(y=-5, animate=False, immediate=True)
        before = screen(pilot.app)[:3]
        transcript.add(Notice("notice 30"))
        await pilot.pause()
        assert screen(pilot.app)[:3] == before
        assert "new output" in screen(pilot.app)[-1]
        transcript.scroll_end(animate=False, immediate=True)
        assert transcript.follow
        transcript.add(Notice("notice 31"))
        await pilot.pause()
        assert "notice 31" in " ".join(screen(pilot.app))


async def test_a_new_width_keeps_the_line_at_the_top_of_the_view() -> None:
    async with showing() as (pilot, transcript):
        for number in range(40):
            transcript.add(said(f"answer {number} {LONG}"))
        await pilot.pause()
        transcript.scroll_relative(y=-60, animate=False, immediate=True)
        await pilot.pause()
        top = next(line for line in screen(pilot.app) if "answer" in line)
        number = top.split()[1]
        for width in (30, 60, 25, 40):
            await pilot.resize_terminal(width, 12)
            await pilot.pause(0.1)
            shown = [line for line in screen(pilot.app) if "answer" in line]
            assert any(line.split()[1] in (number, str(int(number) - 1)) for line in shown), width
            assert not transcript.follow


async def test_a_theme_changes_every_line() -> None:
    async with showing() as (pilot, transcript):
        transcript.add(UserText("hello"))
        transcript.set_palette(Palette(theme.load("light")))
        await pilot.pause()
        styles = {
            segment.style.bgcolor.name
            for block in transcript.blocks
            for segment in block.lines[0].strip
            if segment.style
        }
        assert styles == {theme.load("light").ui["panel"]}


async def test_five_hundred_messages_are_no_burden() -> None:
    text = f"{LONG}\n\n- a **b**\n- c\n\n```python\ndef f(x):\n    return x + 1\n```\n" * 2
    async with showing(100, 40) as (pilot, transcript):
        for _ in range(250):
            transcript.add(UserText("a question"))
            transcript.add(said(text))
        await pilot.pause()
        drawn = 0
        original = Answer.lay_out

        def counted(self: Answer, width: int, palette: Palette) -> int:
            nonlocal drawn
            drawn += 1
            return original(self, width, palette)

        Answer.lay_out = counted  # type: ignore[method-assign]
        try:
            last = said("the last")
            transcript.add(last)
            assert drawn == 1  # what is there already isn't touched
            began = time.monotonic()
            await pilot.resize_terminal(80, 40)
            assert time.monotonic() - began < 5
        finally:
            Answer.lay_out = original  # type: ignore[method-assign]
