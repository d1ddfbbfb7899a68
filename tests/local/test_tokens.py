"""Token ids to bytes and back, exactly; and tokenizers that cannot are refused."""

from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from adafuse_engine import TokenizerError
from adafuse_engine.members.local.tokens import Vocabulary, end_tokens
from tests.support import tiny


def vocabulary(tokenizer, ends=frozenset({0})):
    return Vocabulary("x", tokenizer, ends, len(tokenizer))


BYTE_LEVEL = vocabulary(tiny.byte_level(), frozenset({0, 1}))
SENTENCEPIECE = vocabulary(tiny.sentencepiece(), frozenset({1}))
BOTH = pytest.mark.parametrize("v", [BYTE_LEVEL, SENTENCEPIECE], ids=["byte level", "sentencepiece"])


@BOTH
@settings(max_examples=150, deadline=None)
@given(data=st.one_of(st.text(max_size=30).map(str.encode), st.binary(max_size=20)))
def test_any_bytes_are_written_exactly(v, data):
    assert b"".join(map(v.bytes_of, v.encode(data))) == data


@BOTH
def test_a_continuation_has_no_space_it_was_not_given(v):
    assert v.bytes_of(v.encode(b"harbour")[0])[:1] == b"h"
    assert v.bytes_of(v.encode(b" harbour")[0])[:1] == b" "


@BOTH
def test_text_that_looks_like_a_special_token_is_text(v):
    for text in (b"<|eos|>", b"<eos>", b"<bos> x", b"<|end|>"):
        ids = v.encode(text)
        assert not set(ids) & (v.ends | v.banned)
        assert b"".join(map(v.bytes_of, ids)) == text


@BOTH
def test_specials_write_nothing_and_are_banned_unless_they_end_the_text(v):
    for token in range(v.size):
        if not v.bytes_of(token):
            assert (token in v.ends) != (token in v.banned)


@BOTH
def test_starters_are_the_tokens_with_leading_whitespace_and_the_ends(v):
    starters = set(v.starters)
    assert v.ends <= starters
    assert v.encode(b" the")[0] in starters
    assert v.encode(b"\n")[0] in starters
    assert v.encode(b"the")[0] not in starters


def test_the_sentencepiece_space_mark_itself_is_written_as_bytes():
    data = "a▁b".encode()
    assert b"".join(map(SENTENCEPIECE.bytes_of, SENTENCEPIECE.encode(data))) == data


def test_ids_beyond_the_tokenizer_that_pad_a_head_are_banned():
    padded = Vocabulary("x", tiny.byte_level(), frozenset({0}), len(tiny.byte_level()) + 5)
    assert set(range(len(tiny.byte_level()), padded.size)) <= padded.banned


def test_all_end_tokens_are_found():
    model = SimpleNamespace(
        config=SimpleNamespace(eos_token_id=[3, 4], get_text_config=lambda: SimpleNamespace(eos_token_id=5)),
        generation_config=SimpleNamespace(eos_token_id=6),
    )
    assert end_tokens(model, SimpleNamespace(eos_token_id=2)) == {2, 3, 4, 5, 6}


def lowercasing():
    backend = Tokenizer.from_str(tiny.byte_level().backend_tokenizer.to_str())
    vocab = [("<unk>", 0.0)] + [(c, -1.0) for c in "abcdefghijklmnopqrstuvwxyz ▁"]
    backend = Tokenizer(models.Unigram(vocab, unk_id=0))
    backend.normalizer = normalizers.Lowercase()
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>")


def whole_words():
    backend = Tokenizer(models.WordLevel({"<unk>": 0, "the": 1, "ferry": 2}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>")


@pytest.mark.parametrize("make", [lowercasing, whole_words])
def test_a_tokenizer_that_loses_text_is_refused_by_name_and_with_a_sample(make):
    with pytest.raises(TokenizerError, match=r"my-model: its tokenizer does not round-trip: '.*' came back as"):
        Vocabulary("my-model", make(), frozenset(), 30)


def test_a_tokenizer_without_a_fast_form_is_refused():
    with pytest.raises(TokenizerError, match=r"no fast .* form"):
        Vocabulary("x", SimpleNamespace(), frozenset(), 10)
