"""The rows of a comparison as text, Markdown, LaTeX or CSV."""

from __future__ import annotations

import csv
import io
import re
import textwrap
from collections.abc import Callable, Iterable, Sequence
from itertools import groupby

from rich.console import Console
from rich.table import Table
from rich.text import Text

from exssnet.experiments.compare import Row, Spread

WIDTH = 80  # columns of a terminal
NONE = "–"
ACCURACY = "accuracy % (forgetting)"
LEFT = ("method", "settings", "head", "published")  # columns of words; the others are numbers, to the right

OVERVIEW = "all benchmarks: accuracy % (forgetting)"

Cells = dict[str, str]  # by column


def text(rows: Sequence[Row]) -> str:
    """Blocks for people; where there is no terminal no cell is folded."""
    terminal = Console().is_terminal
    console = Console() if terminal else Console(width=1000)
    room = console.width if terminal else WIDTH
    overview = _overview(rows)
    with console.capture() as captured:
        if overview:
            table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
            for name in overview[0]:
                table.add_column(name, justify="left" if name in LEFT else "right")
            for cells in overview:
                table.add_row(*cells.values())
            console.print(Text(OVERVIEW, "italic"), table, "", sep="\n")
        for title, block in _blocks(rows):
            alike = _alike(block)
            console.print(Text(", ".join([title, *alike.values()]), "italic"))
            table = _table(block, [*alike], gap=2)
            needed = console.measure(table, options=console.options.update(width=1000)).maximum
            console.print(table if needed <= room else _table(block, [*alike], gap=1))
            console.print()
    lines = captured.get().splitlines() + textwrap.wrap(caption(rows), min(room, WIDTH))
    return "\n".join(line.rstrip() for line in lines)


def _alike(rows: Sequence[Row]) -> dict[str, str]:
    """Columns that have one value in all rows: it is told once, and the table stays narrow."""
    heads, seeds = {row.head for row in rows}, {row.seeds for row in rows}
    found = {"head": f"{rows[0].head} head"} if len(heads) == 1 else {}
    return found | ({"seeds": f"{rows[0].seeds} seed{'s' * (seeds != {1})}"} if len(seeds) == 1 else {})


def _table(rows: Sequence[Row], above: Sequence[str], gap: int) -> Table:
    """A block without the columns that are told above it; settings stand below the method's name."""
    table = Table(box=None, pad_edge=False, padding=(0, gap, 0, 0))
    cells = _cells(rows)
    names = [name for name in cells[0] if name not in (*above, "settings")]
    for name in names:
        heading = "n" if name == "seeds" else name.replace(" (", "\n(")
        table.add_column(heading, justify="left" if name in LEFT else "right")
    for row, cell in zip(rows, cells, strict=True):
        texts = {name: Text(cell[name].removesuffix("-test") if name == "head" else cell[name]) for name in names}
        for setting in row.differs:
            texts["method"].append(f"\n {setting}", "dim")
        if row.best:
            texts[ACCURACY].stylize("bold", 0, cell[ACCURACY].index("("))
        table.add_row(*texts.values())
    return table


def markdown(rows: Sequence[Row]) -> str:
    """A table per benchmark, under its name."""
    parts = []
    overview = _overview(rows)
    if overview:
        lines = [OVERVIEW, "", _pipes(overview[0]), _pipes("---" if name in LEFT else "---:" for name in overview[0])]
        parts.append("\n".join([*lines, *(_pipes(cells.values()) for cells in overview)]))
    for title, block in _blocks(rows):
        cells = _cells(block)
        lines = [title, "", _pipes(cells[0]), _pipes("---" if name in LEFT else "---:" for name in cells[0])]
        for row, cell in zip(block, cells, strict=True):
            if row.best:
                cell[ACCURACY] = _bold(cell[ACCURACY], "**", "**")
            lines.append(_pipes(value.replace("|", r"\|") for value in cell.values()))
        parts.append("\n".join(lines))
    return "\n\n".join([*parts, caption(rows)])


def _pipes(values: Iterable[str]) -> str:
    return re.sub(" +", " ", f"| {' | '.join(values)} |")  # columns are aligned where they are read


