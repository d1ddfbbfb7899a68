"""Answers held to a grammar: whatever the members would write, what comes out is a text of it."""

import json

import pytest
from llguidance import LLMatcher

from adafuse_engine import Engine, InvalidArgumentError
from adafuse_engine.chat import parse, tool_form, tools_grammar
from adafuse_engine.members.guide import END_OF_TEXT, byte_guides
from adafuse_engine.testing import ScriptedMember
from adafuse_engine.types import Tool, ToolCall
from tests.support import tiny

COMPACT = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 12},
        "unit": {"enum": ["celsius", "fahrenheit", "クエルビン"]},
        "days": {"type": "array", "items": {"type": "integer", "minimum": 1, "maximum": 7}, "maxItems": 3},
    },
    "required": ["city", "unit", "days"],
    "additionalProperties": False,
}


def json_grammar(schema=SCHEMA):
    return "%llguidance {}\nstart: %json " + json.dumps({**schema, "x-guidance": COMPACT})


def check(text):
    found = json.loads(text)
    assert list(found) == ["city", "unit", "days"]
    assert len(found["city"]) <= 12
    assert found["unit"] in SCHEMA["properties"]["unit"]["enum"]
    assert len(found["days"]) <= 3
    assert all(isinstance(d, int) and 1 <= d <= 7 for d in found["days"])


KINDS = [["llama"], ["gemma"], ["llama", "gemma"], ["gpt2", "mistral", "gemma"], ["mamba"]]


@pytest.mark.parametrize("kinds", KINDS, ids="-".join)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"preset": "paper"},
        {"gate": "any_certain", "catch_up": "lazy", "threshold": 0.3},
        {"temperature": 1.0, "seed": 3},
        {"fusion": "vote", "scaling": "nucleus", "seed": 1},
    ],
    ids=lambda o: "-".join(map(str, o.values())) or "default",
)
def test_members_that_write_noise_write_json_of_the_schema(kinds, options):
    with Engine(members=[tiny.member(kind, f"m{i}", i) for i, kind in enumerate(kinds)]) as engine:
        done = engine.generate("Weather: ", grammar=json_grammar(), max_tokens=400, **options)
    assert done.finish_reason == "stop"
    check(done.text)


@pytest.mark.parametrize("change", [{"drafting": False}, {"early_decisions": False}, {"catch_up": "lazy"}])
def test_ways_to_save_work_change_no_constrained_answer(change):
    members = [tiny.member("llama", "a", 1), tiny.member("gemma", "b", 2)]
    options = {"grammar": json_grammar(), "max_tokens": 400, "gate": "any_certain", "threshold": 0.2}
    with Engine(members=members) as engine:
        plain = engine.generate("Weather: ", **options)
        if "catch_up" in change:
            check(engine.generate("Weather: ", **{**options, **change}).text)
        else:
            assert engine.generate("Weather: ", **{**options, **change}).text == plain.text


def test_what_the_grammar_forces_costs_no_forward_of_its_own():
    members = [tiny.member("llama", "a", 1), tiny.member("gemma", "b", 2)]
    grammar = 'start: "one two three four five six seven eight nine ten " ("left" | "right") " and that is it"'
    with Engine(members=members) as engine:
        done = engine.generate("Say: ", grammar=grammar)
    assert done.text.startswith("one two three four five six seven eight nine ten ")
    assert done.text.endswith("t and that is it")
    first, *_, last = done.trace.rounds
    assert first.forced
    assert first.words == 10
    assert first.confidence == {"a": None, "b": None}
    assert last.forced
    assert last.end
    # One forward for the ten words, none for the end: the choice alone is written token by token.
    assert all(m.forward_passes <= done.usage.completion_tokens / 2 for m in done.usage.members)


def test_a_scripted_member_goes_its_own_way_as_far_as_the_grammar_allows():
    good = '{"city": "Oslo", "unit": "celsius", "days": [1, 2]}'
    with Engine(members=[ScriptedMember("a", good)]) as engine:
        assert engine.generate("x", grammar=json_grammar()).text == good
    with Engine(members=[ScriptedMember("a", "I would rather talk.")]) as engine:
        check(engine.generate("x", grammar=json_grammar()).text)


def test_without_a_grammar_nothing_is_forced():
    with Engine(members=[ScriptedMember("a", "Hello there.")]) as engine:
        assert not any(r.forced for r in engine.generate("x").trace.rounds)


def test_a_grammar_that_does_not_compile_is_refused_with_the_reason():
    for members in ([ScriptedMember("a", "x")], [tiny.member("llama", "a", 1)]):
        with Engine(members=members) as engine, pytest.raises(InvalidArgumentError, match="grammar: "):
            engine.generate("x", grammar="start: %json {nonsense")


