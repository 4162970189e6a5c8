"""North's answers: every way in which models stray from the markup, and all ways to cut an answer up."""

import json
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from north_rig import encode_with_markers, north_tokenizer_file

from northchat.chat.north import North
from northchat.chat.north_parser import NorthParser
from northchat.chat.stream import Accumulator
from northchat.messages import Event, Message, Sampling, Text, ToolCallArguments, ToolCallStart, ToolSpec, Turn
from northchat.model.tokenizer import Tokenizer

TOOLS = [ToolSpec("bash"), ToolSpec("read")]
THINKING, NOT_THINKING = "<|START_THINKING|>", "<|START_THINKING|><|END_THINKING|>"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer(north_tokenizer_file(tmp_path_factory.mktemp("north")))


@pytest.fixture(scope="module")
def north(tokenizer: Tokenizer) -> North:
    return North(tokenizer, Sampling())


class Rig:
    def __init__(self, tokenizer: Tokenizer, north: North) -> None:
        self.tokenizer, self.north = tokenizer, north

    def parser(self, prompt: str = THINKING, tools: bool = True, **turn: Any) -> NorthParser:
        asked = Turn([], TOOLS if tools else [], **turn)
        parser = self.north.parser(asked, encode_with_markers(self.tokenizer, prompt))
        assert isinstance(parser, NorthParser)
        return parser

    def events(self, answer: str, **parser: Any) -> list[Event]:
        parse = self.parser(**parser)
        return [*parse.feed(encode_with_markers(self.tokenizer, answer)), *parse.finish()]

    def message(self, answer: str, **parser: Any) -> tuple[str, str, list[tuple[str, Any]]]:
        """Reasoning, text, and calls as (name, arguments)."""
        return shown(self.events(answer, **parser))


@pytest.fixture(scope="module")
def rig(tokenizer: Tokenizer, north: North) -> Rig:
    return Rig(tokenizer, north)


def accumulated(events: Sequence[Event]) -> Message:
    total = Accumulator()
    for event in events:
        total.add(event)
    return total.message


def shown(events: Sequence[Event]) -> tuple[str, str, list[tuple[str, Any]]]:
    message = accumulated(events)
    assert len({call.id for call in message.tool_calls}) == len(message.tool_calls)
    return message.reasoning, message.content, [(call.name, parsed(call.arguments)) for call in message.tool_calls]


def parsed(arguments: str) -> Any:
    try:
        return json.loads(arguments)
    except ValueError:
        return arguments


def action(*calls: str) -> str:
    return f"<|START_ACTION|>[\n    {', '.join(calls)}\n]<|END_ACTION|>"


CALL = '{"tool_call_id": "0", "tool_name": "bash", "parameters": {"cmd": "ls -l"}}'
OTHER = '{"tool_call_id": "1", "tool_name": "read", "parameters": {"path": "größe 🎉", "n": [1, {"x": null}]}}'
LS = ("bash", {"cmd": "ls -l"})
READ = ("read", {"path": "größe 🎉", "n": [1, {"x": None}]})


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        # As the grammar has it.
        ("Hm.<|END_THINKING|><|START_TEXT|>Yes.<|END_TEXT|>", ("Hm.", "Yes.", [])),
        ("Hm.<|END_THINKING|>" + action(CALL, OTHER), ("Hm.", "", [LS, READ])),
        ("<|END_THINKING|><|START_TEXT|>So:<|END_TEXT|>" + action(CALL), ("", "So:", [LS])),
        # Thinking that is opened again, or never closed.
        ("<|START_THINKING|>Hm.<|END_THINKING|><|START_TEXT|>Yes<|END_TEXT|>", ("Hm.", "Yes", [])),
        ("A<|END_THINKING|><|START_THINKING|>B<|END_THINKING|><|START_TEXT|>C<|END_TEXT|>", ("AB", "C", [])),
        ("Hm.<|START_TEXT|>Yes<|END_TEXT|>", ("Hm.", "Yes", [])),
        ("Hm." + action(CALL), ("Hm.", "", [LS])),
        ("Hm", ("Hm", "", [])),
        ("Hm<|END_THINKING|>", ("Hm", "", [])),
        # Text without its markers.
        ("Hm<|END_THINKING|>Yes", ("Hm", "Yes", [])),
        ("Hm<|END_THINKING|>\n", ("Hm", "", [])),
        ("Hm<|END_THINKING|><|START_TEXT|>Ye", ("Hm", "Ye", [])),
        # Markers out of place.
        ("Hm<|END_THINKING|>" + action(CALL) + "<|END_TEXT|>", ("Hm", "", [LS])),
        ("Hm<|END_THINKING|><|END_ACTION|><|START_TEXT|>A<|UNRELATED_TOKEN|>B<|END_TEXT|>", ("Hm", "AB", [])),
        ("<|CHATBOT_TOKEN|>Hm<|END_THINKING|><|START_TEXT|>A<|END_TEXT|><|START_TEXT|>B<|END_TEXT|>", ("Hm", "AB", [])),
        # Several blocks of calls.
        ("<|END_THINKING|>" + action(CALL) + action(OTHER), ("", "", [LS, READ])),
    ],
)
def test_blocks(answer: str, expected: tuple[str, str, list[Any]], rig: Rig) -> None:
    assert rig.message(answer) == expected


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ("<|START_TEXT|>Yes<|END_TEXT|>", ("", "Yes", [])),
        ("Yes", ("", "Yes", [])),
        ("I ponder.<|END_THINKING|><|START_TEXT|>Yes<|END_TEXT|>", ("I ponder.", "Yes", [])),
        ("I ponder.<|END_THINKING|>Yes", ("I ponder.", "Yes", [])),
        ("I'll list." + action(CALL), ("I'll list.", "", [LS])),
        ("<|START_THINKING|>Hm<|END_THINKING|><|START_TEXT|>Yes<|END_TEXT|>", ("Hm", "Yes", [])),
    ],
)
def test_blocks_with_thinking_off(answer: str, expected: tuple[str, str, list[Any]], rig: Rig) -> None:
    assert rig.message(answer, prompt=NOT_THINKING) == expected


def test_long_prose_without_any_marker_is_not_held_back_for_ever(rig: Rig) -> None:
    parser = rig.parser(NOT_THINKING)
    prose = "word and word, " * 200
    early = parser.feed(rig.tokenizer.encode(prose))
    assert accumulated(early).content
    assert accumulated([*early, *parser.finish()]).content == prose


@pytest.mark.parametrize(
    ("block", "calls"),
    [
        (CALL, [LS]),
        (f"[{CALL}", [LS]),
        (f"[{CALL}, {OTHER}]", [LS, READ]),
        (f"[{CALL},\n{OTHER},]", [LS, READ]),
        ('[{"tool_call_id": 0, "tool_name": "read", "parameters": {"a": 1}}]', [("read", {"a": 1})]),
        ('[{"parameters": {"a": 1}, "tool_name": "read", "tool_call_id": "0"}]', [("read", {"a": 1})]),
        ('[{"tool_name": "read", "extra": {"name": "x", "y": [1]}, "parameters": {"a": 1}}]', [("read", {"a": 1})]),
        ('[{"name": "read", "arguments": {"a": 1}}]', [("read", {"a": 1})]),
        ('[{"tool_call_id": "0", "tool_name": "read", "parameters": {}}]', [("read", {})]),
        ('[{"tool_call_id": "0", "tool_name": "read"}]', [("read", {})]),
        ('[{"tool_name": "read", "parameters": null}]', [("read", {})]),
        ('[{"tool_name": "read", "parameters": "{\\"a\\": 1}"}]', [("read", {"a": 1})]),
        ('[{"tool_name": "read", "parameters": {"a": 1}, "parameters": {"b": 2}}]', [("read", {"a": 1})]),
        ('[{"tool_name": "r\\u0065ad", "parameters": {}}]', [("read", {})]),
        # Strings that are no JSON: a regular expression's backslashes, raw line breaks.
        (r'[{"tool_name": "bash", "parameters": {"cmd": "grep a\|b \d \u12 \\n \n"}}]',
         [("bash", {"cmd": "grep a\\|b \\d \\u12 \\n \n"})]),
        ('[{"tool_name": "bash", "parameters": {"cmd": "a\nb\tc"}}]', [("bash", {"cmd": "a\nb\tc"})]),
        # Brackets and markers within strings are the strings'.
        ('[{"tool_name": "bash", "parameters": {"cmd": "echo }] [{ \\" <|END_ACTION|> <|END_TEXT|> done"}}]',
         [("bash", {"cmd": 'echo }] [{ " <|END_ACTION|> <|END_TEXT|> done'})]),
        # Wrong or missing brackets.
        ('[{"tool_name": "read", "parameters": {"a": [1}}]', [("read", {"a": [1]})]),
        ('[{"tool_name": "read", "parameters": {"a": {"b": [1, 2', [("read", {"a": {"b": [1, 2]}})]),
        ('[{"tool_name": "read", "parameters": {"a": 1}', [("read", {"a": 1})]),
    ],
)  # fmt: skip
def test_calls_however_they_are_written(block: str, calls: list[Any], rig: Rig) -> None:
    for end in ("<|END_ACTION|>", ""):
        assert rig.message(f"Hm<|END_THINKING|><|START_ACTION|>{block}{end}") == ("Hm", "", calls)


@pytest.mark.parametrize("block", ['[{"tool_name": "bash", "parameters": {"cmd": "rm -rf /tm',
                                   '[{"tool_name": "bash", "parameters": "{\\"cmd\\": \\"rm -rf /tm'])  # fmt: skip
def test_a_call_cut_off_within_a_string_stays_unusable(block: str, rig: Rig) -> None:
    _, text, [(name, arguments)] = rig.message(f"<|END_THINKING|><|START_ACTION|>{block}")
    assert (text, name) == ("", "bash")
    assert isinstance(arguments, str)
    assert "rm -rf /tm" in arguments


@pytest.mark.parametrize("block", ["[", "", '[{"tool_call_id": "0", "tool_name": "ba', '[{"tool_ca'])
def test_a_call_cut_off_before_its_name_is_none(block: str, rig: Rig) -> None:
    assert rig.message(f"Hm<|END_THINKING|><|START_ACTION|>{block}") == ("Hm", "", [])


def test_a_block_that_holds_no_call_is_text(rig: Rig) -> None:
    assert rig.message("<|END_THINKING|><|START_ACTION|>I would rather not.<|END_ACTION|>")[1] == "I would rather not."
    assert rig.message('<|END_THINKING|><|START_ACTION|>[{"cmd": "ls"}]<|END_ACTION|>')[1] == '{"cmd": "ls"}'


def test_a_string_that_was_never_closed_does_not_swallow_the_end_of_the_block(rig: Rig) -> None:
    [(_, arguments)] = rig.message('<|START_ACTION|>[{"name": "bash", "arguments": {"cmd": "ls<|END_ACTION|>')[2]
    assert "END_ACTION" not in arguments


def test_without_tools_a_block_of_calls_is_text(rig: Rig) -> None:
    assert rig.message("Hm<|END_THINKING|>" + f"<|START_ACTION|>{CALL}<|END_ACTION|>", tools=False) == ("Hm", CALL, [])
    assert rig.message("<|START_ACTION|>" + CALL, tool_choice="none") == ("", CALL, [])


def test_names_and_arguments_stream_as_they_come(rig: Rig) -> None:
    parser = rig.parser()
    parser.feed(encode_with_markers(rig.tokenizer, "<|END_THINKING|><|START_ACTION|>"))
    seen: list[str] = []
    for token in rig.tokenizer.encode('[{"tool_name": "bash", "parameters": {"cmd": "a long command"}}]'):
        for event in parser.feed([token]):
            match event:
                case ToolCallStart(name=name):
                    seen.append(name)
                case ToolCallArguments(text=text):
                    seen.append(text)
    assert seen[0] == "bash"
    assert "".join(seen[1:]) == '{"cmd": "a long command"}'
    assert len(seen) > 5


