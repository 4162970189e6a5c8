from contextlib import aclosing
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from northchat.agent.loop import Conversation
from northchat.client import ClientError
from northchat.messages import (
    Event,
    Finish,
    Message,
    Reasoning,
    Sampling,
    Text,
    ToolCall,
    ToolCallArguments,
    ToolCallEnd,
    ToolCallStart,
    Turn,
    Usage,
)

FINISH = Finish("stop", Usage())


class FakeClient:
    """Answers with scripted events; an exception among them is raised."""

    def __init__(self, *answers: list[Any]) -> None:
        self.answers = list(answers)
        self.turns: list[tuple[Turn, str | None]] = []
        self.closed = 0

    async def stream(self, turn: Turn, model: str | None = None) -> Any:
        self.turns.append((turn, model))
        try:
            for event in self.answers.pop(0):
                if isinstance(event, Exception):
                    raise event
                yield event
        finally:
            self.closed += 1


def conversation(*answers: list[Any], system: str = "") -> tuple[Conversation, FakeClient]:
    client = FakeClient(*answers)
    return Conversation(client, "m", Sampling(seed=1), system=system), client  # type: ignore[arg-type]


async def ask(talk: Conversation, text: str) -> list[Event]:
    return [event async for event in talk.ask(text)]


async def test_each_turn_starts_with_all_that_was_said_before() -> None:
    talk, client = conversation([Text("one"), FINISH], [Text("two"), FINISH], system="be brief")
    await ask(talk, "first")
    await ask(talk, "second")
    (first, model), (second, _) = client.turns
    assert model == "m"
    assert first.sampling == Sampling(seed=1)
    assert first.messages == [Message("system", "be brief"), Message("user", "first")]
    assert second.messages == [*first.messages, Message("assistant", "one"), Message("user", "second")]
    assert talk.messages[-1] == Message("assistant", "two")


async def test_an_answer_becomes_one_message_with_reasoning_and_calls() -> None:
    talk, _ = conversation(
        [
            Reasoning("h"),
            Reasoning("m"),
            Text("a"),
            Text("b"),
            ToolCallStart(0, "c0", "ls"),
            ToolCallArguments(0, "{"),
            ToolCallArguments(0, "}"),
            ToolCallEnd(0),
            ToolCallStart(1, "c1", "now"),
            ToolCallEnd(1),
            Finish("tool_calls", Usage()),
        ]
    )
    await ask(talk, "go")
    assert talk.messages[-1] == Message(
        "assistant", "ab", "hm", [ToolCall("c0", "ls", "{}"), ToolCall("c1", "now", "")]
    )


async def test_a_stopped_answer_is_kept_marked_and_its_request_closed() -> None:
    talk, client = conversation([Text("half"), ToolCallStart(0, "c", "ls"), Text("never")])
    async with aclosing(talk.ask("go")) as events:
        async for event in events:
            if isinstance(event, ToolCallStart):
                break
    assert client.closed == 1
    assert talk.messages == [Message("user", "go"), Message("assistant", "half", interrupted=True)]


async def test_a_question_that_got_nothing_is_taken_back() -> None:
    talk, client = conversation([ClientError("busy")], [FINISH])
    with pytest.raises(ClientError):
        await ask(talk, "go")
    assert talk.messages == []
    await ask(talk, "go")
    assert client.turns[-1][0].messages == [Message("user", "go")]
    assert talk.messages == [Message("user", "go"), Message("assistant")]


async def test_an_answer_that_the_engine_aborted_is_marked() -> None:
    talk, _ = conversation([Text("half"), Finish("abort", Usage())])
    await ask(talk, "go")
    assert talk.messages[-1] == Message("assistant", "half", interrupted=True)


async def test_clear_keeps_the_system_prompt_alone() -> None:
    talk, _ = conversation([Text("one"), FINISH], system="be brief")
    await ask(talk, "first")
    talk.clear()
    assert talk.messages == [Message("system", "be brief")]


async def test_two_conversations_share_no_messages() -> None:
    one, _ = conversation([ToolCallStart(0, "c", "ls"), FINISH])
    other, _ = conversation([FINISH])
    await ask(one, "a")
    await ask(other, "b")
    assert other.messages == [Message("user", "b"), Message("assistant")]


steps = st.lists(st.tuples(st.sampled_from(["finish", "fail", "stop"]), st.lists(st.text(max_size=3), max_size=3)))


@given(steps)
async def test_history_only_grows_at_its_end_and_roles_alternate(script: list[tuple[str, list[str]]]) -> None:
    last = {"finish": FINISH, "fail": ClientError("x"), "stop": Text("never")}
    talk, client = conversation()
    for end, texts in script:
        client.answers = [[*map(Text, texts), last[end]]]
        before = list(talk.messages)
        try:
            async with aclosing(talk.ask("q")) as events:
                seen = 0
                while seen < len(texts) + (end != "stop"):
                    await anext(events)
                    seen += 1
        except ClientError:
            pass
        assert talk.messages[: len(before)] == before
        assert [m.role for m in talk.messages] == ["user", "assistant"] * (len(talk.messages) // 2)
    assert client.closed == sum(1 for end, texts in script if texts or end != "stop")
