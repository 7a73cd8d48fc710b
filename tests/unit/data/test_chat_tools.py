"""Tools of conversation records."""

from __future__ import annotations

import json
from typing import Any

import pytest
from fixtures.chat_records import ANSWER, SHAREGPT_TURNS, TOOL, USER, WRAPPED_TOOL, read_record


@pytest.mark.parametrize("tools", [[WRAPPED_TOOL], [TOOL], json.dumps([TOOL]), [json.dumps(TOOL)]])
@pytest.mark.parametrize(
    "record", [{"messages": [USER, ANSWER]}, {"conversations": SHAREGPT_TURNS}]
)
def test_chat_tools_are_read_in_every_form(tools: object, record: dict[str, Any]) -> None:
    assert read_record(record | {"tools": tools}).tools == [WRAPPED_TOOL]


def test_chat_functions_are_read_as_tools() -> None:
    assert read_record({"messages": [USER, ANSWER], "functions": [TOOL]}).tools == [WRAPPED_TOOL]


def test_chat_tools_that_are_repeated_are_read_once() -> None:
    record = {"messages": [USER, ANSWER], "tools": [WRAPPED_TOOL], "functions": [TOOL]}
    assert read_record(record).tools == [WRAPPED_TOOL]
