"""Parts of a conversation that a chat template omits are errors, not lost."""

from __future__ import annotations

from typing import Any

import pytest
from fixtures.chat_records import ANSWER, USER, read_record
from fixtures.chat_templates import CHATML, ZEPHYR

from scalewise.data.chat_rendering import RenderRequest, RenderSetup, TemplateRenderer
from scalewise.data.chat_templates import PlainTemplate

SPECIAL_TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
FIRST_CALL = """{% for m in messages %}<{{ m.role }}>{% if m.tool_calls %}\
{{ m.tool_calls[0].function.name }}({{ m.tool_calls[0].function.arguments | tojson }})\
{% endif %}{{ m.content }}{{ eos_token }}{% endfor %}\
{% if add_generation_prompt %}<assistant>{% endif %}"""
"""Style of gpt-oss: only the first of several calls is rendered."""
WITHOUT_TOOLS = ZEPHYR.replace(
    "{% for m in messages %}", "{% for m in messages if m.role != 'tool' %}"
)
"""Style of Vicuna: turns of unknown roles are skipped."""


def call(city: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "weather", "arguments": {"city": city}}}


def render(template: str, *messages: dict[str, Any], **fields: Any) -> str:
    renderer = TemplateRenderer(RenderSetup({"default": template}, SPECIAL_TOKENS, 10))
    return renderer.render_chat(RenderRequest([*messages], [True] * len(messages), **fields)).text


def test_each_of_several_calls_is_rendered() -> None:
    one, two = (
        {"role": "assistant", "content": "", "tool_calls": calls}
        for calls in ([call("Oslo")], [call("Oslo"), call("Rome")])
    )
    assert "Oslo" in render(FIRST_CALL, USER, one)
    with pytest.raises(ValueError, match=r"several tool_calls in a turn, of which .* number 2"):
        render(FIRST_CALL, USER, two)
    every_call = FIRST_CALL.replace("{% if m.tool_calls %}", "{% for call in m.tool_calls or [] %}")
    every_call = every_call.replace("m.tool_calls[0]", "call").replace(
        "{% endif %}{{ m.content", "{% endfor %}{{ m.content"
    )
    assert "Rome" in render(every_call, USER, two)


def test_short_turn_within_another_is_not_lost() -> None:
    messages = [USER, ANSWER, {"role": "tool", "content": "4"}, ANSWER | {"content": "It is 4."}]
    assert "tool" in render(ZEPHYR, *messages)
    with pytest.raises(ValueError, match="has a turn of 'tool', which the chat template omits"):
        render(WITHOUT_TOOLS, *messages)


def test_variables_that_no_template_reads_are_rejected() -> None:
    reads = CHATML + "{% if custom %}{{ custom }}{% endif %}"
    assert render(reads, USER, ANSWER, variables={"custom": "yes"}).endswith("yes")
    assert render(CHATML, USER, ANSWER, variables={"custom": False})
    with pytest.raises(ValueError, match="has chat_template_kwargs with custom, which the chat"):
        render(CHATML, USER, ANSWER, variables={"custom": "yes"})
    record = {"messages": [USER, ANSWER], "chat_template_kwargs": {"custom": "yes"}}
    with pytest.raises(
        ValueError, match="has chat_template_kwargs, which requires a chat template"
    ):
        PlainTemplate("</s>")(read_record(record))


def test_prompt_of_an_encoder_is_complete() -> None:
    renderer = TemplateRenderer(RenderSetup({"default": CHATML}, SPECIAL_TOKENS, 10))
    with pytest.raises(ValueError, match="has tools, which the chat template omits"):
        renderer.render_prompt(RenderRequest([USER], [True], tools=[call("Oslo")]))
