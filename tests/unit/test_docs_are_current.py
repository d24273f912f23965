"""Generated pages say what the code says."""

from __future__ import annotations

from pathlib import Path

from scripts import glossary, messages

DOCS = Path(__file__).parents[2] / "docs"


def test_messages_page_is_generated_from_the_contracts() -> None:
    assert (DOCS / "messages.md").read_text() == messages.render(), "run `make docs`"


def test_glossary_numbers_are_the_codes() -> None:
    text = (DOCS / "glossary.md").read_text()
    assert text == glossary.updated(text), "run `make docs`"
