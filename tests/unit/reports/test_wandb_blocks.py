"""Report texts as Markdown: bold text stays, everything else is escaped."""

import pytest
from markupsafe import Markup

from scalewise.reports import wandb_blocks


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("bf16_mixed * 2", r"bf16\_mixed \* 2"),
        ("<img src=x>", r"\<img src=x\>"),
        ("[a](b) `c` $d$ | e", r"\[a\]\(b\) \`c\` \$d\$ \| e"),
        ("# head", r"\# head"),
        ("- item", r"\- item"),
        ("12. item", r"12\. item"),
        ("-5 and 3.65", "-5 and 3.65"),
        ("two\nlines", "two lines"),
        ("&lt;", r"\&lt;"),
    ],
)
def test_markdown_escapes_plain_text(text: str, expected: str) -> None:
    assert wandb_blocks.to_markdown(text) == expected


def test_markdown_keeps_bold() -> None:
    safe = Markup('<b class="ct0">{}</b> &amp; <i>{}</i>').format("a<b>", "*")
    assert wandb_blocks.to_markdown(safe) == r"**a\<b\>** \& \*"
    assert wandb_blocks.to_plain_text(safe) == "a<b> & *"


def test_markdown_fence_is_longer_than_its_content() -> None:
    code = "```\nrm\n````"
    lines = wandb_blocks.fenced_block(code).splitlines()
    assert lines[0] == lines[-1] == "`````"
    assert "\n".join(lines[1:-1]) == code


def test_markdown_table_aligns_columns() -> None:
    assert (
        wandb_blocks.markdown_table(["a", "b"], [["1", "2"]])
        == "| a | b |\n| :--- | ---: |\n| 1 | 2 |"
    )


def test_markdown_link_cannot_be_closed_by_its_text() -> None:
    assert wandb_blocks.markdown_link("a]", "https://x/>(y") == r"[a\]](<https://x/%3E(y>)"
