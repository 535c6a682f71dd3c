"""Pages, read by a parser."""

from __future__ import annotations

from html.parser import HTMLParser

__all__ = ["Page"]

VOID = {"img", "meta"}


class Page(HTMLParser):
    """What is open at the end of a page, and which tags it has."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.add(tag)
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag
