"""Checkpoints' own templates: the same ids as transformers, no forged markers, nothing that escapes the sandbox."""

import json
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from test_chatml import TEMPLATE, nothing, roles, texts
from transformers import PreTrainedTokenizerFast

from northchat.chat.stream import TurnError
from northchat.chat.tags import TagParser
from northchat.chat.template import Template, TemplateFormat
from northchat.messages import Message, Sampling, ToolCall, ToolSpec, Turn
from northchat.model.tokenizer import Tokenizer

TOOLS = """
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0]['role'] == 'system' %}{{- messages[0]['content'] + '\\n\\n' }}{%- endif %}
    {{- '# Tools' }}
    {%- for tool in tools %}{{- '\\n' }}{{- tool | tojson }}{%- endfor %}
    {{- '\\nAnswer with <tool_call>{"name": ...}</tool_call>.<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'user' or message.role == 'system' and not (tools and loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content | trim + '<|im_end|>\\n' }}
    {%- elif message.role == 'assistant' %}
        {{- '<|im_start|>assistant\\n' + message.content }}
        {%- for call in message.tool_calls or [] %}
            {{- '\\n<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
            {{- call.function.arguments | tojson }}{{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {{- '<|im_start|>user\\n<tool_response>' + message.content + '</tool_response><|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and not enable_thinking %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}
"""
STRICT = """
{%- if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}
{%- for message in messages %}
    {%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}
    {{- '<|im_start|>' + message.role + ': ' + message.content }}
{%- endfor %}"""


def make(tokenizer: Tokenizer, source: str, tools: bool = False) -> TemplateFormat:
    return TemplateFormat(tokenizer, source, Sampling(), bos=None, eos=[], tools=tools)


def conversation() -> list[Message]:
    return [
        Message("system", "Be brief."),
        Message("user", "Weather in Köln?"),
        Message("assistant", "I look.", tool_calls=[ToolCall("c1", "weather", '{"place": "Köln", "days": [1, 2]}')]),
        Message("tool", "rain", tool_call_id="c1"),
        Message("assistant", "Rain."),
        Message("user", "And tomorrow?"),
    ]


def wire(messages: list[Message]) -> list[dict[str, object]]:
    result: list[dict[str, object]] = []
    for message in messages:
        calls = [
            {
                "type": "function",
                "id": call.id,
                "function": {"name": call.name, "arguments": json.loads(call.arguments)},
            }
            for call in message.tool_calls
        ]
        result.append({"role": message.role, "content": message.content} | ({"tool_calls": calls} if calls else {}))
    return result


SPEC = ToolSpec("weather", "Tells the weather", {"type": "object", "properties": {"place": {"type": "string"}}})


@settings(suppress_health_check=[HealthCheck.too_slow])
@given(messages=st.lists(st.tuples(roles, texts), min_size=1, max_size=5), source=st.sampled_from([TEMPLATE, TOOLS]))
def test_the_ids_are_those_of_the_reference(
    tokenizer: Tokenizer, tokenizer_file: Path, messages: list[tuple[str, str]], source: str
) -> None:
    reference = PreTrainedTokenizerFast(tokenizer_file=str(tokenizer_file), chat_template=source)
    turn = Turn([Message(role, text) for role, text in messages])  # type: ignore[arg-type]
    expected = reference.apply_chat_template(wire(turn.messages), add_generation_prompt=True, return_dict=False)
    assert make(tokenizer, source).render(turn, nothing) == expected


@pytest.mark.parametrize("effort", [None, "none", "high"])
def test_tools_calls_and_thinking_as_the_reference_renders_them(
    tokenizer: Tokenizer, tokenizer_file: Path, effort: str | None
) -> None:
    reference = PreTrainedTokenizerFast(tokenizer_file=str(tokenizer_file), chat_template=TOOLS)
    turn = Turn(conversation(), tools=[SPEC], reasoning_effort=effort)
    function = {"name": SPEC.name, "description": SPEC.description, "parameters": SPEC.parameters}
    thinking = {} if effort is None else {"enable_thinking": effort != "none"}
    expected = reference.apply_chat_template(
        wire(turn.messages),
        tools=[{"type": "function", "function": function}],
        add_generation_prompt=True,
        return_dict=False,
        **thinking,
    )
    assert make(tokenizer, TOOLS, tools=True).render(turn, nothing) == expected


FRAGMENTS = [
    *(
        "<|im_start|>",
        "<|im_end|>",
        "<think>",
        "<tool_call>",
        "<|im_",
        "start|>",
        "<",
        "|",
        ">",
        "<|",
        "im_end",
        "im_end|>",
    ),
    *("system\n", " ", "\n", '"', "\\", "\uf8f0", "\uf8f11\uf8f2", "0", "é"),
]
hostile = st.lists(st.sampled_from(FRAGMENTS), max_size=8).map("".join)
# A template that puts a text right between the two halves of a marker, and two texts side by side.
CARELESS = "{% for m in messages %}{% set x = m.content %}<|im_start|>{{ x }}<|{{ x }}|>{{ x }}{{ x }}end|>{% endfor %}"


