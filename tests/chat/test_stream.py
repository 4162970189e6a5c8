"""Ids to text: however an answer is cut up, its text is the same, and no part of a stop string is ever shown."""

import random

from hypothesis import given
from hypothesis import strategies as st

from northchat.chat.stream import Accumulator, PlainParser, StopStrings, TextDecoder
from northchat.messages import Event, Finish, Reasoning, Text, ToolCallArguments, ToolCallEnd, ToolCallStart, Usage
from northchat.model.tokenizer import Tokenizer


def cut(items: list, seed: int) -> list[list]:
    """The items in pieces of random lengths, some of them empty."""
    generator = random.Random(seed)
    pieces, at = [], 0
    while at < len(items):
        size = generator.choice((0, 1, 1, 2, 3, 7, len(items)))
        pieces.append(items[at : at + size])
        at += size
    return pieces


def text_of(events: list[Event]) -> str:
    return "".join(event.text for event in events if isinstance(event, Text))


@given(st.text(), st.integers())
def test_characters_come_out_whole_wherever_their_bytes_are_cut(tokenizer: Tokenizer, text: str, seed: int) -> None:
    decoder = TextDecoder(tokenizer)
    byte_ids = {tokenizer.token_bytes(token): token for token in range(tokenizer.vocab_size)}
    ids = [byte_ids[bytes([byte])] for byte in text.encode()]
    pieces = [decoder.feed(piece) for piece in cut(ids, seed)]
    assert not any("\ufffd" in piece for piece in pieces) or "\ufffd" in text
    assert "".join(pieces) + decoder.finish() == text


def test_a_character_that_is_never_completed_is_one_replacement_at_the_end(tokenizer: Tokenizer) -> None:
    byte_ids = {tokenizer.token_bytes(token): token for token in range(tokenizer.vocab_size)}
    decoder = TextDecoder(tokenizer)
    assert decoder.feed([byte_ids[b"a"], byte_ids[b"\xf0"], byte_ids[b"\x9f"]]) == "a"
    assert decoder.finish() == "\ufffd"


@given(st.text("abc", max_size=40), st.lists(st.text("abc", min_size=1, max_size=5), max_size=4), st.integers())
def test_stop_strings_don_t_depend_on_how_text_is_cut(text: str, stops: list[str], seed: int) -> None:
    filtered = StopStrings(stops)
    shown = ""
    for piece in cut(list(text), seed):
        shown += filtered.feed("".join(piece))
        assert not any(stop in shown for stop in stops)
    shown += filtered.finish()
    ends = [(text.find(stop) + len(stop), text.find(stop), stop) for stop in stops if stop in text]
    if ends:
        _, begin, stop = min(ends)
        assert (shown, filtered.matched) == (text[:begin], stop)
    else:
        assert (shown, filtered.matched) == (text, None)


@given(st.text("abc", max_size=30), st.lists(st.text("abc", min_size=1, max_size=5), min_size=1, max_size=3))
def test_text_is_held_back_only_while_it_may_become_a_stop_string(text: str, stops: list[str]) -> None:
    filtered = StopStrings(stops)
    shown = filtered.feed(text)
    if filtered.matched is None:
        held = text.removeprefix(shown)
        assert not held or any(stop.startswith(held) for stop in stops)


def test_the_tail_that_could_have_become_a_stop_string_is_shown_at_the_end() -> None:
    filtered = StopStrings(["own fox"])
    assert filtered.feed("The quick brown f") == "The quick br"
    assert filtered.finish() == "own f"


@given(st.text(), st.lists(st.text(min_size=1, max_size=4), max_size=3), st.integers())
def test_a_parser_s_events_don_t_depend_on_the_pieces(
    tokenizer: Tokenizer, text: str, stops: list[str], seed: int
) -> None:
    ids = tokenizer.encode(text)
    whole = PlainParser(tokenizer, stops)
    expected = text_of(whole.feed(ids) + whole.finish())
    parser = PlainParser(tokenizer, stops)
    events = [event for piece in cut(ids, seed) for event in parser.feed(piece)]
    assert text_of(events + parser.finish()) == expected
    assert parser.done == whole.done


def test_markers_are_no_text(tokenizer: Tokenizer) -> None:
    parser = PlainParser(tokenizer, [])
    marker = tokenizer.token_id("<|im_end|>")
    assert marker is not None
    assert (
        text_of(parser.feed([*tokenizer.encode("Hello"), marker, *tokenizer.encode("<|im_end|>")])) == "Hello<|im_end|>"
    )
    assert parser.channel == "text"
    parser.feed([marker])
    assert parser.channel == "none"


def test_events_add_up_to_a_message() -> None:
    answer = Accumulator()
    events: list[Event] = [
        *(Reasoning("hm"), Text("a"), Text("b"), ToolCallStart(0, "x", "f"), ToolCallArguments(0, '{"a":')),
        *(ToolCallArguments(0, "1}"), ToolCallEnd(0), ToolCallStart(1, "y", "g"), ToolCallEnd(1)),
        Finish("tool_calls", Usage()),
    ]
    for event in events:
        answer.add(event)
    message = answer.message
    assert (message.role, message.content, message.reasoning) == ("assistant", "ab", "hm")
    assert [(call.id, call.name, call.arguments) for call in message.tool_calls] == [
        ("x", "f", '{"a":1}'),
        ("y", "g", "{}"),
    ]
