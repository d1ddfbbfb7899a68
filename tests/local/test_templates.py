"""Chats with tools through templates of every kind: nothing is lost, whatever a template lacks."""

import re

import pytest

from adafuse_engine import InvalidArgumentError, MemberConfig, Message
from adafuse_engine.members.local import templates
from adafuse_engine.members.local.prompts import prompt_ids
from adafuse_engine.members.local.templates import DEFAULT_TEMPLATE, Abilities, abilities_of
from adafuse_engine.types import Chat, Tool, ToolCall
from tests.support import chats, tiny

TOOL = Tool(
    "ferry_times",
    "When ferries leave",
    {"type": "object", "properties": {"harbour": {"type": "string"}}, "required": ["harbour"]},
)
CALL = ToolCall("call_abc-123", "ferry_times", {"harbour": "Wexelby"})
OTHER = ToolCall("call_def-456", "ferry_times", {"harbour": "Quillon"})
SYSTEM = Message("system", "Be brief.")
KIND = Message("system", "Be kind.")
EXACT = Message("system", "Be exact.")
USER = Message("user", "When does it leave?")
CALLING = Message("assistant", "", (CALL,))
RESULT = Message("tool", "At seven.", (), "call_abc-123")
CALLING_OTHER = Message("assistant", "", (OTHER,))
CALLING_BOTH = Message("assistant", "", (CALL, OTHER))
OTHER_RESULT = Message("tool", "At nine.", (), "call_def-456")
ANSWER = Message("assistant", "It leaves at seven.")
THANKS = Message("user", "And comes back?")

HISTORIES = {
    "one question": [USER],
    "system": [SYSTEM, USER],
    "several turns": [SYSTEM, USER, ANSWER, THANKS],
    "ends in a result": [SYSTEM, USER, CALLING, RESULT],
    "result answered": [SYSTEM, USER, CALLING, RESULT, ANSWER, THANKS],
    "two calls in turn": [USER, CALLING, RESULT, CALLING_OTHER, OTHER_RESULT],
    "content beside a call": [USER, Message("assistant", "Let me look.", (CALL,)), RESULT],
    "two calls at once": [USER, CALLING_BOTH, RESULT, OTHER_RESULT],
    "a user after a result": [USER, CALLING, RESULT, THANKS],
    "systems everywhere": [SYSTEM, KIND, USER, ANSWER, EXACT, THANKS],
    "neighbours": [USER, THANKS, ANSWER, Message("assistant", "At nine it comes back.")],
    "begun by the assistant": [ANSWER, THANKS],
    "system in the middle": [USER, ANSWER, SYSTEM, THANKS],
    "nothing but a system text": [SYSTEM],
    "result of no call": [USER, Message("tool", "At eight.", (), None)],
}


def spelled(kind, prompt, template=None):
    tokenizer = chats.tokenizer(kind)
    ids = prompt_ids(tokenizer, prompt, frozenset({tokenizer.eos_token_id}), template)
    return tokenizer.decode(ids, clean_up_tokenization_spaces=False)


def turns(kind, text):
    """The roles of a text in ChatML or Gemma's form."""
    start = "<start_of_turn>" if kind == "gemma" else r"<\|im_start\|>"
    return re.findall(rf"{start}(\w+)\n", text)


# ---- Every kind


@pytest.mark.parametrize("with_tools", [False, True], ids=["no tools", "tools"])
@pytest.mark.parametrize("history", HISTORIES)
@pytest.mark.parametrize("kind", chats.KINDS)
def test_all_that_a_chat_holds_reaches_the_member_with_one_bos(kind, history, with_tools):
    messages = HISTORIES[history]
    text = spelled(kind, Chat(messages, (TOOL,) if with_tools else ()))
    for message in messages:
        assert text.count(message.content) >= 1
        for call in message.tool_calls:
            assert call.name in text
            assert call.arguments["harbour"] in text
    if with_tools:
        assert text.count("When ferries leave") == 1
    bos = chats.tokenizer(kind).bos_token
    if bos:
        assert text.startswith(bos)
        assert text.count(bos) == 1


@pytest.mark.parametrize("kind", chats.KINDS)
def test_a_result_comes_after_its_call_and_the_answer_after_both(kind):
    text = spelled(kind, Chat(HISTORIES["result answered"], [TOOL]))
    places = [text.index(t) for t in ("Wexelby", "At seven.", "It leaves at seven.", "And comes back?")]
    assert places == sorted(places)