@example(text=" <|im_", source=CARELESS)
@example(text="im_end|> ", source=CARELESS)
@example(text="im_end", source=CARELESS)
@given(text=hostile, source=st.sampled_from([TEMPLATE, TOOLS, CARELESS]))
def test_no_text_becomes_a_marker_and_none_is_lost(tokenizer: Tokenizer, text: str, source: str) -> None:
    def render(word: str) -> list[int]:
        call = ToolCall(word, word, json.dumps({word: [word]}))
        messages = [Message("user", word), Message("assistant", word, tool_calls=[call]), Message("tool", word)]
        spec = ToolSpec(word, word, {"type": "object", "properties": {word: {"description": word}}})
        return make(tokenizer, source, tools=True).render(Turn(messages, tools=[spec]), nothing)

    markers = set(tokenizer.markers.values())
    ids = render(text)
    assert [token for token in ids if token in markers] == [token for token in render("x") if token in markers]
    assert tokenizer.decode(ids).count(text.strip()) >= 3


def test_known_answers_are_replayed_as_they_were_generated(tokenizer: Tokenizer) -> None:
    ids = [token for letter in "Rain." for token in tokenizer.encode(letter)]
    known = {"Rain.": ids}
    turn = Turn(conversation())
    rendered = make(tokenizer, TOOLS).render(turn, lambda message: known.get(message.content))
    answer = tokenizer.token_id("<|im_start|>")
    assert answer is not None
    expected = [answer, *tokenizer.encode("assistant\n"), *ids, tokenizer.token_id("<|im_end|>")]
    assert any(rendered[at : at + len(expected)] == expected for at in range(len(rendered)))


def test_ids_that_spell_something_else_are_not_replayed(tokenizer: Tokenizer) -> None:
    turn = Turn(conversation())
    chat = make(tokenizer, TOOLS)
    assert chat.render(turn, lambda message: tokenizer.encode("Sun.")) == chat.render(turn, nothing)


def test_a_strict_template_gets_the_order_that_it_knows(tokenizer: Tokenizer) -> None:
    messages = [Message("system", "A"), Message("user", "B"), Message("user", "C"), Message("assistant", "D")]
    text = tokenizer.decode(make(tokenizer, STRICT).render(Turn(messages), nothing))
    assert text == "<|im_start|>user: A\n\nB\n\nC<|im_start|>assistant: D"


def test_a_template_s_own_words_reach_the_user(tokenizer: Tokenizer) -> None:
    chat = make(tokenizer, "{{ raise_exception('Only users may speak') }}")
    with pytest.raises(TurnError, match=r"^Only users may speak$"):
        chat.render(Turn([Message("user", "x")]), nothing)


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ self.__init__.__globals__ }}",
        "{{ 'a' * 10**9 }}",
        "{{ 9**9**9 }}",
        "{{ '%999999999d' % 1 }}",
        "{% for i in range(10**7) %}{{ i }}{% endfor %}",
        "{% for i in range(90000) %}{% for j in range(90000) %}{{ 'xxxxxxxxxxxxxxxx' }}{% endfor %}{% endfor %}",
        "{{ 1 / 0 }}",
        "{% include '/etc/passwd' %}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    ],
)
def test_the_sandbox_holds(source: str) -> None:
    with pytest.raises(TurnError) as caught:
        Template(source).render({"messages": [{"role": "user", "content": "x"}]})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("source", ["{% if %}", "{{ x", "{% for x in y %}"])
def test_a_damaged_template_is_refused_at_once(source: str) -> None:
    with pytest.raises(TurnError, match="damaged"):
        Template(source)


def test_training_s_marks_are_ignored() -> None:
    assert Template("a{% generation %}b{% endgeneration %}c").render({}) == "abc"


def test_an_open_think_tag_in_the_prompt_starts_the_parser_in_reasoning(tokenizer: Tokenizer) -> None:
    chat = make(tokenizer, "{{ messages[0].content }}<|im_start|>assistant\n<think>\n")
    turn = Turn([Message("user", "x")])
    parser = chat.parser(turn, chat.render(turn, nothing))
    assert isinstance(parser, TagParser)
    assert parser.channel == "reasoning"


def test_answers_end_with_the_markers_that_the_template_ends_turns_with(tokenizer: Tokenizer) -> None:
    chat = TemplateFormat(tokenizer, TEMPLATE, Sampling(), bos=None, eos=[5], tools=False)
    assert chat.stop_ids == [5, tokenizer.token_id("<|im_end|>")]
