"""The rows of a comparison as text, Markdown, LaTeX or CSV."""

from __future__ import annotations

import csv
import io
import re
import textwrap
from collections.abc import Callable, Iterable, Sequence
from itertools import groupby
from typing import NamedTuple

from rich.table import Table
from rich.text import Text

from exssnet.cli.console import rich_console
from exssnet.experiments.compare import Row, Spread

WIDTH = 80  # columns of a terminal
NONE = "–"
ACCURACY = "accuracy % (forgetting)"
OVERVIEW = f"all benchmarks: {ACCURACY}"
LEFT = ("method", "settings", "head", "published")  # columns of words; the others are numbers, to the right


class Cell(NamedTuple):
    """A cell of a table; the best value is bold up to its bracket."""

    text: str
    best: bool = False

    def parts(self) -> tuple[str, str]:
        """The bold part, and the rest."""
        bold, bracket, rest = self.text.partition("(")
        return bold, bracket + rest


Cells = dict[str, Cell]  # by column


# --- for people ----------------------------------------------------------------------------------------------


def text(rows: Sequence[Row]) -> str:
    """Write text tables; without a terminal no cell is wrapped."""
    terminal = rich_console().is_terminal
    console = rich_console() if terminal else rich_console(width=1000)
    room = console.width if terminal else WIDTH
    with console.capture() as captured:
        for title, block in [(OVERVIEW, []), *_blocks(rows)]:
            cells = _cells(block) if block else _overview(rows)
            if not cells:
                continue
            alike = _alike(block)
            console.print(Text(", ".join([title, *alike.values()]), "italic"))
            table = _table(cells, [*alike], gap=2)
            needed = console.measure(table, options=console.options.update(width=1000)).maximum
            console.print(table if needed <= room else _table(cells, [*alike], gap=1))
            console.print()
    lines = captured.get().splitlines() + textwrap.wrap(caption(rows), min(room, WIDTH))
    return "\n".join(line.rstrip() for line in lines)


def _alike(rows: Sequence[Row]) -> dict[str, str]:
    """Find columns with one value in all rows: it is printed once above the table."""
    heads, seeds = {row.head for row in rows}, {row.seeds for row in rows}
    found = {"head": f"{rows[0].head} head"} if len(heads) == 1 else {}
    return found | ({"seeds": f"{rows[0].seeds} seed{'s' * (seeds != {1})}"} if len(seeds) == 1 else {})


def _table(cells: Sequence[Cells], above: Sequence[str], gap: int) -> Table:
    """Make a table without the columns printed above it; settings are below the method's name."""
    table = Table(box=None, pad_edge=False, padding=(0, gap, 0, 0))
    names = [name for name in cells[0] if name not in (*above, "settings")]
    for name in names:
        heading = "n" if name == "seeds" else name.replace(" (", "\n(").replace("@", "\n@")
        table.add_column(heading, justify="left" if name in LEFT else "right")
    for row in cells:
        texts = {name: Text(row[name].text.removesuffix("-test" if name == "head" else "")) for name in names}
        for setting in _settings(row):
            texts["method"].append(f"\n {setting}", "dim")
        for name in names:
            if row[name].best:
                texts[name].stylize("bold", 0, len(row[name].parts()[0]))
        table.add_row(*texts.values())
    return table


def _settings(row: Cells) -> list[str]:
    said = row["settings"].text if "settings" in row else NONE
    return [] if said == NONE else said.split(", ")


def markdown(rows: Sequence[Row]) -> str:
    """Write a Markdown table per benchmark, after one of all benchmarks if there are several."""
    tables = [(OVERVIEW, _overview(rows)), *((title, _cells(block)) for title, block in _blocks(rows))]
    parts = []
    for title, cells in tables:
        if cells:
            lines = [_pipes(cells[0]), _pipes("---" if name in LEFT else "---:" for name in cells[0])]
            lines += [_pipes(map(_starred, row.values())) for row in cells]
            parts.append("\n".join([title, "", *lines]))
    return "\n\n".join([*parts, caption(rows)])


