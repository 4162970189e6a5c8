import asyncio
import json
from pathlib import Path

import pytest
from scripted_client import FINISH, LOADING, READY, STATS, Script, answer, sees, sees_no, shown_by, until
from textual.pilot import Pilot

from northchat.agent import backend
from northchat.client import ClientError, Health, LoadProgress
from northchat.config import Config
from northchat.messages import Finish, Progress, Reasoning, Stats, Text, Usage
from northchat.tui.app import ChatApp
from northchat.tui.prompt import Prompt
from northchat.tui.transcript import Transcript

SIZE = (70, 24)


async def say(pilot: Pilot[None], text: str) -> None:
    pilot.app.query_one(Prompt).text = text
    await pilot.press("enter")


def prompt_of(pilot: Pilot[None]) -> str:
    return pilot.app.query_one(Prompt).text


def contents(script: Script, turn: int = -1) -> list[tuple[str, str]]:
    return [(message.role, message.content) for message in script.turns[turn].messages]


async def test_a_question_and_its_answer_on_screen() -> None:
    script = Script([answer("Use a **slice**:\n\n```python\nreturn s[::-1]  # done\n```\n")])
    async with script.app().run_test(size=SIZE) as pilot:
        await sees(pilot, "ready")
        await say(pilot, "Reverse a string.")
        await sees(pilot, "● ready · 80 tok/s")
        lines = shown_by(pilot)
    assert lines[0].startswith("  northchat")
    first = lines.index("▌ Reverse a string.")
    assert lines[first:] == [
        "▌ Reverse a string.",
        "  Use a slice:",
        "    python",
        "    return s[::-1]  # done",
        "╭" + "─" * 68 + "╮",
        "│ ❯ Ask anything   / for commands                                    │",
        "╰" + "─" * 68 + "╯",
        " ● ready · 80 tok/s                    demo, chat only · smollm2-135m",
    ]


async def test_the_second_question_carries_the_first_answer() -> None:
    script = Script([answer("one"), answer("two")])
    async with script.app().run_test(size=SIZE) as pilot:
        await sees(pilot, "ready")
        await say(pilot, "first")
        await sees(pilot, "  one")
        await say(pilot, "second")
        await sees(pilot, "  two")
    assert contents(script) == [("user", "first"), ("assistant", "one"), ("user", "second")]
    assert script.models_asked == ["smollm2-135m"] * 2


async def test_what_is_typed_while_the_model_loads_is_sent_once_it_is_ready() -> None:
    go = asyncio.Event()
    progress = Health("loading", model="smollm2-135m", progress=LoadProgress("downloading", 34_000_000, 100_000_000))
    script = Script([answer("hello")], [[LOADING, progress, go, READY]])
    async with script.app(prompt="from the command line").run_test(size=SIZE) as pilot:
        await sees(pilot, "downloading 34% (34 of 100 MB)")
        await say(pilot, "typed early")
        await sees(pilot, "next  typed early")
        assert script.turns == []
        script.answers.append(answer("again"))
        go.set()
        await sees(pilot, "  again")
        await sees_no(pilot, "next  ")
    assert [contents(script, turn)[-1] for turn in (0, 1)] == [
        ("user", "from the command line"),
        ("user", "typed early"),
    ]


async def test_esc_stops_an_answer_and_keeps_what_came() -> None:
    script = Script([[Text("half an ans"), asyncio.Event()], answer("next")])
    async with script.app().run_test(size=SIZE) as pilot:
        await sees(pilot, "ready")
        await say(pilot, "go on")
        await sees(pilot, "half an ans")
        await say(pilot, "queued")
        await sees(pilot, "next  queued")
        await pilot.press("escape")
        await sees(pilot, "Stopped.")
        await sees(pilot, "ready")
        assert script.closed == 1
        assert prompt_of(pilot) == "queued"
        await pilot.press("enter")
        await until(pilot, lambda: len(script.turns) == 2)
    assert contents(script)[1] == ("assistant", "half an ans")
    assert script.turns[1].messages[1].interrupted


