"""Where words end: the unit of fusion, decided on bytes.

A word is leading whitespace and then everything up to the next whitespace. In scripts written without spaces
(Han, kana, Thai, Lao, Khmer, Burmese) it ends at the next word boundary of Unicode Annex 29 instead.
"""

from __future__ import annotations

import codecs

import regex

__all__ = ["ends_by_itself", "first_word_end", "incomplete_suffix", "starts_with_space"]

_SPACELESS = r"[\p{Han}\p{Hiragana}\p{Katakana}\p{Thai}\p{Lao}\p{Khmer}\p{Myanmar}]"
# `\b` under (?w) is the default word boundary of UAX 29; it counts only beside a script without spaces.
_WORD = regex.compile(rf"\s*+\S(?:(?!\s|(?w:\b)(?:(?={_SPACELESS})|(?<={_SPACELESS})))\S)*+")


def incomplete_suffix(data: bytes) -> int:
    """Bytes at the end of ``data`` that begin a UTF-8 character and do not finish it (0 to 3)."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    decoder.decode(data[-4:])
    return len(decoder.getstate()[0])


def starts_with_space(data: bytes) -> bool:
    """Whether the first character is whitespace."""
    return data[:4].decode("utf-8", "ignore")[:1].isspace()


def first_word_end(data: bytes) -> int | None:
    """Offset in bytes where the first word of ``data`` ends; None while more text could still belong to it.

    A character cut at the end of ``data`` counts as one of no script: it ends a word of a spaceless script
    and prolongs any other.
    """
    # Bytes that are no UTF-8 become lone surrogates and turn back into themselves.
    text = data.decode("utf-8", "surrogateescape")
    match = _WORD.match(text)
    if match is None or match.end() == len(text):
        return None
    return len(text[: match.end()].encode("utf-8", "surrogateescape"))


def ends_by_itself(word: bytes) -> bool:
    """Whether nothing can be added to ``word``: it holds the next whitespace, or a spaceless script closes it."""
    return first_word_end(word + b"x") is not None
