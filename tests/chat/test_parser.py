"""Calls are read back from what was written, in pieces of any size, and nothing makes the parser raise."""

import json
from itertools import count

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from adafuse_engine.chat import (
    TOOL_FORMS,
    CallDelta,
    CallEnd,
    CallStart,
    TextDelta,
    ToolCallParser,
    parse,
    partial_object,
    tool_form,
)
from adafuse_engine.types import InvalidToolCall, Tool, ToolCall

TAGS = tool_form("json_tags")
FORMS = list(TOOL_FORMS.values())
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": [2, "x}"]}}\n</tool_call>'

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
ARGUMENTS = st.dictionaries(st.text(max_size=8), JSON | st.just('</tool_call> "}{[" \\ <tool_call>'), max_size=4)
# Pieces that calls are made of, in any order: most of what goes wrong is in here.
SHREDS = st.lists(
    st.sampled_from(
        [
            "<tool_call>",
            "</tool_call>",
            "[TOOL_CALLS]",
            "[",
            "]",
            "{",
            "}",
            '"',
            '"name"',
            ": ",
            '"add"',
            ", ",
            '"arguments"',
            "{}",
            "\n",
            " ",
            "\\",
            "text",
            "<tool",
            "```json\n",
            "```",
            "null",
            "1",
            CALL,
            "é",
            "\x00",
        ]
    ),
    max_size=25,
).map("".join)


def numbered():
    numbers = count()
    return lambda: f"c{next(numbers)}"


def joined(events):
    """What the events come to: text and calls in order, pieces put together."""
    text, calls = "", {}
    for event in events:
        match event:
            case TextDelta():
                text += event.text
            case CallStart():
                calls[event.index] = [event.id, event.name, "", None]
            case CallDelta():
                calls[event.index][2] += event.arguments
            case CallEnd():
                calls.setdefault(event.index, [None, None, "", None])[3] = event.call
    return text, calls


def in_pieces(text, cuts, form=TAGS):
    parser = ToolCallParser(form, ids=numbered())
    places = sorted({c % (len(text) + 1) for c in cuts})
    pieces = [text[a:b] for a, b in zip([0, *places], [*places, len(text)], strict=True)]
    return [e for piece in pieces for e in parser.feed(piece)] + parser.close()


@settings(max_examples=300)
@given(SHREDS, st.lists(st.integers(0, 500), max_size=6), st.sampled_from(FORMS))
def test_pieces_of_any_size_give_the_same(text, cuts, form):
    assert joined(in_pieces(text, cuts, form)) == joined(in_pieces(text, [], form))
    assert joined(in_pieces(text, range(len(text)), form)) == joined(in_pieces(text, [], form))


@given(st.text() | SHREDS, st.sampled_from(FORMS))
def test_no_text_makes_it_raise(text, form):
    parse(text, form, tools=[Tool("add")])


@settings(max_examples=200)
@given(
    st.lists(st.tuples(st.text("abz_09", min_size=1), ARGUMENTS), min_size=1, max_size=3),
    st.sampled_from(FORMS),
)
def test_what_a_form_writes_is_read_back(calls, form):
    calls = [ToolCall(f"c{n}", name, arguments) for n, (name, arguments) in enumerate(calls)]
    text, found = parse(form.write(calls), form, ids=numbered())
    assert text == ""
    assert found == calls


@given(st.text("ab <\n[", max_size=20), ARGUMENTS)
def test_text_around_calls_comes_out_and_no_more_than_white_space_is_lost(before, arguments):
    call = ToolCall("c0", "add", arguments)
    text, [found] = parse(f"{before}{TAGS.write([call])}\nSo much.", TAGS, ids=numbered())
    assert found == call
    assert text.split() == [*before.split(), "So", "much."]


@given(st.text(alphabet=st.characters(exclude_characters="<"), max_size=60))
def test_text_without_marks_is_left_as_it_is(text):
    assert parse(text, TAGS) == (text, [])


@given(ARGUMENTS)
def test_streamed_arguments_are_the_arguments(arguments):
    _, calls = joined(in_pieces(TAGS.write([ToolCall("", "f", arguments)]), range(999)))
    assert json.loads(calls[0][2]) == arguments


def test_text_streams_at_once_and_arguments_as_they_are_written():
    parser = ToolCallParser(TAGS, ids=numbered())
    assert parser.feed("Let me see. <") == [TextDelta("Let me see.")]
    assert parser.feed("3 <tool_call>") == [TextDelta(" <3")]
    assert parser.feed('{"name": "add"') == [CallStart(0, "c0", "add")]
    assert parser.feed(', "arguments": {"a"') == [CallDelta(0, '{"a"')]
    assert parser.feed(": 1}}") == [CallDelta(0, ": 1}"), CallEnd(0, ToolCall("c0", "add", {"a": 1}))]
    assert parser.feed("</tool_call>\n") == []
    assert parser.close() == []