def test_streams_and_batches_are_held_to_it_too():
    members = [tiny.member("llama", "a", 1), tiny.member("gemma", "b", 2)]
    options = {"grammar": json_grammar(), "max_tokens": 400}
    with Engine(members=members) as engine:
        whole = engine.generate("Weather: ", **options)
        assert "".join(c.text for c in engine.stream("Weather: ", **options)) == whole.text
        batch = engine.generate_batch(["Weather: ", "Weather in Oslo: ", "And: "], **options)
        for done in batch:
            check(done.text)
        assert batch[0].text == whole.text


def test_one_request_with_and_one_without_a_grammar_share_a_forward():
    with Engine(members=[tiny.member("llama", "a", 1)]) as engine:
        free = engine.generate("Weather: ", max_tokens=30)
        held = engine.generate("Weather: ", max_tokens=400, grammar=json_grammar())
        futures = [
            engine._submit(engine._run("Weather: ", engine.check_options(max_tokens=30))),
            engine._submit(engine._run("Weather: ", engine.check_options(max_tokens=400, grammar=json_grammar()))),
        ]
        assert [f.result(60).text for f in futures] == [free.text, held.text]


@pytest.mark.parametrize("max_tokens", [40, 45, 50, 60, 80])
@pytest.mark.parametrize("kinds", [["llama"], ["llama", "gemma"]], ids="-".join)
def test_near_max_tokens_an_answer_is_ended_so_that_it_is_whole(kinds, max_tokens):
    schema = {
        "type": "object",
        "properties": {"a": {"type": "string"}, "b": {"type": "array", "items": {"type": "string"}}},
        "required": ["a", "b"],
        "additionalProperties": False,
    }
    with Engine(members=[tiny.member(kind, f"m{i}", i) for i, kind in enumerate(kinds)]) as engine:
        done = engine.generate("Write: ", grammar=json_grammar(schema), max_tokens=max_tokens)
    found = json.loads(done.text)
    assert isinstance(found["a"], str)
    assert isinstance(found["b"], list)
    assert done.usage.completion_tokens <= max_tokens
    # These members never end a string by themselves.
    assert done.finish_reason == "length"


@pytest.mark.parametrize("max_tokens", range(24, 100, 4))
def test_calls_that_may_be_repeated_are_whole_at_every_limit(max_tokens):
    # Another call opens more in one forced round than many a limit has left.
    tools = [Tool("weather", "", SCHEMA), Tool("time", "", {"type": "object", "properties": {}})]
    grammar = tools_grammar(tools, tool_form("json_tags"), "any")
    member = ScriptedMember("a", tool_form("json_tags").write([ToolCall("", "time", {})] * 9))
    with Engine(members=[member]) as engine:
        done = engine.generate("x", grammar=grammar, max_tokens=max_tokens)
    text, calls = parse(done.text, tool_form("json_tags"), tools)
    assert text == ""
    assert calls
    assert all(isinstance(call, ToolCall) for call in calls), done.text
    assert done.usage.completion_tokens <= max_tokens


@pytest.mark.parametrize(
    ("written", "rest"),
    [
        (b"", b'{"city": "", "unit": "celsius", "days": []}'),
        (b'{"city": "Par', b'", "unit": "celsius", "days": []}'),
        (b'{"city": "Paris", "unit": "f', b'ahrenheit", "days": []}'),
        (b'{"city": "Paris", "unit": "celsius", "days": [1', b"]}"),
        (b'{"city": "Paris", "unit": "celsius", "days": []}', b""),
    ],
)
def test_the_way_out_is_short(written, rest):
    assert byte_guides().begin(json_grammar()).after(list(written)).way_out() == rest


def test_a_way_out_that_is_not_found_is_none():
    assert byte_guides().begin("start: /a{3000}/").way_out() is None


def test_a_guide_says_what_is_forced_and_when_it_is_over():
    guide = byte_guides().begin('start: "ab" ("c" | "d")')
    assert guide.forced() == b"ab"
    assert not guide.allows(list(b"x"))
    assert guide.after(list(b"x")) is None
    end = guide.after(list(b"abd"))
    assert end.finished
    assert end.allows([END_OF_TEXT])
    assert guide.forced() == b"ab"  # unchanged by what came after it


def test_grammars_are_compiled_once(monkeypatch):
    made = []
    monkeypatch.setattr("llguidance.LLMatcher", lambda *a, **k: made.append(a) or LLMatcher(*a, **k))
    grammar = 'start: "compiled" " " "once"'
    for _ in range(3):
        byte_guides().begin(grammar)
    assert len(made) == 1
