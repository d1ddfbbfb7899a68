"""Prompts to ids: templates, one BOS, raw text as it is."""

import pytest

from adafuse_engine import ContextWindowError, Engine, InvalidArgumentError, MemberConfig, Message
from adafuse_engine.members.local.prompts import prompt_ids
from tests.support import tiny

SP = tiny.sentencepiece()
BL = tiny.byte_level()
CHAT = [Message("system", "Be brief."), {"role": "user", "content": "Who? "}]


def spelled(tokenizer, ids):
    return tokenizer.decode(ids, clean_up_tokenization_spaces=False)


def test_raw_text_gets_the_bos_its_tokenizer_adds_and_no_other():
    assert prompt_ids(SP, "hello", frozenset({1}))[:2].count(2) == 1
    assert prompt_ids(SP, "<bos>hello", frozenset({1})).count(2) == 1
    assert prompt_ids(BL, "hello", frozenset({0})) == BL("hello").input_ids


def test_raw_text_is_passed_as_it_is():
    text = "  a\n\n\tb  "
    assert spelled(BL, prompt_ids(BL, text, frozenset({0}))) == text


def test_a_model_without_a_template_gets_a_plain_transcript():
    ids = prompt_ids(BL, CHAT, frozenset({0}))
    assert spelled(BL, ids) == "Be brief.\n\nUser: Who?\nAssistant:"


def test_a_given_template_wins_and_exactly_one_bos_reaches_the_model():
    template = "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}>"
    ids = prompt_ids(SP, CHAT, frozenset({1}), template)
    assert ids.count(2) == 1
    assert ids[0] == 2
    assert spelled(SP, ids[1:]) == "[system]Be brief.[user]Who? >"
    assert prompt_ids(SP, CHAT, frozenset({1}), template.removeprefix("{{ bos_token }}")) == ids


def test_a_template_that_refuses_messages_is_a_clear_error():
    template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(InvalidArgumentError, match="roles must alternate"):
        prompt_ids(BL, CHAT, frozenset({0}), template)


def test_a_line_break_before_the_bos_of_a_template_makes_no_second_one():
    template = "\n{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}"
    ids = prompt_ids(SP, CHAT, frozenset({1}), template)
    assert ids.count(2) == 1
    assert ids[0] == 2


def test_an_error_inside_a_template_is_the_same_clear_error():
    with pytest.raises(InvalidArgumentError, match="the chat template refuses these messages"):
        prompt_ids(BL, CHAT, frozenset({0}), "{{ messages[0].content + 3 }}")


@pytest.mark.parametrize("message", ["hello", {"role": "user"}, 3])
def test_what_is_no_message_is_refused(message):
    with pytest.raises(InvalidArgumentError, match="a message is a dict with role and content"):
        prompt_ids(BL, [message], frozenset({0}))


def test_a_prompt_over_the_window_gives_the_numbers_of_the_member_it_is_too_long_for():
    long = tiny.member("llama", "long", 1)
    short = tiny.LocalMember(
        MemberConfig(model="x", name="short", context_window=16), tiny.local_model("llama", 2), progress=False
    )
    with Engine(members=[long, short]) as engine:
        assert engine.context_window == 16
        with pytest.raises(ContextWindowError, match="'short', whose context window is 16") as caught:
            engine.generate("the ferry leaves the harbour " * 10)
        assert caught.value.prompt_tokens > 16
        done = engine.generate("The ferry", max_tokens=500)
        assert done.usage.prompt_tokens + done.usage.completion_tokens <= 16


def test_a_window_given_to_one_view_does_not_narrow_another():
    config = MemberConfig(model="x", name="short", context_window=16)
    shared = tiny.local_model("llama", 2, config=config)
    short = tiny.LocalMember(config, shared, progress=False)
    wide = tiny.LocalMember(MemberConfig(model="x", name="wide"), shared, progress=False)
    assert (short.context_window, wide.context_window) == (16, 8192)


def test_the_text_never_begins_with_the_prompt_and_shows_no_special_token():
    with Engine(members=[tiny.member("gemma", "a", 1), tiny.member("llama", "b", 2)]) as engine:
        done = engine.generate("The ferry leaves", max_tokens=20)
    assert not done.text.startswith("The ferry")
    assert "<" not in done.text or "eos" not in done.text
