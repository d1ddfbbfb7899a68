"""The handbook of a small ferry company, cut into sections that fit a small model's context."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

FOLDER = Path(__file__).parent / "corpus"


class Section(NamedTuple):
    source: str
    text: str


def load_sections(folder: Path = FOLDER) -> list[Section]:
    """One section per heading, each under its document's title, so that it can be read alone."""
    sections = []
    for path in sorted(folder.glob("*.md")):
        title, *parts = re.split(r"^#{1,2} ", path.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]
        title, _, lead = title.partition("\n")
        if lead.strip():
            sections.append(Section(path.name, f"{title}\n\n{lead.strip()}"))
        for part in parts:
            heading, _, body = part.partition("\n")
            sections.append(Section(path.name, f"{title}: {heading}\n\n{body.strip()}"))
    return sections
