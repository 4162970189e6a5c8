"""Answers that are helped along: thinking that takes too much, turns that end before they said anything."""

from collections.abc import Sequence
from typing import cast

import pytest
from scripted_core import ByteTokenizer

from northchat.chat.north import North
from northchat.chat.north_parser import Marker
from northchat.engine.protocol import Output, Submit
from northchat.host.state import State
from northchat.host.supervisor import Mailbox, Supervisor
from northchat.host.turns import Turns
from northchat.messages import Event, Finish, Message, Reasoning, Sampling, Text, ToolSpec, Turn


class NorthBytes(ByteTokenizer):
    """A byte per id, then North's markers."""

    def __init__(self) -> None:
        self.markers = {marker.value: 256 + index for index, marker in enumerate(Marker)}

    def token_id(self, marker: str) -> int | None:
        return self.markers.get(marker)

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode_bytes(self, ids: Sequence[int]) -> bytes:
        names = {token: marker.encode() for marker, token in self.markers.items()}
        return b"".join(names.get(token) or bytes([token]) for token in ids)

    def ids(self, *parts: str) -> list[int]:
        return [
            token for part in parts for token in ([self.markers[part]] if part in self.markers else self.encode(part))
        ]


class FakeSupervisor:
    """Answers each request with the next of its outputs at once."""

    vocab_size = 300

    def __init__(self, *answers: list[Output]) -> None:
        self.answers = list(answers)
        self.requests: list[Submit] = []
        self.aborted: list[int] = []

    def submit(self, mailbox: Mailbox, request: Submit) -> int:
        self.requests.append(request)
        rid = len(self.requests)
        for output in self.answers.pop(0):
            output.rid = rid
            mailbox.put(output)
        return rid

    def abort(self, rid: int) -> None:
        self.aborted.append(rid)


TOKENIZER = NorthBytes()
END_THINKING, START_TEXT, END_TEXT, END = (
    Marker.END_THINKING.value,
    Marker.START_TEXT.value,
    Marker.END_TEXT.value,
    Marker.END_OF_TURN.value,
)


def output(*parts: str, finish: str | None = None, **more: int) -> Output:
    return Output(0, TOKENIZER.ids(*parts), finish=finish, **more)  # type: ignore[arg-type]


async def answer(supervisor: FakeSupervisor, **turn: object) -> list[Event]:
    state = State("north", "cpu")
    state.update(status="ready", max_model_len=100_000)
    north = North(TOKENIZER, Sampling(temperature=0.0))
    turns = Turns(TOKENIZER, north, [], cast(Supervisor, supervisor), state)
    generation = await turns.start(Turn([Message("user", "Hi")], **turn))  # type: ignore[arg-type]
    events = [event async for piece in generation.pieces() for event in piece.events]
    generation.close()
    return events


def told(events: list[Event]) -> tuple[str, str, Finish]:
    reasoning = "".join(event.text for event in events if isinstance(event, Reasoning))
    text = "".join(event.text for event in events if isinstance(event, Text))
    (finish,) = [event for event in events if isinstance(event, Finish)]
    return reasoning, text, finish


async def test_a_turn_that_ends_right_after_thinking_is_opened_once() -> None:
    supervisor = FakeSupervisor(
        [output("Hm"), output(END_THINKING, END, finish="stop", cached=5)],
        [output("Yes", cached=9), output(END_TEXT, END, finish="stop")],
    )
    reasoning, text, finish = told(await answer(supervisor, max_tokens=1000))
    assert (reasoning, text, finish.reason) == ("Hm", "Yes", "stop")
    first, second = supervisor.requests
    assert second.prompt == first.prompt + TOKENIZER.ids("Hm", END_THINKING, START_TEXT)
    assert second.max_tokens == 1000 - 5
    assert finish.usage.completion_tokens == 4 + 1 + 5
    assert finish.usage.prompt_tokens == len(first.prompt)
    assert finish.usage.cached_tokens == 5


async def test_a_turn_that_stays_empty_ends() -> None:
    supervisor = FakeSupervisor(
        [output("Hm", END_THINKING, END, finish="stop")], [output(END_TEXT, END, finish="stop")]
    )
    assert told(await answer(supervisor))[1:2] == ("",)
    assert len(supervisor.requests) == 2


async def test_thinking_that_leaves_no_room_for_an_answer_is_closed() -> None:
    supervisor = FakeSupervisor(
        [*[output("x") for _ in range(936)], output("late")], [output("Yes", END_TEXT, END, finish="stop")]
    )
    reasoning, text, finish = told(await answer(supervisor, max_tokens=1000))
    # A quarter of 1,000 tokens is kept.
    assert (reasoning, text) == ("x" * 750, "Yes")
    assert supervisor.aborted == [1]
    assert supervisor.requests[1].prompt[-3:] == TOKENIZER.ids("x", END_THINKING, START_TEXT)
    assert supervisor.requests[1].max_tokens == 1000 - 752
    assert finish.usage.reasoning_tokens == 750


@pytest.mark.parametrize("turn", [{"max_tokens": 3}, {"stop": ["!"]}])
async def test_nothing_is_forced_without_room_or_after_a_stop_string(turn: dict[str, object]) -> None:
    supervisor = FakeSupervisor([output(END_THINKING, START_TEXT, "!", END, finish="stop")])
    told(await answer(supervisor, **turn))
    assert len(supervisor.requests) == 1


async def test_what_is_forced_fits_what_is_demanded() -> None:
    call = '[{"tool_call_id": "0", "tool_name": "now", "parameters": {}}]'
    supervisor = FakeSupervisor(
        [output("x") for _ in range(750)],
        [output(call, Marker.END_ACTION.value, END, finish="stop")],
    )
    finish = told(await answer(supervisor, max_tokens=1000, tools=[ToolSpec("now")], tool_choice="required"))[2]
    assert finish.reason == "tool_calls"
    first, second = supervisor.requests
    assert second.prompt[len(first.prompt) :] == TOKENIZER.ids("x" * 750, END_THINKING, Marker.START_ACTION.value)
    assert (first.generated, second.generated) == (0, 752)
    assert first.grammar == second.grammar != ""
