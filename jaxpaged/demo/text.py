"""Text as the demo model's tokens: a document boundary, and bytes."""

from collections.abc import Iterable

DOCUMENT_BOUNDARY = 0
"""The token that starts a document and ends it."""


def encode(text: str) -> list[int]:
    """Return the tokens of a document that begins with ``text``: the document boundary, then the UTF-8 bytes."""
    return [DOCUMENT_BOUNDARY, *text.encode("utf-8")]


def decode(ids: Iterable[int]) -> str:
    """Return the text of ``ids``: a leading document boundary is dropped, a later one ends the text.

    Bytes that are not UTF-8, such as half a character at the end, become replacement characters.
    """
    data = bytes(ids)
    data = data[1:] if data[:1] == b"\0" else data
    return data.partition(b"\0")[0].decode("utf-8", errors="replace")
