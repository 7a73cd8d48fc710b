"""Texts of an outline as Markdown: bold stays, and nothing else has any power."""

import pytest
from markupsafe import Markup

from scalewise.reports import wandb_blocks


@pytest.mark.parametrize(
    ("text", "want"),
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
def test_plain_text_has_no_form(text: str, want: str) -> None:
    assert wandb_blocks.to_markdown(text) == want


def test_bold_is_what_stays_of_markup() -> None:
    safe = Markup('<b class="ct0">{}</b> &amp; <i>{}</i>').format("a<b>", "*")
    assert wandb_blocks.to_markdown(safe) == r"**a\<b\>** \& \*"
    assert wandb_blocks.to_plain_text(safe) == "a<b> & *"


def test_a_fence_outlasts_what_it_holds() -> None:
    held = "```\nrm\n````"
    lines = wandb_blocks.fenced_block(held).splitlines()
    assert lines[0] == lines[-1] == "`````"
    assert "\n".join(lines[1:-1]) == held


def test_a_table_has_its_sides() -> None:
    assert (
        wandb_blocks.markdown_table(["a", "b"], [["1", "2"]])
        == "| a | b |\n| :--- | ---: |\n| 1 | 2 |"
    )


def test_a_link_cannot_be_left() -> None:
    assert wandb_blocks.markdown_link("a]", "https://x/>(y") == r"[a\]](<https://x/%3E(y>)"