def test_only_one_call_where_one_is_wanted(rig: Rig) -> None:
    parser = rig.parser(parallel_tool_calls=False)
    events = parser.feed(encode_with_markers(rig.tokenizer, "<|END_THINKING|>" + action(CALL, OTHER)))
    assert parser.done
    assert parser.called
    assert shown([*events, *parser.finish()]) == ("", "", [LS])


def test_stop_strings_cut_text_only(rig: Rig) -> None:
    answer = "a STOP b<|END_THINKING|><|START_TEXT|>c STOP d<|END_TEXT|>" + action(CALL)
    assert rig.message(answer, stop=["STOP"]) == ("a STOP b", "c ", [])


def test_incomplete_characters_end_with_their_block(rig: Rig) -> None:
    half = next(token for token in range(300) if rig.tokenizer.token_bytes(token) == "🎉".encode()[:1])
    text = encode_with_markers(rig.tokenizer, "<|START_TEXT|>a<|END_TEXT|><|START_TEXT|>b<|END_TEXT|>")
    at = text.index(rig.tokenizer.encode("a")[0]) + 1
    parser = rig.parser(NOT_THINKING)
    assert shown([*parser.feed([*text[:at], half, *text[at:]]), *parser.finish()])[1] == "a\ufffdb"


def test_channels_tell_where_ids_went(rig: Rig) -> None:
    parser = rig.parser()
    assert parser.channel == "reasoning"
    for text, channel in (("Hm", "reasoning"), ("<|END_THINKING|>", "none"), ("<|START_TEXT|>", "text"),
                          ("<|END_TEXT|>", "none"), ("<|START_ACTION|>", "tool")):  # fmt: skip
        parser.feed(encode_with_markers(rig.tokenizer, text))
        assert parser.channel == channel


# ---- forced closes ----


@pytest.mark.parametrize(
    ("answer", "opened"),
    [
        ("Hm<|END_THINKING|>", "<|START_TEXT|>"),
        ("Hm", "<|END_THINKING|><|START_TEXT|>"),
        ("Hm<|END_THINKING|><|START_TEXT|>Yes", ""),
        ("Hm<|END_THINKING|>Yes", ""),
        ("Hm<|END_THINKING|>" + action(CALL), ""),
    ],
)
def test_an_answer_that_ends_after_thinking_is_opened_once(answer: str, opened: str, rig: Rig) -> None:
    parser = rig.parser()
    parser.feed(encode_with_markers(rig.tokenizer, answer))
    ids = parser.reopen()
    assert rig.tokenizer.decode(ids) == opened
    if ids:
        assert parser.feed(ids) == []
        assert not parser.reopen()
        events = [*parser.feed(rig.tokenizer.encode("Yes")), *parser.finish()]
        assert accumulated(events).content == "Yes"


def test_thinking_can_be_closed(rig: Rig) -> None:
    parser = rig.parser()
    parser.feed(rig.tokenizer.encode("and on and on"))
    assert rig.tokenizer.decode(parser.close_thinking()) == "<|END_THINKING|><|START_TEXT|>"
    parser.feed(parser.close_thinking())
    assert parser.close_thinking() == ()


# ---- all splits ----

PIECES = ["<|START_THINKING|>", "<|END_THINKING|>", "<|START_TEXT|>", "<|END_TEXT|>", "<|START_ACTION|>",
          "<|END_ACTION|>", "<|UNRELATED_TOKEN|>", "Hm 🎉", "größe\n", " ", "STOP", CALL, OTHER, "[", ", ", "]",
          '{"tool_name": "bash", "parameters": {"cmd": "a\\|b', '"}}', "\\", '"']  # fmt: skip


