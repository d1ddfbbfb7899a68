"""Grammars of schemas and of tool calls: walks through them at random end in what they promise."""

import json
from enum import Enum
from random import Random
from typing import Literal

import jsonschema
import pytest
from pydantic import BaseModel, Field

from adafuse_engine import InvalidArgumentError
from adafuse_engine.chat import TOOL_FORMS, parse, schema_grammar, tool_form, tools_grammar
from adafuse_engine.members.guide import END_OF_TEXT, byte_guides
from adafuse_engine.types import Tool, ToolCall

TAGS = tool_form("json_tags")
FORMS = list(TOOL_FORMS.values())


class Colour(Enum):
    RED = "red"
    BLUE = "blau-grün"


class Part(BaseModel):
    number: int = Field(ge=1, le=99)
    colour: Colour


class Order(BaseModel):
    """An order, as pydantic describes it: references, enums, optional and constant fields."""

    parts: list[Part] = Field(max_length=3)
    kind: Literal["fast", "slow"]
    note: str | None = None
    weight: float = Field(gt=0, lt=10)


def an_object(required=True, **properties):
    return {"type": "object", "properties": properties, "required": list(properties) if required else []}


SCHEMAS = {
    "empty": {},
    "text": an_object(text={"type": "string", "maxLength": 20}),
    "enum": an_object(unit={"enum": ["celsius", "fahrenheit", 3, None]}),
    "nested": an_object(place=an_object(city={"type": "string"}, at=an_object(x={"type": "number"}))),
    "array": an_object(days={"type": "array", "items": {"type": "integer"}, "minItems": 1, "maxItems": 4}),
    "bounds": an_object(n={"type": "integer", "minimum": -5, "maximum": 12}, x={"type": "number", "minimum": 0}),
    "unicode": an_object(**{"größe": {"enum": ["klein", "groß", "特大"]}, "名前": {"type": "string"}}),
    "optional": an_object(False, a={"type": "boolean"}, b={"type": "null"}, c={"const": "it"}),
    "pattern": an_object(code={"type": "string", "pattern": "^[A-Z]{2}-[0-9]{3}$"}),
    "pydantic": Order.model_json_schema(),
}
TOOLS = [Tool(name, f"About {name}.", schema) for name, schema in SCHEMAS.items()]