async def test_the_status_line_tells_what_the_engine_does() -> None:
    go = [asyncio.Event() for _ in range(4)]
    script = Script(
        [
            [
                Progress(Stats(prefill_done=512, prefill_total=2_048)),
                go[0],
                Reasoning("let me see\nwell"),
                go[1],
                Text("so"),
                Progress(STATS),
                go[2],
                FINISH,
            ]
        ]
    )
    async with script.app().run_test(size=(100, 24)) as pilot:
        await sees(pilot, "ready")
        await say(pilot, "think")
        await sees(pilot, "reading · 512 of 2,048 tokens")
        go[0].set()
        await sees(pilot, "thinking")
        await sees(pilot, "▸ Thinking")
        await sees(pilot, "    well")
        assert not any("let me see" in line for line in shown_by(pilot))
        go[1].set()
        await sees(pilot, "answering · 80 tok/s · TTFT 0.21 s")
        await sees(pilot, "▸ Thought for 0 s")
        await pilot.press("ctrl+t")
        await sees(pilot, "    let me see")
        go[2].set()
        await sees(pilot, "ready · 80 tok/s")
        await sees(pilot, "context 50 of 8,192 · demo, chat only · smollm2-135m · CPU")


async def test_a_failed_answer_says_what_to_do_and_enter_tries_again() -> None:
    failure = ClientError("The server ended the answer early", "Ask again", retryable=True)
    script = Script([[Text("half"), failure], answer("whole")])
    async with script.app().run_test(size=SIZE) as pilot:
        await sees(pilot, "ready")
        await say(pilot, "question")
        await sees(pilot, "▌ The server ended the answer early")
        await sees(pilot, "▌ Ask again")
        await sees(pilot, "▌ Enter on the empty prompt tries again")
        await sees(pilot, "● failed")
        await pilot.press("enter")
        await sees(pilot, "  whole")
    assert contents(script) == [("user", "question")]


async def test_a_host_that_dies_is_started_again_with_a_word_about_it() -> None:
    died = asyncio.Event()
    script = Script([answer("back")], [[READY, died, ClientError("The connection to the local engine broke")], [READY]])
    async with script.app().run_test(size=SIZE) as pilot:
        await sees(pilot, "ready")
        died.set()
        await sees(pilot, "The connection to the local engine broke; starting it again.")
        await sees(pilot, "● ready")
        await say(pilot, "there?")
        await sees(pilot, "  back")
    assert len(script.located) == 2


async def test_a_crashed_core_is_told_of() -> None:
    crashed = asyncio.Event()
    again = Health("ready", model="smollm2-135m", core_restarts=1)
    script = Script([], [[READY, crashed, again]])
    async with script.app().run_test(size=SIZE) as pilot:
        await sees(pilot, "ready")
        crashed.set()
        await sees(pilot, "The engine crashed and was started again.")


async def test_a_model_that_cannot_load_is_one_line_and_a_retry() -> None:
    failed = Health("failed", model="x.gguf", message="x.gguf is truncated; fetch it again")
    script = Script([answer("fine")], [[failed], [READY]])
    async with script.app().run_test(size=SIZE) as pilot:
        await sees(pilot, "▌ x.gguf is truncated; fetch it again")
        await sees(pilot, "● failed")
        await say(pilot, "are you there?")
        await sees(pilot, "  fine")


async def test_a_remote_server_is_named_in_the_status_line() -> None:
    script = Script([answer("hi")])
    config = Config(base_url="https://models.example.org/v1", origins={"base_url": "--base-url"})
    async with script.app(config).run_test(size=SIZE) as pilot:
        await sees(pilot, "● ready")
        await sees(pilot, "qwen3 · at models.example.org")
        await say(pilot, "hello")
        await sees(pilot, "  hi")
    assert script.models_asked == ["qwen3"]


