"""What models, tools, files and servers send must not command the terminal that shows it."""

import re

_STRING = r"(?:\x1b[\]PX^_]|[\x90\x98\x9d-\x9f])[^\x00-\x1f\x7f-\x9f]{0,4096}"
"""OSC, DCS, SOS, PM and APC up to their terminator. The bound keeps a stray introducer from hiding what follows."""
_CSI = r"(?:\x1b\[|\x9b)[0-?]{0,64}[ -/]{0,8}"
_ESCAPE = r"\x1b[ -/]{0,8}"
_CONTROLS = r"\x00-\x08\x0b-\x1f\x7f-\x9f"
_BIDI = r"\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069"

_UNSAFE = re.compile(
    rf"{_STRING}(?:\x07|\x1b\\|\x9c)|{_CSI}[@-~]?|{_ESCAPE}[0-~]?|[{_CONTROLS}{_BIDI}]|([\ud800-\udfff])"
)
_INCOMPLETE = re.compile(rf"(?:{_STRING}\x1b?|{_CSI}|{_ESCAPE})\Z")


def clean(text: str) -> str:
    r"""Text without escape sequences (removed whole), control characters but \n and \t, and bidi controls.

    A lone surrogate, which no terminal can be sent, becomes U+FFFD.
    """
    return _UNSAFE.sub(lambda match: "\ufffd" if match[1] else "", text)


class Cleaner:
    """clean() for text that comes in pieces: a sequence cut in two is held back until its end is known.

    The pieces that feed() and then flush() return, joined, are clean() of what was fed.
    """

    def __init__(self) -> None:
        self._held = ""

    def feed(self, text: str) -> str:
        text = self._held + text
        tail = _INCOMPLETE.search(text)
        end = tail.start() if tail else len(text)
        self._held = text[end:]
        return clean(text[:end])

    def flush(self) -> str:
        text, self._held = self._held, ""
        return clean(text)
