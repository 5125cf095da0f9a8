"""A second tool, to show what one is, a name, a JSON schema and a callable: keyword search over text files.

In use as soon as episodes.Agents has tools["search_notes"] = SearchNotes("folder"). Standard library only.
"""

import re
from collections import Counter
from pathlib import Path


class SearchNotes:
    """Called with a query: the `most` paragraphs of folder's *.txt and *.md files that match it best."""

    query = {"type": "string", "description": "keywords"}
    parameters = {"type": "object", "properties": {"query": query}, "required": ["query"]}
    about = "Search the notes by keywords and return the paragraphs that match best."
    schema = {"name": "search_notes", "description": about, "parameters": parameters}
    schema = {"type": "function", "function": schema}

    def __init__(self, folder: str, most: int = 3) -> None:
        self.most, self.notes = most, []  # [(file, paragraph, its words)]
        files = sorted(path for path in Path(folder).rglob("*") if path.suffix in (".txt", ".md"))
        for path in files:
            for paragraph in re.split(r"\n\s*\n", path.read_text(encoding="utf-8", errors="replace").strip()):
                self.notes.append((path.relative_to(folder), paragraph, set(words(paragraph))))
        if not self.notes:
            raise ValueError(f"{folder} holds no text, in no file *.txt or *.md; give another folder")
        self.spread = Counter(word for *_, found in self.notes for word in found)

    def __call__(self, query: str) -> str:
        wanted = set(words(query))  # a rare word tells more than one that stands everywhere
        score = [sum(1 / self.spread[word] for word in sorted(wanted & found)) for *_, found in self.notes]
        best = sorted((-s, i) for i, s in enumerate(score) if s)[: self.most]
        return "\n\n".join(f"{self.notes[i][0]}: {self.notes[i][1]}" for _, i in best) or "no note matches"


def words(text: str) -> list[str]:
    return re.findall(r"\w+", text.lower())