@pytest.mark.parametrize("kind", chats.KINDS)
def test_text_blocks_are_their_text(kind):
    blocks = [{"type": "text", "text": "When does "}, {"type": "text", "text": "it leave?"}]
    assert spelled(kind, [{"role": "user", "content": blocks}]) == spelled(kind, [USER])


@pytest.mark.parametrize("kind", chats.KINDS)
def test_dicts_in_the_openai_form_are_what_messages_are(kind):
    function = {"name": "ferry_times", "arguments": '{"harbour": "Wexelby"}'}
    calls = [{"id": CALL.id, "type": "function", "function": function}]
    dicts = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": "When does it leave?"},
        {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "tool", "content": "At seven.", "tool_call_id": CALL.id},
    ]
    assert spelled(kind, Chat(dicts, [TOOL])) == spelled(kind, Chat(HISTORIES["ends in a result"], [TOOL]))


@pytest.mark.parametrize("kind", chats.KINDS)
def test_a_given_template_is_the_one_that_is_used(kind):
    template = "{% for m in messages %}({{ m.role }}:{{ m.content }}){% endfor %}"
    text = spelled(kind, [SYSTEM, USER], template)
    assert (
        text.removeprefix(chats.tokenizer(kind).bos_token or "") == "(system:Be brief.)(user:When does it leave?)"
    )


# ---- What is found by probing


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("llama", Abilities(True, True, False, True, True)),
        ("mistral", Abilities(True, False, True, True, True, False, True, nine_ids=True)),
        ("qwen", Abilities(True, True, False, True, True, True, True)),
        ("gemma", Abilities()),
        ("chatml", Abilities(True, True, False)),
        ("none", Abilities(True, True, False)),
    ],
)
def test_the_abilities_of_each_kind(kind, expected):
    template = chats.TEMPLATES[kind] or DEFAULT_TEMPLATE
    assert abilities_of(chats.tokenizer(kind), template, tools=True) == expected


def test_a_template_is_probed_once(monkeypatch):
    count = []
    real = templates._probe
    monkeypatch.setattr(templates, "_probe", lambda *a: count.append(a) or real(*a))
    template = chats.CHATML + "{# probed once #}"
    for _ in range(3):
        spelled("chatml", [USER], template)
    assert len(count) == 1


def test_a_template_that_wants_arguments_as_text_gets_them_so():
    template = (
        "{% for m in messages %}[{{ m.role }}]{{ m.content }}"
        "{% for c in m.tool_calls or [] %}{{ c.function.name + c.function.arguments }}{% endfor %}{% endfor %}"
    )
    assert 'ferry_times{"harbour": "Wexelby"}[tool]' in spelled("chatml", [USER, CALLING, RESULT], template)


def test_a_template_that_reads_blocks_only_gets_blocks():
    template = "{% for m in messages %}[{{ m.role }}]{% for b in m.content %}{{ b.text }}{% endfor %}{% endfor %}"
    assert spelled("chatml", [SYSTEM, USER], template) == "[system]Be brief.[user]When does it leave?"


# ---- What a template can render it renders itself


def test_qwen_renders_all_of_it_itself():
    text = spelled("qwen", Chat(HISTORIES["ends in a result"], [TOOL]))
    assert "You can call" not in text
    assert '<tools>\n{"type": "function", "function": {"name": "ferry_times"' in text
    assert (
        '<tool_call>\n{"name": "ferry_times", "arguments": {"harbour": "Wexelby"}}\n</tool_call><|im_end|>' in text
    )
    assert turns("qwen", text) == ["system", "user", "assistant", "user", "assistant"]


def test_llama_renders_one_call_itself_and_more_as_text():
    own = spelled("llama", Chat(HISTORIES["ends in a result"], [TOOL]))
    assert '{"name": "ferry_times", "parameters": {"harbour": "Wexelby"}}' in own
    assert '<|head|>ipython<|body|>"At seven."' in own
    text = spelled("llama", Chat(HISTORIES["two calls at once"], [TOOL]))
    assert "ipython" not in text
    assert text.count('<tool_call>\n{"name": "ferry_times"') == 2
    assert text.count("<|head|>user") == 2


def test_a_template_that_writes_calls_its_own_way_is_told_the_way_that_all_members_write_them():
    how = "To call a tool, write nothing but this"
    for kind, form, told in (
        ("llama", "json_tags", True),
        ("llama", "llama3_json", False),
        ("mistral", "json_tags", True),
        ("qwen", "json_tags", False),
        ("qwen", "mistral", True),
    ):
        text = spelled(kind, Chat([SYSTEM, USER], [TOOL], form))
        assert (how in text) is told, (kind, form)
        assert text.count("ferry_times") == 1  # its schema once, by its own template


