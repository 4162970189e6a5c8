"""/v1/completions: text and ids in, text out."""

from typing import Any

import openai
import pytest
from host_rig import Served
from openai import OpenAI


@pytest.fixture
def client(served: Served) -> OpenAI:
    served.script.set()
    return OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0)


def test_text_strings_and_ids(client: OpenAI, served: Served) -> None:
    served.script.set(answers=["!"])
    for prompt, count in (("abc", 1), (["abc", "de"], 2), ([97, 98], 1), ([[97], [98, 99]], 2)):
        answer = client.completions.create(model="x", prompt=prompt)  # type: ignore[arg-type]
        assert [choice.text for choice in answer.choices] == ["!"] * count
        assert [choice.index for choice in answer.choices] == list(range(count))
    assert [prompt for _, prompt in served.script.submits()[-6:]] == ["abc", "abc", "de", "ab", "a", "bc"]


def test_streams_are_the_same_text(client: OpenAI, served: Served) -> None:
    served.script.set(answers=["é, 🎉 and more"], per_step=2)
    for options in ({}, {"stop": "and"}, {"echo": True}, {"n": 2}):
        request: dict[str, Any] = {"model": "x", "prompt": "Hi ", "max_tokens": 30, **options}
        whole = client.completions.create(**request)
        texts: dict[int, str] = {}
        for chunk in client.completions.create(**request, stream=True):
            texts[chunk.choices[0].index] = texts.get(chunk.choices[0].index, "") + chunk.choices[0].text
        assert texts == {choice.index: choice.text for choice in whole.choices}


def test_sixteen_tokens_unless_told_otherwise(client: OpenAI) -> None:
    answer = client.completions.create(model="x", prompt="x" * 30)
    assert answer.choices[0].text == "x" * 16
    assert answer.choices[0].finish_reason == "length"


@pytest.mark.parametrize("max_tokens", [0, 2])
def test_echo_with_log_probabilities(client: OpenAI, served: Served, max_tokens: int) -> None:
    served.script.set(answers=["yz"])
    answer = client.completions.create(model="x", prompt="abc", echo=True, logprobs=1, max_tokens=max_tokens)
    choice = answer.choices[0]
    assert choice.text == "abc" + "yz"[:max_tokens]
    assert choice.finish_reason == "length"
    assert choice.logprobs is not None
    assert choice.logprobs.tokens == list("abc" + "yz"[:max_tokens])
    assert choice.logprobs.token_logprobs == [None, -1.0, -1.0, *[-0.25] * max_tokens]
    assert choice.logprobs.text_offset == list(range(3 + max_tokens))
    assert answer.usage is not None
    assert answer.usage.completion_tokens == max_tokens


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [1, "a"]}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": [999]}, "prompt"),
        ({"prompt": ["a"] * 65}, "prompt"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"suffix": "x"}, "suffix"),
        ({"logprobs": 21}, "logprobs"),
        ({"prompt": "x" * 3000}, "prompt"),
    ],
)
def test_bad_fields_are_named(client: OpenAI, change: dict[str, Any], param: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(**{"model": "x", "prompt": "a"} | change)
    assert caught.value.param == param
