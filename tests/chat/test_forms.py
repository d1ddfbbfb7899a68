"""What members are told of tools."""

import json

import pytest

from adafuse_engine import UnknownArgumentError
from adafuse_engine.chat import TOOL_FORMS, parse, tool_form
from adafuse_engine.types import Message, Tool

TOOL = Tool("weather", "The weather at a place.", {"type": "object", "properties": {"größe": {"type": "string"}}})


@pytest.mark.parametrize("form", TOOL_FORMS.values(), ids=lambda f: f.name)
def test_instructions_hold_every_schema_and_an_example_that_parses_as_a_call(form):
    told = form.instructions([TOOL, Tool("time")])
    lines = [
        json.loads(line) for line in told.splitlines() if line.startswith('{"name": ') and "description" in line
    ]
    assert [(t["name"], t["parameters"]) for t in lines] == [("weather", dict(TOOL.parameters)), ("time", {})]
    example = form.instructions([])
    at = example.index(form.open or "{")
    _, [call] = parse(example[at:], form)
    assert call.name == "the tool's name"


def test_results_name_their_tool():
    assert "18 degrees" in tool_form("json_tags").write_result(Message("tool", "18 degrees", name="weather"))
    assert "weather" in tool_form("json_tags").write_result(Message("tool", "18 degrees", name="weather"))


def test_an_unknown_form_is_refused_with_the_nearest_known():
    with pytest.raises(UnknownArgumentError, match="json_tags"):
        tool_form("json_tag")
