"""Text to ids and back, over the `tokenizers` library, in a way that text can't forge markers.

A chat format puts markers (`<|im_start|>`) in by id. Text goes through an encoder that doesn't know them, so a marker's
string inside a message becomes ordinary pieces.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec
from tokenizers import Tokenizer as Backend

from northchat.model.weights import ModelError


class Tokenizer:
    """Byte-level BPE, or SentencePiece-like BPE with byte fallback, from a tokenizer.json.

    Raises ModelError when the file is missing, damaged, or of another kind.
    """

    def __init__(self, path: Path) -> None:
        try:
            document = msgspec.json.decode(path.read_bytes())
            model = document["model"]
            if model.get("type", "BPE") != "BPE":
                raise ModelError(f"{path} is a tokenizer of kind {model['type']}; BPE is supported")
            self._bytes = _byte_table(document)
            self.markers = _forget_markers(document)
            """Added tokens: string → id."""
            self._backend = Backend.from_buffer(msgspec.json.encode(document))
        except OSError as error:
            raise ModelError(f"can't read {path}: {error.strerror}") from error
        except ModelError:
            raise
        except Exception as error:  # tokenizers raises bare Exception
            raise ModelError(f"{path} can't be used ({' '.join(repr(error).split())}); download it again") from error
        self.vocab_size = len(self._bytes)
        """Ids are below this; a model's logits may have more entries, which decode to nothing."""

    def encode(self, text: str) -> list[int]:
        """Ids of plain text: no added token, nothing put before or after. Releases the GIL.

        Lone surrogates, which no UTF-8 can hold, become U+FFFD.
        """
        try:
            text.encode()
        except UnicodeEncodeError:
            text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        ids: list[int] = self._backend.encode_batch_fast([text], add_special_tokens=False)[0].ids
        return ids

    def token_id(self, marker: str) -> int | None:
        """The id of a marker, None when there is no such token."""
        return self.markers.get(marker)

    def token_bytes(self, token: int) -> bytes:
        """UTF-8 of one token, possibly a part of a character; empty for ids beyond the vocabulary."""
        return self._bytes[token] if 0 <= token < self.vocab_size else b""

    def decode_bytes(self, ids: Iterable[int]) -> bytes:
        """Markers come out as their strings."""
        return b"".join(map(self.token_bytes, ids))

    def decode(self, ids: Iterable[int]) -> str:
        """Bytes that are no UTF-8 become U+FFFD."""
        return self.decode_bytes(ids).decode("utf-8", "replace")


def token_table(path: Path) -> tuple[list[bytes], list[int]]:
    """The UTF-8 bytes of each id, and which ids are markers; without building an encoder. Raises ModelError."""
    try:
        document = msgspec.json.decode(path.read_bytes())
        table = _byte_table(document)
        return table, sorted(_forget_markers(document).values())
    except OSError as error:
        raise ModelError(f"can't read {path}: {error.strerror}") from error
    except (msgspec.MsgspecError, KeyError, TypeError, ValueError, AttributeError) as error:
        raise ModelError(f"{path} can't be used ({' '.join(repr(error).split())}); download it again") from error


def _forget_markers(document: dict[str, Any]) -> dict[str, int]:
    """Take added tokens out of the encoder, ids of all others staying as they are; returns them.

    Runs of white space are the exception: as added tokens they stand for text, not for structure, and are kept. Others
    are also hidden in the vocabulary, where a merge or `ignore_merges` could reach them: under a name that starts with
    a space, which no piece of text does (it would be Ġ or ▁).
    """
    model, added = document["model"], document["added_tokens"]
    vocabulary = model["vocab"]
    forgotten = {token["content"]: token["id"] for token in added if token["content"].strip() or token["special"]}
    document["added_tokens"] = [token for token in added if token["content"] not in forgotten]
    for token in document["added_tokens"]:
        # The library numbers added tokens anew unless the vocabulary has them.
        vocabulary.setdefault(token["content"], token["id"])
    document["post_processor"] = document["truncation"] = document["padding"] = None
    # A single byte or character is where merging starts; without it text could not be encoded.
    markers = {marker for marker in forgotten if len(marker) > 1}
    for marker in markers & vocabulary.keys() - {model.get("unk_token")}:
        vocabulary[f" {marker}"] = vocabulary.pop(marker)
    model["merges"] = [merge for merge in model["merges"] if not markers.intersection(_pieces(merge))]
    return forgotten


def _pieces(merge: str | list[str]) -> tuple[str, str, str]:
    """What a merge joins, and what comes of it. Older files hold a merge as one string."""
    left, right = merge.split(" ") if isinstance(merge, str) else merge
    return left, right, left + right


def _byte_table(document: dict[str, Any]) -> list[bytes]:
    """The UTF-8 bytes of each id."""
    model = document["model"]
    if _mentions(document, "ByteLevel"):
        decode = _byte_level
    elif model.get("byte_fallback"):
        decode = _byte_fallback
    else:
        raise ValueError("it is neither byte-level nor has it byte fallback")
    added = {token["id"]: token["content"].encode() for token in document["added_tokens"]}
    size = max([*model["vocab"].values(), *added], default=-1) + 1
    table = [b""] * size
    for token, index in model["vocab"].items():
        table[index] = decode(token)
    for index, content in added.items():
        table[index] = content
    return table


def _mentions(document: dict[str, Any], kind: str) -> bool:
    steps = [document.get("pre_tokenizer"), document.get("decoder")]
    for step in steps:
        if isinstance(step, dict):
            if step.get("type") == kind:
                return True
            steps += step.get("pretokenizers", []) + step.get("decoders", [])
    return False


def _byte_alphabet() -> dict[int, int]:
    """GPT-2's printable stand-ins: character → byte. Printable Latin-1 stands for itself, the other bytes for U+0100
    and following in order.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: byte for byte in printable} | {0x100 + index: byte for index, byte in enumerate(others)}


_ALPHABET = _byte_alphabet()


def _byte_level(token: str) -> bytes:
    try:
        return bytes([_ALPHABET[ord(character)] for character in token])
    except KeyError:  # a marker that stands in the vocabulary
        return token.encode()


def _byte_fallback(token: str) -> bytes:
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        return bytes.fromhex(token[3:5])
    return token.replace("▁", " ").encode()
