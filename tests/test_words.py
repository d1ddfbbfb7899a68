"""Where words end, on bytes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adafuse_engine.words import ends_by_itself, first_word_end, incomplete_suffix, starts_with_space


@pytest.mark.parametrize(
    ("text", "word"),
    [
        (" foo bar", " foo"),
        ("foo\n", "foo"),
        ("\n\n  x y", "\n\n  x"),
        ("\tdef f():\n", "\tdef"),
        (" don't stop", " don't"),
        ("3,141.59 x", "3,141.59"),
        ('"quoted" x', '"quoted"'),
        ("-- x", "--"),
        ("👩‍👩‍👧 x", "👩‍👩‍👧"),
        ("a\u00a0b", "a"),
        ("a\u3000b", "a"),
    ],
)
def test_a_word_is_leading_whitespace_and_all_up_to_the_next_whitespace(text, word):
    assert text.encode()[: first_word_end(text.encode())].decode() == word


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("你好世界", "你"),
        ("好。你", "好"),
        ("foo你", "foo"),
        ("你x", "你"),
        (" 你好", " 你"),
        ("カタカナです", "カタカナ"),
        ("ありがとう", "あ"),
        ("สวัสดี", "ส"),
        ("ကမ္ဘာ", "က"),
        ("你\u0301好", "你\u0301"),
    ],
)
def test_scripts_without_spaces_are_cut_at_unicode_word_boundaries(text, word):
    assert text.encode()[: first_word_end(text.encode())].decode() == word


@pytest.mark.parametrize("text", ["", "foo", "  ", "\n", " foo", "don't", "👩‍", "你"])
def test_a_word_is_open_while_more_could_belong_to_it(text):
    assert first_word_end(text.encode()) is None


def test_a_cut_character_ends_a_han_word_and_prolongs_a_latin_one():
    cut = "好".encode()[:1]
    assert first_word_end("你".encode() + cut) == 3
    assert first_word_end(b"foo" + cut) is None


def test_bytes_that_are_no_utf8_keep_their_place():
    assert first_word_end(b"\xff\xfe x") == 2
    assert first_word_end(b"a\xe5\xe5 x") == 3


def test_only_an_open_word_needs_something_after_it_to_end():
    assert not ends_by_itself(b" foo.")
    assert ends_by_itself(b"foo.\n")
    assert ends_by_itself("你".encode())


def test_whitespace_is_unicode_whitespace():
    assert starts_with_space(b"\tx")
    assert starts_with_space("\u3000x".encode())
    assert not starts_with_space(b"x ")
    assert not starts_with_space(b"")


@given(st.binary(max_size=40))
def test_words_of_any_bytes_join_to_the_same_bytes(data):
    words, rest = [], data
    while rest:
        end = first_word_end(rest) or len(rest)
        assert end > 0
        words.append(rest[:end])
        rest = rest[end:]
    assert b"".join(words) == data


@given(st.text(max_size=20), st.text(min_size=1, max_size=5))
def test_a_word_that_ended_stays_the_same_whatever_follows(text, more):
    end = first_word_end(text.encode())
    if end is not None and end < len(text.encode()):
        assert first_word_end((text + more).encode()) == end or _joins(text, end)


def _joins(text, end):
    """Unicode lets a mark or a letter after a mid-letter reach back over one character; never over more."""
    return len(text.encode()[end:].decode("utf-8", "ignore")) <= 2


@given(st.text(max_size=20))
def test_no_character_is_ever_cut(text):
    end = first_word_end(text.encode())
    if end is not None:
        text.encode()[:end].decode()


@given(st.text(max_size=6))
def test_incomplete_suffix_counts_the_bytes_of_a_cut_character(text):
    data = text.encode()
    for size in range(len(data) + 1):
        left = incomplete_suffix(data[:size])
        assert data[: size - left].decode() is not None
        assert 0 <= left <= 3