def walk(grammar, seed, most=300):
    """A text of the grammar: bytes at random, then the short way out."""
    random, guide, data = Random(seed), byte_guides().begin(grammar), bytearray()
    plain = {*b'"}],:0123456789abcdefghij <\n', END_OF_TEXT}
    while len(data) < most:
        mask = guide.mask()
        allowed = [b for b in range(257) if mask[b // 8] >> (b % 8) & 1]
        # Mostly plain characters: the ends of strings are rare among all bytes.
        usual = [b for b in allowed if b in plain]
        byte = random.choice(usual if usual and random.random() < 0.95 else allowed)
        if byte == END_OF_TEXT:
            return data.decode()
        data.append(byte)
        guide = guide.after([byte])
    return (bytes(data) + guide.way_out()).decode()


@pytest.mark.parametrize("name", SCHEMAS)
def test_an_answer_of_a_schema_is_json_that_validates(name):
    schema = SCHEMAS[name] or {"type": "object", "properties": {}}
    for seed in range(8):
        found = json.loads(walk(schema_grammar(schema), seed))
        jsonschema.validate(found, schema)
        assert set(found) <= set(schema["properties"])


@pytest.mark.parametrize("form", FORMS, ids=lambda f: f.name)
def test_any_is_calls_and_nothing_else(form):
    grammar, names = tools_grammar(TOOLS, form, "any"), set()
    for seed in range(40):
        text, calls = parse(walk(grammar, seed, 120), form, TOOLS)
        assert text == ""
        assert calls
        for call in calls:
            assert isinstance(call, ToolCall), call
            jsonschema.validate(call.arguments, SCHEMAS[call.name])
            names.add(call.name)
    assert len(names) > 4


@pytest.mark.parametrize("form", FORMS, ids=lambda f: f.name)
@pytest.mark.parametrize("name", SCHEMAS)
def test_a_name_is_one_call_of_that_tool(form, name):
    text, [call] = parse(walk(tools_grammar(TOOLS, form, name), 1), form, TOOLS)
    assert text == ""
    assert call.name == name
    jsonschema.validate(call.arguments, SCHEMAS[name])


@pytest.mark.parametrize("form", FORMS[:2], ids=lambda f: f.name)
def test_without_parallel_calls_there_is_one(form):
    for seed in range(10):
        _, calls = parse(walk(tools_grammar(TOOLS, form, "any", parallel=False), seed), form, TOOLS)
        assert len(calls) == 1


@pytest.mark.parametrize("form", FORMS[:2], ids=lambda f: f.name)
def test_auto_leaves_text_free_and_holds_a_call_once_it_is_begun(form):
    guide = byte_guides().begin(tools_grammar(TOOLS, form, "auto"))
    for text in ('Just an answer, with < and [ and {"json": 1}.\n', "", form.write([ToolCall("", "empty", {})])):
        assert guide.allows([*text.encode(), END_OF_TEXT])
    inside = guide.after(list(f"Let me see. {form.open}".encode()))
    assert not inside.allows([END_OF_TEXT])
    assert not inside.allows(list(b"what"))
    rest = inside.way_out().decode()
    text, [call] = parse(f"Let me see. {form.open}{rest}", form, TOOLS)
    assert text == "Let me see."
    assert isinstance(call, ToolCall)


@pytest.mark.parametrize("form", FORMS[:2], ids=lambda f: f.name)
def test_none_is_any_text_that_begins_no_call(form):
    guide = byte_guides().begin(tools_grammar(TOOLS, form, "none"))
    assert guide.allows([*f"Text,\n{form.open[:-2]} and {{}} more.".encode(), END_OF_TEXT])
    assert not guide.allows(list(f"Text {form.open}".encode()))
    assert not guide.allows(list(f'Text {form.open[:-1]} name="x"'.encode()))


def test_a_call_written_by_its_form_is_one_of_the_grammar():
    for form in FORMS:
        guide = byte_guides().begin(tools_grammar(TOOLS, form, "any"))
        call = ToolCall("", "unicode", {"größe": "特大", "名前": 'a "b" \\ c'})
        assert guide.allows([*form.write([call]).encode(), END_OF_TEXT])


def test_nothing_is_held_where_nothing_can_be():
    assert tools_grammar([], TAGS, "any") is None
    assert tools_grammar(TOOLS, tool_form("llama3_json"), "none") is None
    assert tools_grammar(TOOLS, tool_form("llama3_json"), "auto") is None


def test_names_that_no_tool_has_and_schemas_that_are_none_are_refused():
    with pytest.raises(InvalidArgumentError, match="'nobody'"):
        tools_grammar(TOOLS, TAGS, "nobody")
    broken = Tool("broken", "", {"type": "object", "properties": {"x": {"type": "no such type"}}})
    with pytest.raises(InvalidArgumentError, match="tool 'broken': its JSON schema cannot be followed"):
        tools_grammar([*TOOLS, broken], TAGS, "auto")
    with pytest.raises(InvalidArgumentError, match="the schema: its JSON schema"):
        schema_grammar({"type": 7})


def test_what_cannot_be_held_to_is_left_out_with_a_warning(caplog):
    schema = an_object(x={"type": "array", "items": {"type": "integer"}, "uniqueItems": True})
    json.loads(walk(schema_grammar(schema), 0))
    assert "uniqueItems" in caplog.text


def test_an_object_that_says_so_may_have_more_properties():
    guide = byte_guides().begin(schema_grammar({**an_object(a={"type": "null"}), "additionalProperties": True}))
    assert guide.allows([*b'{"a": null, "b": 1}', END_OF_TEXT])
    closed = byte_guides().begin(schema_grammar(an_object(a={"type": "null"})))
    assert not closed.allows(list(b'{"a": null, "b": 1}'))
