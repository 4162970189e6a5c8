"""The ids that were generated for recent assistant messages, so that history is replayed as it was and prompts only
grow at their end."""

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from northchat.messages import Message

Key = tuple[str, tuple[tuple[str, str], ...]]


@dataclass(frozen=True)
class _Answer:
    reasoning: str
    ids: "array[int]"


class History:
    """LRU by what clients send back of a message: its text without outer blanks, and its calls without their ids."""

    def __init__(self, capacity: int = 1 << 22) -> None:
        """`capacity` is the sum of ids kept, 4 bytes each."""
        self._answers: OrderedDict[Key, _Answer] = OrderedDict()
        self._room = capacity

    def remember(self, message: Message, ids: Sequence[int]) -> None:
        if not ids:
            return
        key = _key(message)
        if (old := self._answers.pop(key, None)) is not None:
            self._room += len(old.ids)
        self._answers[key] = _Answer(message.reasoning.strip(), array("I", ids))
        self._room -= len(ids)
        while self._room < 0:
            _, dropped = self._answers.popitem(last=False)
            self._room += len(dropped.ids)

    def recall(self, message: Message) -> Sequence[int] | None:
        """The ids, unless the message is unknown or its reasoning was changed (clients may leave reasoning out)."""
        key = _key(message)
        answer = self._answers.get(key)
        if answer is None or (message.reasoning and message.reasoning.strip() != answer.reasoning):
            return None
        self._answers.move_to_end(key)
        return answer.ids


def _key(message: Message) -> Key:
    calls = tuple((call.name, _canonical(call.arguments)) for call in message.tool_calls)
    return message.content.strip(), calls


def _canonical(arguments: str) -> str:
    try:
        value: Any = msgspec.json.decode(arguments)
    except msgspec.DecodeError:
        return arguments
    return msgspec.json.encode(value, order="deterministic").decode()
