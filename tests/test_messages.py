"""Messages of every shape become the same values, and what is none is refused with its place."""

import pytest

from adafuse_engine import EmptyPromptError, Engine, InvalidArgumentError, Message, PromptError
from adafuse_engine.members.scripted import ScriptedMember
from adafuse_engine.messages import messages_of, tool_schema
from adafuse_engine.types import Chat, Tool, ToolCall

TOOL = Tool("ferry_times", "When ferries leave", {"type": "object", "properties": {"day": {"type": "string"}}})
IMAGE = {"type": "image_url", "image_url": {"url": "x"}}
CALL = ToolCall("a", "ferry_times", {"day": "Sunday"})


def calling(*calls, content=None):
    return {"role": "assistant", "content": content, "tool_calls": list(calls)}


def function(arguments, name="ferry_times", **more):
    return {"type": "function", "function": {"name": name, "arguments": arguments}, **more}


@pytest.mark.parametrize("arguments", [{"day": "Sunday"}, '{"day": "Sunday"}'])
def test_a_call_in_the_openai_form(arguments):
    [user, message] = messages_of([Message("user", "x"), calling(function(arguments, id="a"))])
    assert message == Message("assistant", "", (CALL,))
    assert user == Message("user", "x")


def test_a_call_may_have_no_arguments():
    [message] = messages_of([calling(function(""), function(None))])
    assert [c.arguments for c in message.tool_calls] == [{}, {}]


def test_an_assistant_that_calls_needs_no_content():
    [message] = messages_of([{"role": "assistant", "tool_calls": [CALL]}])
    assert message == Message("assistant", "", (CALL,))


def test_a_message_may_hold_blocks_as_well():
    [message] = messages_of([Message("user", [{"type": "text", "text": "a "}, "b"])])  # type: ignore[arg-type]
    assert message.content == "a b"


def test_developer_is_system():
    assert messages_of([{"role": "developer", "content": "x"}]) == [Message("system", "x")]


def test_calls_without_ids_get_some_and_results_find_them():
    two = calling(function({"n": 1}), function({"n": 2}, name="other"), function({"n": 3}, id="call_1"))
    results = [{"role": "tool", "content": "x", "name": "other"}, {"role": "tool", "content": "y"}]
    message, first, second = messages_of([two, *results])
    assert [c.id for c in message.tool_calls] == ["call_0", "call_2", "call_1"]
    assert (first.tool_call_id, first.name) == ("call_2", "other")
    assert (second.tool_call_id, second.name) == ("call_0", "ferry_times")


def test_a_result_gets_the_name_of_its_call():
    *_, result = messages_of([Message("assistant", "", (CALL,)), Message("tool", "x", (), "a")])
    assert result.name == "ferry_times"


@pytest.mark.parametrize(
    ("message", "error", "match"),
    [
        ({"role": "robot", "content": "x"}, InvalidArgumentError, "message 1 has the role 'robot'; give"),
        ({"role": "user", "content": [IMAGE]}, PromptError, r"message 1 \(user\) .*'image_url'.*text only"),
        ({"role": "user", "content": 3}, PromptError, r"message 1 \(user\) holds a int; members read text only"),
        ({"role": "user", "content": "x", "tool_calls": [CALL]}, InvalidArgumentError, "only an assistant"),
        (calling({"id": "a"}), InvalidArgumentError, "a tool call without a name"),
        (calling(3), InvalidArgumentError, "a tool call without a name"),
        (calling(function("{day")), PromptError, r"calls 'ferry_times' with arguments that are no JSON"),
        (calling(function("[1]")), PromptError, r"with a list; arguments are a JSON object"),
    ],
)
def test_what_cannot_be_read_is_refused_with_its_place(message, error, match):
    with pytest.raises(error, match=match):
        messages_of([Message("user", "x"), message])


def test_no_messages_are_an_empty_prompt():
    with pytest.raises(EmptyPromptError):
        messages_of(Chat([]))


def test_the_schema_of_a_tool():
    function = tool_schema(TOOL)["function"]
    assert function == {"name": TOOL.name, "description": TOOL.description, "parameters": TOOL.parameters}
    assert tool_schema(Tool("x"))["function"]["parameters"] == {"type": "object", "properties": {}}
    with pytest.raises(InvalidArgumentError, match="a tool is a Tool, not dict"):
        tool_schema({"name": "x"})  # type: ignore[arg-type]


# ---- A scripted member and the engine


def test_a_scripted_member_is_told_tools_calls_and_results():
    member = ScriptedMember("a", " ok")
    chat = [Message("system", "Be brief."), Message("user", "When?"), Message("assistant", "So:", (CALL,))]
    with Engine(members=[member]) as engine:
        engine.generate(Chat([*chat, Message("tool", "At seven.", (), "a")], [TOOL]))
    [text] = member.prompts
    first, rest = text.split("system: Be brief.\n")
    assert first.startswith("system: ")
    assert "ferry_times" in first
    assert rest.startswith("user: When?\nassistant: So:\n<tool_call>\n")
    assert rest.endswith("</tool_call>\ntool: At seven.\nassistant:")


@pytest.mark.parametrize(
    ("chat", "error"),
    [(Chat([]), EmptyPromptError), (Chat("x"), InvalidArgumentError), (Chat(3), InvalidArgumentError)],
)
def test_the_engine_refuses_a_chat_of_no_messages(chat, error):
    with Engine(members=[ScriptedMember("a", " ok")]) as engine, pytest.raises(error):
        engine.generate(chat)