def _starred(cell: Cell) -> str:
    bold, rest = (part.replace("|", r"\|") for part in cell.parts())
    return f"**{bold.rstrip()}** {rest}" if cell.best else bold + rest


def _pipes(values: Iterable[str]) -> str:
    return re.sub(" +", " ", f"| {' | '.join(values)} |")  # aligned when rendered


# --- for papers and programs ---------------------------------------------------------------------------------


def latex(rows: Sequence[Row]) -> str:
    """Write a LaTeX tabular with booktabs rules, after one of all benchmarks if there are several."""
    lines = [r"% needs \usepackage{booktabs}", *(f"% {line}" for line in textwrap.wrap(caption(rows), 118))]
    overview = _overview(rows)
    if overview:
        lines += [f"% {OVERVIEW}", *_tabular(overview, [r"\midrule", *map(_ampersands, overview)]), ""]
    cells, body, title = _cells(rows), [], ""
    for row, cell in zip(rows, cells, strict=True):
        if row.title != title:
            title = row.title
            body += [r"\midrule", rf"\multicolumn{{{len(cell)}}}{{l}}{{{_escaped(title)}}} \\"]
        body.append(_ampersands(cell))
    return "\n".join([*lines, *_tabular(cells, body)])


def _tabular(cells: Sequence[Cells], body: Sequence[str]) -> list[str]:
    columns = "".join("l" if name in LEFT else "r" for name in cells[0])
    top = [rf"\begin{{tabular}}{{{columns}}}", r"\toprule", _ampersands({name: Cell(name) for name in cells[0]})]
    return [*top, *body, r"\bottomrule", r"\end{tabular}"]


def _ampersands(cells: Cells) -> str:
    return " & ".join(map(_set, cells.values())) + r" \\"


def _set(cell: Cell) -> str:
    bold, rest = map(_escaped, cell.parts())
    return rf"\textbf{{{bold.rstrip()}}} {rest}".rstrip() if cell.best else bold + rest


_LATEX = {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "±": r"$\pm$", NONE: "--"}


def _escaped(value: str) -> str:
    escaped = re.sub(r"[\\~^±–&%$#_{}]", lambda found: _LATEX.get(found[0], "\\" + found[0]), value)
    return re.sub(r"^-(?=\d)", "$-$", escaped)  # a minus sign, not a hyphen