@settings(deadline=None, max_examples=300)
@given(
    answer=st.lists(st.sampled_from(PIECES), max_size=12).map("".join),
    cuts=st.lists(st.integers(0, 400)),
    prompt=st.sampled_from([THINKING, NOT_THINKING]),
    tools=st.booleans(),
)
def test_however_an_answer_is_cut_up_it_says_the_same(
    rig: Rig, answer: str, cuts: list[int], prompt: str, tools: bool
) -> None:
    ids = encode_with_markers(rig.tokenizer, answer)
    borders = sorted({0, len(ids), *(cut for cut in cuts if cut < len(ids))})
    chunks = [ids[left:right] for left, right in pairwise(borders)]
    parsers = [rig.parser(prompt, tools, stop=["STOP"]) for _ in range(3)]
    told = [
        [event for chunk in way for event in parser.feed(chunk)] + parser.finish()
        for parser, way in zip(parsers, (chunks, [ids], [[token] for token in ids]), strict=True)
    ]
    messages = [shown(events) for events in told]
    assert messages[0] == messages[1] == messages[2]
    assert len({(parser.done, parser.called, parser.channel) for parser in parsers}) == 1
    reasoning, text, _ = messages[0]
    if not any(piece in answer for piece in ('{"tool_name": "bash", "parameters": {"cmd": "a', '"')):
        assert "<|" not in reasoning + text


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**9), 10**9) | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text('abπ"\\{}[],: ', max_size=4), inner, max_size=3)
    ),
    max_leaves=6,
)


@settings(deadline=None, max_examples=200)
@given(
    calls=st.lists(
        st.tuples(st.sampled_from(["bash", "read", 'odd "name"']), st.dictionaries(st.text(max_size=5), JSON)),
        max_size=3,
    ),
    order=st.permutations(["tool_call_id", "tool_name", "parameters"]),
    indent=st.sampled_from([None, 0, 2]),
    ascii_only=st.booleans(),
)
def test_any_calls_come_back(
    rig: Rig, calls: list[tuple[str, dict[str, Any]]], order: list[str], indent: int | None, ascii_only: bool
) -> None:
    written = [
        {key: {"tool_call_id": str(number), "tool_name": name, "parameters": arguments}[key] for key in order}
        for number, (name, arguments) in enumerate(calls)
    ]
    # Surrogates can't be written as UTF-8; JSON may hold them as escapes.
    block = json.dumps(written, indent=indent, ensure_ascii=ascii_only).encode("utf-8", "replace").decode()
    expected = [(call["tool_name"], call["parameters"]) for call in json.loads(block)]
    assert rig.message(f"<|END_THINKING|><|START_ACTION|>{block}<|END_ACTION|>")[2] == expected


# ---- a second opinion ----


@pytest.fixture(scope="module")
def melody() -> Callable[[str], tuple[str, str, list[Any]]]:
    module = pytest.importorskip("cohere_melody")

    def parse(answer: str) -> tuple[str, str, list[Any]]:
        parser = module.PyFilter(module.PyFilterOptions().cmd4())
        result = parser.process_full_text(answer)
        calls = [(call.name, parsed(call.arguments)) for call in result.tool_calls]
        return result.reasoning or "", result.content or "", calls

    return parse


@pytest.mark.parametrize(
    "answer",
    [
        "Hm.<|END_THINKING|><|START_TEXT|>Yes.<|END_TEXT|>",
        "Hm.<|END_THINKING|>" + action(CALL, OTHER),
        "<|START_THINKING|>Hm.<|END_THINKING|><|START_TEXT|>größe 🎉<|END_TEXT|>",
        "Hm.<|END_THINKING|><|START_TEXT|>So:<|END_TEXT|>" + action(CALL),
        "Hm.<|END_THINKING|>" + action(CALL) + action(OTHER),
        "Hm.<|END_THINKING|>" + f"<|START_ACTION|>{CALL}<|END_ACTION|>",
    ],
)
def test_cohere_melody_agrees(answer: str, melody: Callable[[str], tuple[str, str, list[Any]]], rig: Rig) -> None:
    assert rig.message(answer) == melody(answer)


def test_text_events_are_never_empty(rig: Rig) -> None:
    events = rig.events("Hm<|END_THINKING|><|START_TEXT|><|END_TEXT|>" + action(CALL))
    assert not [event for event in events if isinstance(event, Text)]
