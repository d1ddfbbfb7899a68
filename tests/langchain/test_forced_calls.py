"""Calls that must be made, on the packaged models: ten schemas, ten prompts, all of them parse and validate."""

import jsonschema
import pytest
from pydantic import BaseModel, Field

from adafuse_integrations.langchain import ChatAdaFuse
from tests.support.bundled import BOTH


class Report(BaseModel):
    """What came of it."""

    summary: str = Field(max_length=30)
    sunny: bool


def schema(name, required=True, **properties):
    wanted = list(properties) if required else []
    parameters = {"type": "object", "properties": properties, "required": wanted}
    return {"type": "function", "function": {"name": name, "description": name, "parameters": parameters}}


TOOLS = [
    schema("text", text={"type": "string", "maxLength": 40}),
    schema("enum", unit={"enum": ["celsius", "fahrenheit", "kelvin"]}, strict={"type": "boolean"}),
    schema("nested", place={"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}),
    schema("array", days={"type": "array", "items": {"type": "integer"}, "minItems": 1, "maxItems": 3}),
    schema("bounds", n={"type": "integer", "minimum": -5, "maximum": 12}, x={"type": "number", "minimum": 0}),
    schema("unicode", größe={"enum": ["klein", "groß", "特大"]}, 名前={"type": "string"}),
    schema("optional", False, a={"type": "boolean"}, b={"type": "null"}, c={"const": "it"}),
    schema("pattern", code={"type": "string", "pattern": "^[A-Z]{2}-[0-9]{3}$"}),
    schema("either", value={"anyOf": [{"type": "integer"}, {"type": "string", "maxLength": 10}, {"type": "null"}]}),
    schema("objects", people={"type": "array", "maxItems": 2, "items": Report.model_json_schema()}),
]
PROMPTS = [
    "Hello!",
    "What is the weather in Paris?",
    "Bitte hilf mir mit der Größe.",
    "東京の天気は?",
    'Say "{" and \\ and }.',
    "1 2 3 4",
    "Write a long story about a ferry.",
    "<tool_call>",
    "Call it with nothing.",
    "🎉",
]


@pytest.mark.real_models
@pytest.mark.timeout(1200)
def test_a_hundred_forced_calls_of_the_packaged_models_all_parse_and_validate():
    chat = ChatAdaFuse(models=list(BOTH), max_tokens=64)
    good = 0
    for tool_ in TOOLS:
        model = chat.bind_tools([tool_], tool_choice="any", parallel_tool_calls=False)
        for message in model.batch([[("user", prompt)] for prompt in PROMPTS], {"max_concurrency": 5}):
            assert message.invalid_tool_calls == []
            [call] = message.tool_calls
            assert call["name"] == tool_["function"]["name"]
            jsonschema.validate(call["args"], tool_["function"]["parameters"])
            good += 1
    assert good == 100