def latex(rows: Sequence[Row]) -> str:
    """One tabular with the rules of booktabs, a part per benchmark."""
    cells = _cells(rows)
    lines = [
        r"% needs \usepackage{booktabs}",
        *(f"% {line}" for line in textwrap.wrap(caption(rows), 118)),
        rf"\begin{{tabular}}{{{''.join('l' if name in LEFT else 'r' for name in cells[0])}}}",
        r"\toprule",
        " & ".join(map(_escaped, cells[0])) + r" \\",
    ]
    title = ""
    for row, cell in zip(rows, cells, strict=True):
        if row.title != title:
            title = row.title
            lines += [r"\midrule", rf"\multicolumn{{{len(cell)}}}{{l}}{{{_escaped(title)}}} \\"]
        values = {name: _escaped(value) for name, value in cell.items()}
        if row.best:
            values[ACCURACY] = _bold(values[ACCURACY], r"\textbf{", "}")
        lines.append(" & ".join(values.values()) + r" \\")
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}"])


_LATEX = {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "±": r"$\pm$", NONE: "--"}


def _escaped(value: str) -> str:
    escaped = re.sub(r"[\\~^±–&%$#_{}]", lambda found: _LATEX.get(found[0], "\\" + found[0]), value)
    return re.sub(r"^-(?=\d)", "$-$", escaped)  # a minus sign, no hyphen


def as_csv(rows: Sequence[Row]) -> str:
    """One line per row, numbers as they are; an empty field where there is none."""
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
    """What the columns hold."""
    parts = ["accuracy: mean ± standard deviation over seeds"]
    if any(row.published for row in rows):
        parts.append("published: Yadav and Bansal (2023)")
    if any(row.difference for row in rows):
        parts.append(f"vs {rows[0].against}: mean difference of the same seeds ± its 95 % interval")
    return "; ".join([*parts, "MB: storage; s: seconds of a run"])


def _blocks(rows: Sequence[Row]) -> list[tuple[str, list[Row]]]:
    return [(title, list(block)) for title, block in groupby(rows, key=lambda row: row.title)]


def _cells(rows: Sequence[Row]) -> list[Cells]:
    """The table's text; columns in which no row has anything are left out."""
    lost = [f"({NONE if row.forgetting is None else format(row.forgetting[0], 'z.2f')})" for row in rows]
    width = max(map(len, lost))
    cells = [
        {
            "method": row.method,
            "settings": ", ".join(row.differs) or NONE,
            "head": row.head,
            "seeds": str(row.seeds),
            ACCURACY: f"{_with_std(row)} {forgetting:>{width}}",
            "published": _published(row),
            f"vs {row.against}": _difference(row),
            "MB": NONE if row.megabytes is None else f"{row.megabytes[0]:.{2 if row.megabytes[0] < 9.995 else 1}f}",
            "s": NONE if row.seconds is None else f"{row.seconds[0]:.{0 if row.seconds[0] >= 10 else 1}f}",
        }
        for row, forgetting in zip(rows, lost, strict=True)
    ]
    kept = [name for name in cells[0] if any(cell[name] != NONE for cell in cells)]
    return [{name: cell[name] for name in kept} for cell in cells]


def _overview(rows: Sequence[Row]) -> list[Cells]:
    """Methods × benchmarks: accuracy (forgetting); nothing for one benchmark, or where a method has several rows."""
    titles = list(dict.fromkeys(row.title for row in rows))
    places = {(row.method, row.head, row.title): row for row in rows}
    if len(titles) < 2 or len(places) < len(rows):
        return []
    lines = dict.fromkeys((row.method, row.head) for row in rows)
    return [
        {"method": method, "head": head} | {title: _short(places.get((method, head, title))) for title in titles}
        for method, head in lines
    ]


def _short(row: Row | None) -> str:
    if row is None:
        return NONE
    lost = NONE if row.forgetting is None else format(row.forgetting[0], "z.2f")
    return f"{row.accuracy[0]:.2f} ({lost})"


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


def _bold(cell: str, before: str, after: str) -> str:
    accuracy, _, forgetting = cell.partition("(")
    return f"{before}{accuracy.rstrip()}{after} ({forgetting}"
