"""Tables as text: plain columns for files and pipes, rich's tables for a terminal, Markdown."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from io import StringIO

__all__ = ["DrawTable", "bar", "markdown_table", "plain_table", "terminal_table"]

Rows = Sequence[Sequence[str]]
DrawTable = Callable[[Rows, Collection[int]], Iterator[str]]
"""From rows (the first one is the header) and the columns that begin at the left, to lines."""

_EIGHTHS = " ▏▎▍▌▋▊▉█"


def plain_table(rows: Rows, left: Collection[int] = ()) -> Iterator[str]:
    """Yield the lines of a table; each column is as wide as its widest cell."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = [
            cell.ljust(width) if column in left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        yield " ".join(cells).rstrip()


def terminal_table(rows: Rows, left: Collection[int] = ()) -> Iterator[str]:
    """Yield the lines of a table as rich draws it, with the escape codes of a terminal.

    Where the terminal is too narrow, text wraps in its column.
    """
    # Only a terminal needs rich, whose import takes as long as `show` itself.
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    # No frame, only a line under the header: rows can be copied, and fit in 100 columns.
    table = Table(box=box.SIMPLE_HEAD, header_style="bold", pad_edge=False, padding=(0, 1, 0, 0))
    for index, column in enumerate(zip(*rows, strict=True)):
        # rich narrows what may wrap before it cuts off what may not: numbers stay whole.
        is_text = index in left and not set("".join(column[1:])) <= set(_EIGHTHS)
        table.add_column(
            Text(column[0]), justify="left" if index in left else "right", no_wrap=not is_text
        )
    for row in rows[1:]:
        # As Text, since rich would take a word in brackets for markup.
        table.add_row(*map(Text, row))
    # Only drawn here, and printed by the caller; the width is still that of the real terminal.
    console = Console(file=StringIO(), force_terminal=True)
    with console.capture() as capture:
        console.print(table)
    # The box has an empty line above and below.
    yield from (line for line in capture.get().splitlines() if line.strip())


def markdown_table(rows: Rows, left: Collection[int] = ()) -> Iterator[str]:
    """Yield the lines of a table in Markdown, as GitHub shows it."""
    header, *body = ([cell.strip().replace("|", "\\|") for cell in row] for row in rows)
    sides = [":--" if column in left else "--:" for column in range(len(header))]
    for cells in (header, sides, *body):
        yield f"| {' | '.join(cells)} |"


def bar(part: float, width: int) -> str:
    """Return a bar of `width` columns of which `part` is filled, to an eighth of a column."""
    # Unicode has blocks of 1 to 7 eighths, so 5 columns show 40 lengths and not 5.
    eighths = round(part * width * 8)
    return ("█" * (eighths // 8) + _EIGHTHS[eighths % 8]).rstrip().ljust(width)