def as_csv(rows: Sequence[Row]) -> str:
    """Write CSV with full precision; a missing value is an empty field."""
    stream = io.StringIO()
    lines = [_numbers(row) for row in rows]
    writer = csv.DictWriter(stream, list(lines[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(lines)
    return stream.getvalue().rstrip("\n")


def _numbers(row: Row) -> dict[str, str | int | float | None]:
    gap, published = row.difference, row.published or (None, None)
    return {
        "benchmark": row.benchmark,
        "miniature": "yes" if row.miniature else "no",
        "method": row.method,
        "settings": "; ".join(row.differs),
        "head": row.head,
        "seeds": row.seeds,
        **_both("accuracy", row.accuracy),
        **_both("forgetting", row.forgetting),
        **_both("overlap", row.overlap),
        "proved": {None: None, True: "yes", False: "no"}[row.proved],
        "published_accuracy": published[0],
        "published_forgetting": published[1],
        "against": None if gap is None else row.against,
        "difference": None if gap is None else gap.mean,
        "difference_low": None if gap is None else gap.mean - gap.half,
        "difference_high": None if gap is None else gap.mean + gap.half,
        "pairs": None if gap is None else gap.pairs,
        **_both("megabytes", row.megabytes),
        **_both("seconds", row.seconds),
    }


def _both(name: str, value: Spread | None) -> dict[str, float | None]:
    average, std = value or (None, None)
    return {name: average, f"{name}_std": std}


FORMATS: dict[str, Callable[[Sequence[Row]], str]] = {
    "text": text,
    "markdown": markdown,
    "latex": latex,
    "csv": as_csv,
}


def caption(rows: Sequence[Row]) -> str:
    """Explain the columns."""
    parts = ["accuracy: mean ± standard deviation over seeds"]
    if any(row.published for row in rows):
        parts.append("published: Yadav and Bansal (2023)")
    against = rows[0].against
    if any(row.difference for row in rows):
        parts.append(f"vs {against}: mean difference of the same seeds ± its 95 % interval")
    elif against and any(row.method != against.partition("@")[0] for row in rows):
        parts.append(f"vs {against}: left out, needs two common seeds and one row of {against}")
    return "; ".join([*parts, "MB: storage; s: seconds of a run"])


def _blocks(rows: Sequence[Row]) -> list[tuple[str, list[Row]]]:
    return [(title, list(block)) for title, block in groupby(rows, key=lambda row: row.title)]


def _cells(rows: Sequence[Row]) -> list[Cells]:
    """Format the cells; columns without any value are left out."""
    accuracies = _accuracies(rows)
    cells = [
        {
            "method": row.method,
            "settings": ", ".join(row.differs) or NONE,
            "head": row.head,
            "seeds": str(row.seeds),
            ACCURACY: accuracy,
            "published": _published(row),
            f"vs {row.against}": _difference(row),
            "MB": NONE if row.megabytes is None else f"{row.megabytes[0]:.{2 if row.megabytes[0] < 9.995 else 1}f}",
            "s": NONE if row.seconds is None else f"{row.seconds[0]:.{0 if row.seconds[0] >= 10 else 1}f}",
        }
        for row, accuracy in zip(rows, accuracies, strict=True)
    ]
    shown = [name for name in cells[0] if any(cell[name] != NONE for cell in cells)]
    return [
        {name: Cell(cell[name], row.best and name == ACCURACY) for name in shown}
        for row, cell in zip(rows, cells, strict=True)
    ]


def _overview(rows: Sequence[Row]) -> list[Cells]:
    """Make a table of methods × benchmarks; empty for one benchmark."""
    blocks = _blocks(rows)
    if len(blocks) < 2:
        return []
    cell_of = {
        (row.method, row.head, row.differs, title): Cell(accuracy, row.best)
        for title, block in blocks
        for row, accuracy in zip(block, _accuracies(block), strict=True)
    }
    lines = list(dict.fromkeys((row.method, row.head, row.differs) for row in rows))
    labelled = any(differs for _, _, differs in lines)
    return [
        {"method": Cell(method)}
        | ({"settings": Cell(", ".join(differs) or NONE)} if labelled else {})
        | {"head": Cell(head)}
        | {title: cell_of.get((method, head, differs, title), Cell(NONE)) for title, _ in blocks}
        for method, head, differs in lines
    ]


def _accuracies(rows: Sequence[Row]) -> list[str]:
    """Format accuracy and forgetting of each row, padded to one width."""
    lost = [f"({NONE if row.forgetting is None else format(row.forgetting[0], 'z.2f')})" for row in rows]
    width = max(map(len, lost))
    return [f"{_with_std(row)} {forgetting:>{width}}" for row, forgetting in zip(rows, lost, strict=True)]


def _with_std(row: Row) -> str:
    average, std = row.accuracy
    return f"{average:.2f}" if std is None else f"{average:.2f} ± {std:.2f}"


def _published(row: Row) -> str:
    if row.published is None:
        return NONE
    accuracy, forgetting = row.published
    return f"{accuracy}" if forgetting is None else f"{accuracy} ({forgetting})"


def _difference(row: Row) -> str:
    return NONE if row.difference is None else f"{row.difference.mean:+z.2f} ± {row.difference.half:.2f}"