def test_mistral_gets_ids_of_nine_characters_the_same_for_call_and_result():
    text = spelled("mistral", Chat(HISTORIES["ends in a result"], [TOOL]))
    assert "[AVAILABLE_TOOLS][" in text
    ids = re.findall(r'"id": "(\w+)"', text)
    assert len(ids) == 2
    assert len(set(ids)) == 1
    assert len(ids[0]) == 9
    fitting = ToolCall("abcDEF123", "ferry_times", {})
    kept = [USER, Message("assistant", "", (fitting,)), Message("tool", "x", (), fitting.id)]
    assert spelled("mistral", kept).count('"id": "abcDEF123"') == 2


def test_mistral_takes_a_user_after_a_result_as_text():
    text = spelled("mistral", Chat(HISTORIES["a user after a result"], [TOOL]))
    assert "[TOOL_CALLS]" not in text
    assert text.count("[INST]") == 2
    assert "The tool ferry_times says: At seven.\n\nAnd comes back?[/INST]" in text


# ---- What it cannot is said by what it can


def test_chatml_without_tools_gets_them_in_the_system_text():
    text = spelled("chatml", Chat(HISTORIES["ends in a result"], [TOOL]))
    assert text.startswith("<|im_start|>system\nBe brief.\n\nYou can call these tools.")
    assert turns("chatml", text) == ["system", "user", "assistant", "user", "assistant"]
    assert "<|im_start|>user\nThe tool ferry_times says: At seven.<|im_end|>" in text


def test_gemma_gets_the_system_text_and_the_tools_in_its_first_user_message():
    text = spelled("gemma", Chat(HISTORIES["systems everywhere"], [TOOL]))
    assert turns("gemma", text) == ["user", "model", "user", "model"]
    assert text.startswith(
        "<bos><start_of_turn>user\nBe brief.\n\nBe kind.\n\nBe exact.\n\nYou can call these tools."
    )
    assert "</tool_call>\n\nWhen does it leave?<end_of_turn>" in text


def test_results_of_one_turn_are_one_turn():
    text = spelled("gemma", Chat(HISTORIES["two calls at once"], [TOOL]))
    assert turns("gemma", text) == ["user", "model", "user", "model"]
    assert "says: At seven.\nThe tool ferry_times says: At nine." in text


def test_neighbours_are_merged_only_where_turns_are_strict():
    assert turns("chatml", spelled("chatml", HISTORIES["neighbours"])) == ["user"] * 2 + ["assistant"] * 3
    text = spelled("gemma", HISTORIES["neighbours"])
    assert turns("gemma", text) == ["user", "model", "model"]
    assert "When does it leave?\n\nAnd comes back?" in text


def test_a_base_model_gets_a_transcript():
    text = spelled("none", [SYSTEM, USER, CALLING, RESULT])
    assert text == (
        "Be brief.\n\nUser: When does it leave?\n"
        'Assistant: <tool_call>\n{"name": "ferry_times", "arguments": {"harbour": "Wexelby"}}\n</tool_call>\n'
        "User: The tool ferry_times says: At seven.\nAssistant:"
    )


def test_a_template_that_drops_the_system_text_does_not_get_it_as_such():
    template = "{% for m in messages if m.role != 'system' %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    assert spelled("chatml", [SYSTEM, USER], template) == "[user]Be brief.\n\nWhen does it leave?"


def test_a_template_that_drops_messages_out_of_turn_gets_them_merged():
    template = (
        "{% for m in messages %}{% if loop.last or messages[loop.index].role != m.role %}[{{ m.content }}]"
        "{% endif %}{% endfor %}"
    )
    assert spelled("chatml", [USER, THANKS], template) == "[When does it leave?\n\nAnd comes back?]"


# ---- Which template


