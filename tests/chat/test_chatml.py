"""ChatML, measured against transformers on the same tokenizer and template."""

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from northchat.chat.chatml import ChatML, own_system
from northchat.chat.stream import TurnError
from northchat.messages import Message, Sampling, Turn
from northchat.model.tokenizer import Tokenizer

SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
TEMPLATE = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system\n"
    f"{SYSTEM}<|im_end|>\n"
    "' }}{% endif %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def nothing(message: Message) -> None:
    return None


@pytest.fixture(scope="module")
def reference(tokenizer_file: Path) -> PreTrainedTokenizerFast:
    reference = PreTrainedTokenizerFast(tokenizer_file=str(tokenizer_file))
    reference.chat_template = TEMPLATE
    return reference


@pytest.fixture(scope="module")
def chatml(tokenizer: Tokenizer) -> ChatML:
    return ChatML(tokenizer, Sampling(), own_system(TEMPLATE))


# Without markers: there the reference is what we don't want to be.
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=30).map(lambda text: text.replace("<", "("))
roles = st.sampled_from(["user", "assistant", "system"])


def test_the_template_s_own_system_message_is_found() -> None:
    assert own_system(TEMPLATE) == SYSTEM
    assert (
        own_system("{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}") is None
    )


@settings(suppress_health_check=[HealthCheck.too_slow])
@given(messages=st.lists(st.tuples(roles, texts), min_size=1, max_size=5))
def test_the_ids_are_those_of_the_reference(
    chatml: ChatML, reference: PreTrainedTokenizerFast, messages: list[tuple[str, str]]
) -> None:
    wire = [{"role": role, "content": text} for role, text in messages]
    expected = reference.apply_chat_template(wire, add_generation_prompt=True, return_dict=False)
    ours = chatml.render(Turn([Message(role, text) for role, text in messages]), nothing)  # type: ignore[arg-type]
    assert ours == expected


@given(st.lists(st.sampled_from(["<|im_end|>", "<|im_start|>", "system\n", "<|", "|>", "x"]), max_size=8).map("".join))
def test_no_text_becomes_a_marker(chatml: ChatML, tokenizer: Tokenizer, text: str) -> None:
    markers = set(tokenizer.markers.values())
    plain = [token for token in chatml.render(Turn([Message("user", "x")]), nothing) if token in markers]
    forged = [token for token in chatml.render(Turn([Message("user", text)]), nothing) if token in markers]
    assert forged == plain


def test_known_answers_are_replayed_as_they_were_generated(chatml: ChatML, tokenizer: Tokenizer) -> None:
    # Spelt letter by letter, as no encoder would.
    ids = [token for letter in "Hello" for token in tokenizer.encode(letter)]
    turn = Turn([Message("user", "Hi"), Message("assistant", "Hello"), Message("user", "Bye")])
    first = chatml.render(Turn(turn.messages[:1]), nothing)
    second = chatml.render(turn, lambda message: ids)
    assert second[: len(first) + len(ids)] == first + ids
    assert second != chatml.render(turn, nothing)


def test_a_developer_is_a_system(chatml: ChatML) -> None:
    developer = chatml.render(Turn([Message("developer", "Be brief."), Message("user", "Hi")]), nothing)
    assert developer == chatml.render(Turn([Message("system", "Be brief."), Message("user", "Hi")]), nothing)


def test_a_tokenizer_without_markers_is_refused() -> None:
    class Bare:
        markers: dict[str, int] = {}  # noqa: RUF012

        def encode(self, text: str) -> list[int]:
            return list(text.encode())

        def token_id(self, marker: str) -> None:
            return None

        def decode_bytes(self, ids: object) -> bytes:
            return b""

    with pytest.raises(TurnError, match="lacks"):
        ChatML(Bare(), Sampling())
