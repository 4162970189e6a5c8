"""ChatML: `<|im_start|>role`, the text, `<|im_end|>`. No reasoning, no tool calls."""

import re
from collections.abc import Sequence

from northchat.chat import schema
from northchat.chat.stream import Parser, PlainParser, Replay, Tokenizer, TurnError
from northchat.chat.template import Template
from northchat.messages import Message, Sampling, Turn

_first_block = re.compile(r"<\|im_start\|>system\n(.*?)<\|im_end\|>", re.DOTALL)


def own_system(template: str) -> str | None:
    """The system message that a ChatML template puts before a conversation without one.

    Raises TurnError when the template is damaged.
    """
    messages = [{"role": "user", "content": "?"}]
    match = _first_block.match(Template(template).render({"messages": messages, "add_generation_prompt": True}))
    return match[1] if match else None


class ChatML:
    name = "chatml"
    can_call_tools = False
    forces_tools = False

    def __init__(self, tokenizer: Tokenizer, defaults: Sampling, system: str | None = None) -> None:
        """`system` is what the model was trained to see where a conversation brings no system message.

        Raises TurnError when the tokenizer has no ChatML markers.
        """
        start, end = tokenizer.token_id("<|im_start|>"), tokenizer.token_id("<|im_end|>")
        if start is None or end is None:
            raise TurnError("the tokenizer lacks <|im_start|> or <|im_end|>, so this is no ChatML model")
        self.defaults = defaults
        self.stop_ids: Sequence[int] = (end,)
        self._tokenizer = tokenizer
        self._start, self._end = start, end
        self._system = system
        self._newline = tokenizer.encode("\n")
        self._answer = [start, *tokenizer.encode("assistant\n")]

    def render(self, turn: Turn, replay: Replay) -> list[int]:
        ids: list[int] = []
        if self._system is not None and (not turn.messages or turn.messages[0].role not in ("system", "developer")):
            ids += self._block(Message("system", self._system))
        for message in turn.messages:
            known = replay(message) if message.role == "assistant" else None
            if known is None:
                ids += self._block(message)
            else:
                ids += [*self._answer, *known, self._end, *self._newline]
        return ids + self._answer

    def _block(self, message: Message) -> list[int]:
        role = "system" if message.role == "developer" else message.role
        # Header and text are one piece, as in training: a text's leading newlines merge with the header's.
        return [self._start, *self._tokenizer.encode(f"{role}\n{message.content}"), self._end, *self._newline]

    def parser(self, turn: Turn, prompt: Sequence[int]) -> Parser:
        return PlainParser(self._tokenizer, turn.stop)

    def grammar(self, turn: Turn, prompt: Sequence[int]) -> str:
        return schema.text(turn, self.stop_ids)
