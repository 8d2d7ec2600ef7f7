"""Reads an HTML page as a browser does."""

from __future__ import annotations

from html.parser import HTMLParser


class Page(HTMLParser):
    """Text by element, attributes by element, and every attribute that could reach for the network."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.text: dict[str, list[str]] = {}
        self.attributes: dict[str, dict[str, str | None]] = {}
        self.links: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes[tag] = dict(attrs)
        self.links += [f"{tag} {name}" for name, _ in attrs if name in {"src", "href", "action", "data", "srcset"}]

    def handle_data(self, data: str) -> None:
        if self.tags and data.strip():
            self.text.setdefault(self.tags[-1], []).append(data.strip())


def check_alone(text: str) -> None:
    """The page needs no other file, follows the reader's colour scheme, and has no comments."""
    assert not Page(text).links
    for word in ("http:", "https:", "//cdn", "@import", "url(", "fetch(", "import("):
        assert word not in text
    assert "prefers-color-scheme: dark" in text
    assert "<!--" not in text