@pytest.mark.parametrize("agreed", [True, False])
async def test_a_server_from_the_environment_is_confirmed_once(agreed: bool) -> None:
    script = Script([answer("hi")])
    config = Config(base_url="https://models.example.org/v1", origins={"base_url": "OPENAI_BASE_URL"})
    async with script.app(config).run_test(size=SIZE) as pilot:
        await sees(pilot, "OPENAI_BASE_URL names https://models.example.org/v1.")
        assert script.located == []
        await pilot.press("y" if agreed else "n")
        assert script.located == []  # too soon to have been read
        await pilot.pause(0.6)
        await pilot.press("y" if agreed else "n")
        await sees(pilot, "● ready")
        assert (script.located[0].base_url is not None) == agreed
    if agreed:
        async with script.app(config).run_test(size=SIZE) as pilot:
            await sees(pilot, "● ready")


async def test_slash_commands_complete_and_are_not_sent() -> None:
    script = Script([answer("x")])
    async with script.app().run_test(size=SIZE) as pilot:
        await sees(pilot, "ready")
        await pilot.press("slash")
        await sees(pilot, "/theme")
        await sees(pilot, "list themes, or switch to one")
        await pilot.press("t")
        await sees_no(pilot, "/model")
        await pilot.press("tab", "space", "e", "tab", "enter")
        await sees(pilot, "Theme ember.")
        assert pilot.app.theme == "ember"
        await say(pilot, "/nope")
        await sees(pilot, "No command /nope; /help lists them")
        await say(pilot, "/help")
        await sees(pilot, "Shift+Enter, Ctrl+J, \\ Enter")
        await say(pilot, "/usr/bin/env is what?")
        await until(pilot, lambda: script.turns)
    assert contents(script)[-1] == ("user", "/usr/bin/env is what?")


async def test_the_theme_list_previews_and_esc_takes_it_back() -> None:
    script = Script()
    async with script.app().run_test(size=SIZE) as pilot:
        await sees(pilot, "ready")
        await say(pilot, "/theme")
        await sees(pilot, "Night sky and ice blue")
        await pilot.press("down")
        await until(pilot, lambda: pilot.app.theme == "light")
        await pilot.press("escape")
        await until(pilot, lambda: pilot.app.theme == "dark")
        await say(pilot, "/theme")
        await sees(pilot, "Night sky and ice blue")
        await pilot.press("down", "enter")
        await sees(pilot, 'To keep it: theme = "light" in')
        assert pilot.app.theme == "light"