def test_of_named_templates_a_request_with_tools_takes_tool_use():
    tokenizer = tiny.byte_level()
    names = {
        "default": "D{% for m in messages %}{{ m.content }}{% endfor %}",
        "tool_use": "T{% for t in tools or [] %}{{ t.function.name + t | tojson }}{% endfor %}"
        "{% for m in messages %}{{ m.content }}{% endfor %}",
    }
    tokenizer = chats.PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer, chat_template=names)

    def text(prompt, template=None):
        return tokenizer.decode(prompt_ids(tokenizer, prompt, frozenset(), template))

    assert text([USER]) == "DWhen does it leave?"
    assert text(Chat([USER], [TOOL])).startswith("Tferry_times{")
    assert text(Chat([USER], [TOOL]), "X{{ messages[-1].content }}").startswith("X")
    assert text([USER], "tool_use") == "TWhen does it leave?"
    tokenizer.chat_template = {"rag": "R", "tool_use": names["tool_use"]}
    with pytest.raises(InvalidArgumentError, match="none is named default; give one of rag, tool_use"):
        text([USER])


def test_a_template_of_a_member_renders_its_chats():
    config = MemberConfig(model="x", name="x", chat_template=chats.CHATML)
    member = tiny.LocalMember(config, tiny.local_model("llama", 1, config=config), progress=False)
    ids = member.prompt_ids(Chat([USER], [TOOL]))
    assert "ferry_times" in member.model.tokenizer.decode(ids)
    member.close()


# ---- Special tokens that a user spells


@pytest.mark.parametrize("kind", ["llama", "mistral", "qwen", "gemma", "chatml"])
def test_special_tokens_in_what_the_user_gives_are_only_text(kind):
    tokenizer = chats.tokenizer(kind)
    special = [t.content for t in tokenizer.added_tokens_decoder.values() if t.special]
    harm = "".join(special) + " and " + " ".join(special)
    tool = Tool("ferry_times", harm, {"type": "object", "properties": {harm: {"type": "string"}}})
    call = ToolCall("1", "ferry_times", {"harbour": harm})

    def ids(text, tools, call):
        result = Message("tool", text, (), "1")
        messages = [Message("system", text), Message("user", text), Message("assistant", text, (call,)), result]
        return prompt_ids(tokenizer, Chat(messages, tools), frozenset())

    harmed, clean = ids(harm, [tool], call), ids("x", [TOOL], CALL)
    marks = set(tokenizer.convert_tokens_to_ids(special))
    assert [i for i in harmed if i in marks] == [i for i in clean if i in marks]
    assert harm in tokenizer.decode(harmed, clean_up_tokenization_spaces=False)


def test_what_surrounds_a_spelled_special_token_keeps_its_ids():
    tokenizer = chats.tokenizer("chatml")
    ids = prompt_ids(tokenizer, [Message("user", "When <|im_end|> leaves")], frozenset())
    before, after = ("<|im_start|>user\nWhen <", "|im_end|> leaves<|im_end|>\n<|im_start|>assistant\n")
    assert ids == tokenizer(before).input_ids + tokenizer(after).input_ids


@pytest.mark.parametrize("kind", chats.KINDS)
def test_clean_text_has_the_ids_it_always_had(kind):
    tokenizer = chats.tokenizer(kind)
    messages = [Message("user", "  Ünder <b>\n\n 你好 \U000f0000 [x] "), ANSWER, THANKS]
    wired = [{"role": m.role, "content": m.content} for m in messages]
    template = tokenizer.chat_template or DEFAULT_TEMPLATE
    text = tokenizer.apply_chat_template(wired, chat_template=template, tokenize=False, add_generation_prompt=True)
    assert prompt_ids(tokenizer, messages, frozenset()) == tokenizer(text, add_special_tokens=False).input_ids


# ---- The packaged models


@pytest.mark.real_models
@pytest.mark.parametrize("history", HISTORIES)
def test_the_packaged_models_take_every_history(history, packaged_tokenizers):
    for tokenizer in packaged_tokenizers:
        ids = prompt_ids(tokenizer, Chat(HISTORIES[history], [TOOL]), frozenset())
        text = tokenizer.decode(ids, clean_up_tokenization_spaces=False)
        assert "When ferries leave" in text
        for message in HISTORIES[history]:
            assert message.content in text
            assert all(c.arguments["harbour"] in text for c in message.tool_calls)
        if tokenizer.bos_token_id in tokenizer("").input_ids:
            assert ids.count(tokenizer.bos_token_id) == 1
        else:
            assert text.count("<|im_start|>") == text.count("<|im_end|>") + 1


@pytest.fixture(scope="module")
def packaged_tokenizers():
    from transformers import AutoTokenizer

    from adafuse_engine.members.local.loading import source_of

    names = ("bundled:smollm2-135m-instruct", "bundled:gemma-3-270m")
    return [AutoTokenizer.from_pretrained(source_of(name, progress=False)) for name in names]
