"""The exceptions that bnconvert raises; a caller needs to catch only `BnconvertError`."""

from __future__ import annotations


class BnconvertError(Exception):
    """Base of every refusal; the text is one line: where, what is so, and what to do.

    Names that come out of a damaged or hostile file may hold line breaks and terminal codes; they
    are escaped.
    """

    def __init__(self, text: str) -> None:
        super().__init__("".join(c if c.isprintable() else ascii(c)[1:-1] for c in text))


def first_line(error: BaseException) -> str:
    """Return the first line of an error's text that says something, or the error's type."""
    lines = [line.strip() for line in str(error).splitlines()]
    return next((line for line in lines if line), type(error).__name__)


class UnknownLayerError(BnconvertError):
    """A model holds BatchNorm-like layers that bnconvert cannot convert without guessing."""


class VerificationError(BnconvertError):
    """A result was computed and differs from what it must equal; nothing was changed."""


class CheckpointError(BnconvertError):
    """A file or folder of weights is damaged, refused, of an unknown kind, or does not fit."""
