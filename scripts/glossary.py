"""Keeps the numbers of docs/glossary.md true: `python -m scripts.glossary` rewrites its table."""

from __future__ import annotations

import re
import tokenize
from io import StringIO
from pathlib import Path

from libdsec.wire import defaults

GLOSSARY = Path(__file__).parents[1] / "docs" / "glossary.md"
BEGIN, END = "<!-- numbers: begin -->", "<!-- numbers: end -->"


def comments() -> dict[str, str]:
    """The remark beside each constant of libdsec/wire/defaults.py."""
    assert defaults.__file__
    found: dict[str, str] = {}
    name = ""
    for token in tokenize.generate_tokens(StringIO(Path(defaults.__file__).read_text()).readline):
        if token.type == tokenize.NAME and token.start[1] == 0:
            name = token.string
        elif token.type == tokenize.COMMENT and token.start[1] > 0:
            found[name] = token.string.lstrip("# ")
    return found


def table() -> str:
    remarks = comments()
    rows = ["| name | value | |", "|---|---|---|"]
    for name, value in vars(defaults).items():
        if name.isupper():
            shown = f"{value[0]:,} to {value[1]:,}" if isinstance(value, tuple) else f"{value:,}"
            rows.append(f"| {name} | {shown} | {remarks.get(name, '')} |")
    return "\n".join(rows)


def updated(text: str) -> str:
    """The glossary with its table as the code says."""
    pattern = re.compile(f"{re.escape(BEGIN)}.*{re.escape(END)}", re.DOTALL)
    return pattern.sub(f"{BEGIN}\n{table()}\n{END}", text)


if __name__ == "__main__":
    GLOSSARY.write_text(updated(GLOSSARY.read_text()))
