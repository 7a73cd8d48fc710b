"""Labels with templates that change earlier turns of a conversation."""

from __future__ import annotations

import pytest
from fixtures.chat_records import CALL, USER

from scalewise.data.chat_rendering import RenderRequest, RenderSetup, TemplateRenderer

CHANNELS = """{% for m in messages %}{% if m.role != 'assistant' %}\
<start>{{ m.role }}<message>{{ m.content }}<end>\
{% elif m.tool_calls %}{% set ns = namespace(final=false) %}\
{% for later in messages[loop.index:] %}{% if later.role == 'assistant' and not later.tool_calls %}\
{% set ns.final = true %}{% endif %}{% endfor %}\
{% if m.reasoning_content or m.content %}{% if not ns.final %}\
<start>assistant<channel>analysis<message>{{ m.reasoning_content or m.content }}<end>\
{% endif %}{% endif %}\
<start>assistant to=tool<message>{{ m.tool_calls[0].function.arguments }}<call>\
{% else %}{% if m.reasoning_content and loop.last %}\
<start>assistant<channel>analysis<message>{{ m.reasoning_content }}<end>{% endif %}\
<start>assistant<channel>final<message>{{ m.content }}<end>{% endif %}{% endfor %}\
{% if add_generation_prompt %}<start>assistant{% endif %}"""
"""Style of gpt-oss: a final answer removes the analysis of the calls before it."""
CALL_MESSAGE = {"role": "assistant", "content": "", "tool_calls": [CALL]}
RESULT = {"role": "tool", "content": "4 degrees"}
FINAL = {"role": "assistant", "content": "It is 4."}
FINAL_TEXT = "<channel>final<message>It is 4.<end>"
ANALYSIS_TEXT = "<channel>analysis<message>so<end><start>assistant"


@pytest.mark.parametrize("call", [{"content": "Look."}, {"reasoning_content": "Look."}, {}])
@pytest.mark.parametrize(
    ("final", "expected"),
    [({}, FINAL_TEXT), ({"reasoning_content": "so"}, ANALYSIS_TEXT + FINAL_TEXT)],
    ids=["final", "analysis"],
)
def test_labels_of_a_final_answer_include_its_channel(
    call: dict[str, str], final: dict[str, str], expected: str
) -> None:
    setup = RenderSetup({"default": CHANNELS}, {"eos_token": "<end>"}, 10)
    messages = [USER, CALL_MESSAGE | call, RESULT, FINAL | final]
    rendered = TemplateRenderer(setup).render_chat(RenderRequest(messages, [True] * 4))
    texts = [rendered.text[start:stop] for start, stop in rendered.spans]
    assert texts[-1] == expected
    assert rendered.rewritten == bool(call)
    assert len(texts) == 2 - bool(call)


TAGGED = """{% for m in messages %}<start>{{ m.role }}<message>{% if m.role == 'assistant' %}\
{% set parts = m.content.split('</think>') %}<think>{% if parts | length > 1 and loop.last %}\
{{ parts[0] | replace('<think>', '') }}{% endif %}</think>{{ parts[-1] }}\
{% else %}{{ m.content }}{% endif %}<end>{% endfor %}\
{% if add_generation_prompt %}<start>assistant<message><think>\n{% endif %}"""
"""Style of Nemotron: reasoning within a content replaces empty reasoning."""


def test_labels_of_an_answer_with_reasoning_in_its_content() -> None:
    setup = RenderSetup({"default": TAGGED}, {"eos_token": "<end>"}, 10)
    tagged = {"role": "assistant", "content": "<think>so</think>It is 4."}
    for messages, rewritten in (([USER, tagged], 0), ([USER, tagged, USER, tagged], 1)):
        request = RenderRequest(messages, [True] * len(messages))
        rendered = TemplateRenderer(setup).render_chat(request)
        texts = [rendered.text[start:stop] for start, stop in rendered.spans]
        assert texts == ["so</think>It is 4.<end>"]
        assert rendered.rewritten == rewritten