async def test_a_terminal_with_sixteen_colours_gets_a_theme_of_those(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLORTERM")
    monkeypatch.setenv("TERM", "linux")
    assert [Script().app(Config(theme=name)).theme for name in ("dark", "paper", "ansi")] == [
        "ansi",
        "ansi-light",
        "ansi",
    ]


async def test_model_switches_live_and_the_conversation_goes_on() -> None:
    script = Script([answer("small"), answer("large")], [[READY], [Health("ready", model="other.gguf")]])
    async with script.app().run_test(size=SIZE) as pilot:
        await sees(pilot, "ready")
        await say(pilot, "first")
        await sees(pilot, "  small")
        await say(pilot, "/model other.gguf")
        await sees(pilot, "Switching to other.gguf.")
        await sees(pilot, "· other.gguf")
        await say(pilot, "second")
        await sees(pilot, "  large")
    assert script.models_asked == ["smollm2-135m", "other.gguf"]
    assert contents(script) == [("user", "first"), ("assistant", "small"), ("user", "second")]


async def test_to_choose_the_model_in_use_says_so_and_keeps_the_answer() -> None:
    script = Script([[Text("half an ans"), asyncio.Event()]])
    async with script.app().run_test(size=SIZE) as pilot:
        await sees(pilot, "ready")
        await say(pilot, "first")
        await sees(pilot, "half an ans")
        await say(pilot, "/model smollm2-135m")
        await sees(pilot, "smollm2-135m is in use already.")
        await sees(pilot, "answering")
        await sees_no(pilot, "Switching")


async def test_a_fault_in_the_thread_of_input_is_one_line(home: Path) -> None:
    app = Script().app()
    async with app.run_test(size=SIZE) as pilot:
        await sees(pilot, "ready")
        app.panic("OSError: the terminal is gone")
    assert app.return_code == 1
    assert app.last_words.startswith("northchat: a fault in the terminal app")
    assert "the terminal is gone" in (home / "state/northchat/tui.log").read_text()


async def test_clear_forgets() -> None:
    script = Script([answer("one"), answer("two")])
    async with script.app().run_test(size=SIZE) as pilot:
        await sees(pilot, "ready")
        await say(pilot, "first")
        await sees(pilot, "  one")
        await say(pilot, "/clear")
        await sees_no(pilot, "  one")
        await say(pilot, "second")
        await sees(pilot, "  two")
    assert contents(script) == [("user", "second")]


async def test_clear_in_the_middle_of_an_answer_forgets_that_too() -> None:
    script = Script([[Text("half an ans"), asyncio.Event()], answer("two")])
    async with script.app().run_test(size=SIZE) as pilot:
        await sees(pilot, "ready")
        await say(pilot, "first")
        await sees(pilot, "half an ans")
        await say(pilot, "/clear")
        await sees_no(pilot, "half an ans")
        await say(pilot, "second")
        await sees(pilot, "  two")
    assert contents(script) == [("user", "second")]


async def test_servers_found_on_this_machine_are_offered(monkeypatch: pytest.MonkeyPatch) -> None:
    async def found(*ports: object) -> list[backend.Choice]:
        return [backend.Choice("qwen3", "http://127.0.0.1:11434/v1", "Ollama")]

    monkeypatch.setattr(backend, "find_servers", found)
    script = Script([answer("hi")])
    async with script.app(Config()).run_test(size=SIZE) as pilot:
        await sees(pilot, "Ollama serves qwen3 on this machine; /model qwen3 switches to it")
        await sees(pilot, "● ready")
        await say(pilot, "/model")
        await sees(pilot, "qwen3         Ollama")
        await pilot.press("down", "enter")
        await sees(pilot, "Switching to qwen3 at 127.0.0.1:11434.")
        await sees(pilot, "qwen3 · at 127.0.0.1:11434")
        await say(pilot, "hello")
        await sees(pilot, "  hi")
    assert script.models_asked == ["qwen3"]


async def test_ctrl_c_clears_and_twice_leaves() -> None:
    script = Script()
    async with script.app().run_test(size=SIZE) as pilot:
        await sees(pilot, "ready")
        await pilot.press("a", "b", "ctrl+c")
        assert prompt_of(pilot) == ""
        assert pilot.app.is_running
        await pilot.press("ctrl+c")
        await sees(pilot, "Ctrl+C again leaves")
        await pilot.press("ctrl+c")
        await until(pilot, lambda: not pilot.app._running)
    assert pilot.app.return_code == 0


async def test_what_stays_loaded_is_said_on_leaving() -> None:
    for device, words in (("CPU, 2 threads", ""), ("NVIDIA H200", "smollm2-135m stays loaded for a while")):
        script = Script(states=[[Health("ready", model="smollm2-135m", device=device)]])
        async with script.app().run_test(size=SIZE) as pilot:
            await sees(pilot, "● ready")
            await pilot.press("ctrl+d")
            assert isinstance(pilot.app, ChatApp)
            await until(pilot, lambda: not pilot.app._running)
        assert pilot.app.last_words.startswith(words)
        assert bool(pilot.app.last_words) == bool(words)


async def test_ctrl_d_leaves_only_an_empty_prompt() -> None:
    script = Script()
    async with script.app().run_test(size=SIZE) as pilot:
        await sees(pilot, "ready")
        await pilot.press("a", "b", "left", "ctrl+d")
        assert prompt_of(pilot) == "a"
        await pilot.press("backspace", "ctrl+d")
        await until(pilot, lambda: not pilot.app._running)


async def test_nothing_a_model_or_server_says_is_markup_or_reaches_the_terminal_raw() -> None:
    evil = "\x1b]52;c;aGVsbG8=\x1b\\arr[/path] [b + [1 \x9b31m\u202e [red]x[/red]"
    health = Health("ready", model=evil, device=evil, notes=[evil], can_call_tools=False)
    failure = ClientError(evil, evil)
    script = Script([[Text(evil), Reasoning(evil), failure]], [[health]])
    async with script.app().run_test(size=(100, 30)) as pilot:
        await sees(pilot, "ready")
        await say(pilot, "hello [/red]")
        await sees(pilot, "failed")
        lines = "".join(shown_by(pilot))
    assert "arr[/path] [b + [1" in lines
    assert "hello [/red]" in lines
    assert not set(lines) & set("\x1b\x9b\u202e\x07")


async def test_scrolled_up_the_view_stays_and_a_mark_tells_of_new_output() -> None:
    more, end = asyncio.Event(), asyncio.Event()
    long = "".join(f"line {number}\n\n" for number in range(60))
    script = Script([[Text(long), more, Text("news\n\n" * 9), end, FINISH]])
    async with script.app().run_test(size=SIZE) as pilot:
        await sees(pilot, "ready")
        await say(pilot, "go")
        await sees(pilot, "line 59")
        await pilot.press("pageup")
        await sees_no(pilot, "line 59")
        before = [line[:20].rstrip() for line in shown_by(pilot) if "line " in line]
        more.set()
        await sees(pilot, "↓ new output")
        after = [line[:20].rstrip() for line in shown_by(pilot) if "line " in line]
        assert after == before
        await pilot.press("ctrl+end")
        await sees(pilot, "news")
        await sees_no(pilot, "↓ new output")
        end.set()


async def test_history_outlives_the_session(home: Path) -> None:
    script = Script([answer("x"), answer("y")])
    async with script.app().run_test(size=SIZE) as pilot:
        await sees(pilot, "ready")
        await say(pilot, "one\ntwo")
        await sees(pilot, "  x")
    assert json.loads((home / "state/northchat/history.jsonl").read_text()) == "one\ntwo"
    async with Script().app().run_test(size=SIZE) as pilot:
        await pilot.press("d", "up")
        assert prompt_of(pilot) == "one\ntwo"
        await pilot.press("down")
        assert prompt_of(pilot) == "d"


@pytest.mark.parametrize("keys", [["ctrl+j"], ["shift+enter"], ["backslash", "enter"]])
async def test_several_lines(keys: list[str]) -> None:
    script = Script([answer("x")])
    async with script.app().run_test(size=SIZE) as pilot:
        await sees(pilot, "ready")
        await pilot.press("a", *keys, "b", "enter")
        await until(pilot, lambda: script.turns)
    assert contents(script)[-1] == ("user", "a\nb")


async def test_a_resize_wraps_anew_and_keeps_the_place() -> None:
    text = "".join(f"paragraph {number} " + "word " * 20 + "\n\n" for number in range(40))
    script = Script([answer(text)])
    async with script.app().run_test(size=(90, 24)) as pilot:
        await sees(pilot, "ready")
        await say(pilot, "go")
        await sees(pilot, "paragraph 39")
        await sees(pilot, "● ready")
        await pilot.resize_terminal(60, 24)
        await sees(pilot, "paragraph 39")
        transcript = pilot.app.query_one(Transcript)
        assert transcript.follow
        await until(pilot, lambda: max(len(line) for line in transcript.plain) <= 59)


async def test_an_answer_cut_off_says_so() -> None:
    script = Script([[Text("half"), Finish("length", Usage(), STATS)]])
    async with script.app().run_test(size=SIZE) as pilot:
        await sees(pilot, "ready")
        await say(pilot, "go")
        await sees(pilot, "Cut off at the token limit.")