def test_arguments_before_the_name_wait_for_it():
    events = in_pieces('<tool_call>{"arguments": {"a": 1}, "name": "add"}</tool_call>', range(99))
    assert joined(events) == ("", {0: ["c0", "add", '{"a": 1}', ToolCall("c0", "add", {"a": 1})]})


@pytest.mark.parametrize(
    ("written", "arguments"),
    [
        ('<tool_call>{"name": "f", "arguments": {"a": 1}}', {"a": 1}),  # no closing mark
        ('<tool_call>\n```json\n{"name": "f", "arguments": {"a": 1}}\n```\n</tool_call>', {"a": 1}),
        ('<tool_call>{"name": "f", "parameters": {"a": 1}}</tool_call>', {"a": 1}),
        ('<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', {"a": 1}),
        ('<tool_call>{"name": "f"}</tool_call>', {}),
        ('<tool_call>{"name": "f", "arguments": null}</tool_call>', {}),
        ('<tool_call>{"name": "f", "arguments": {"a": "two\nlines"}}</tool_call>', {"a": "two\nlines"}),
    ],
)
def test_habits_of_models_are_understood(written, arguments):
    _, calls = joined(in_pieces(written, [], TAGS))
    assert calls[0][3] == ToolCall("c0", "f", arguments)
    assert json.loads(calls[0][2], strict=False) == arguments


@pytest.mark.parametrize(
    ("written", "name", "error"),
    [
        ('<tool_call>{"name": "f", "arguments": {"a": }}</tool_call>', "f", "JSON is broken"),
        ('<tool_call>{"name": "f", "arguments": {"a": 1', "f", "ended before"),
        ('<tool_call>{"name": "f", "arguments": {"a": "x}}</tool_call> And more.', "f", "broken"),
        ('<tool_call>{"arguments": {"a": 1}}</tool_call>', None, 'no "name"'),
        ('<tool_call>{"name": "f", "arguments": [1]}</tool_call>', "f", "no JSON object"),
        ('<tool_call>{"name": "f", "arguments": "what"}</tool_call>', "f", "holds no JSON"),
        ("<tool_call>add(1, 2)</tool_call>", None, "holds no JSON object"),
        ("<tool_call>", None, "holds no JSON object"),
    ],
)
def test_what_cannot_be_read_is_an_invalid_call_that_says_why(written, name, error):
    text, [call] = parse(written, TAGS)
    assert isinstance(call, InvalidToolCall)
    assert call.name == name
    assert error in call.error
    assert text == ("And more." if "more" in written else "")


def test_a_tool_that_nobody_gave_is_an_invalid_call():
    _, [call] = parse(CALL, TAGS, tools=[Tool("subtract"), Tool("divide")])
    assert "'divide', 'subtract'" in call.error
    _, [call] = parse(CALL, TAGS, tools=[Tool("add")])
    assert call.arguments == {"a": 1, "b": [2, "x}"]}


def test_a_list_of_calls_and_text_behind_it():
    written = '[TOOL_CALLS][{"name": "f", "arguments": {}}, {"name": "g", "arguments": {"x": "]"}}] Done.'
    text, calls = parse(written, tool_form("mistral"))
    assert [(c.name, c.arguments) for c in calls] == [("f", {}), ("g", {"x": "]"})]
    assert text == "Done."


def test_without_marks_a_brace_begins_a_call_and_other_json_stays_text():
    form = tool_form("llama3_json")
    text, [call] = parse('{"name": "f", "parameters": {"a": 1}}', form)
    assert (text, call.name, call.arguments) == ("", "f", {"a": 1})
    assert parse('{"answer": 42}', form) == ('{"answer": 42}', [])
    assert parse("It is {so}.", form) == ("It is {so}.", [])


@given(ARGUMENTS, st.integers(0, 400))
def test_the_beginning_of_an_object_tells_what_is_known(arguments, length):
    text = json.dumps(arguments)
    found = partial_object(text[:length])
    assert set(found) <= set(arguments) or length < len(text)
    assert partial_object(text) == arguments


def test_half_an_object_is_read_as_far_as_it_goes():
    text = '{"city": "Oslo", "days": [1, {"n": 2}], "on": true}'
    found = [partial_object(text[:n]) for n in range(len(text) + 1)]
    assert found[0] == found[7] == {}
    assert found[12] == {"city": "Os"}
    assert found[27] == {"city": "Oslo", "days": [1]}
    assert found[-2] == found[-1] == {"city": "Oslo", "days": [1, {"n": 2}], "on": True}


def test_ids_differ():
    _, calls = parse(CALL * 3, TAGS)
    assert len({c.id for c in calls}) == 3


def test_long_arguments_are_read_in_time_that_grows_with_their_length():
    # No clock: a parser that reads all again with every character would take minutes here.
    text = TAGS.write([ToolCall("", "f", {"text": "x" * 200_000})])
    parser = ToolCallParser(TAGS)
    for at in range(0, len(text), 4):
        parser.feed(text[at : at + 4])
    assert parser.close() == []
