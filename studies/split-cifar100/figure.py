"""Draw the average accuracy on all tasks so far, after each task of SplitCIFAR100, from the records of this folder.

python studies/split-cifar100/figure.py docs/accuracy.svg
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from statistics import mean, stdev

from exssnet.cli.console import one_line_errors
from exssnet.experiments import archive

METHODS = (
    ("exssnet", "shared", "ExSSNeT", "#2563a8"),
    ("er", "task", "replay (ER)", "#b45309"),
    ("naive", "task", "naive", "#6b7280"),
)
WIDTH, HEIGHT = 680, 320
LEFT, RIGHT, TOP, BOTTOM = 60, 530, 50, 270  # of the axes


def curves(file: Path) -> dict[tuple[str, str], list[list[float]]]:
    """For the methods of the picture, per task the averages of its runs."""
    found: dict[tuple[str, str], list[list[float]]] = {}
    shown = {(method, head) for method, head, _, _ in METHODS}
    for _, record in archive.read(file):
        if (record.method, record.config.head) not in shown:
            continue
        rows = [[value for value in row if value is not None] for row in record.accuracy_matrix]
        averages = [mean(row) for row in rows]
        runs = found.setdefault((record.method, record.config.head), [[] for _ in rows])
        for values, value in zip(runs, averages, strict=True):
            values.append(value)
    return found


def x_of(task: float, tasks: int) -> float:
    """The horizontal position of a number of tasks."""
    return LEFT + (task - 1) / (tasks - 1) * (RIGHT - LEFT)


def y_of(accuracy: float) -> float:
    """The vertical position of an accuracy in percent."""
    return BOTTOM - accuracy / 100 * (BOTTOM - TOP)


def text(x: float, y: float, words: str, style: str = "") -> str:
    """A line of text."""
    return f'<text x="{x:.1f}" y="{y:.1f}" {style}>{words}</text>'


def axes(tasks: int) -> list[str]:
    """Grid, ticks and titles."""
    parts = [text(LEFT, 26, "SplitCIFAR100: average accuracy on the tasks so far", 'font-size="15"')]
    for percent in range(0, 101, 20):
        y = y_of(percent)
        parts.append(f'<path d="M{LEFT} {y:.1f}H{RIGHT}" stroke="#e5e7eb"/>')
        parts.append(text(LEFT - 8, y + 4, f"{percent} %", 'text-anchor="end"'))
    for task in range(1, tasks + 1):
        parts.append(text(x_of(task, tasks), BOTTOM + 20, str(task), 'text-anchor="middle"'))
    parts.append(text((LEFT + RIGHT) / 2, BOTTOM + 40, "tasks learned", 'text-anchor="middle"'))
    return parts


def curve(runs: Sequence[Sequence[float]], title: str, colour: str, label_y: float) -> list[str]:
    """A line through the averages, bars of one standard deviation, and the last average as a label."""
    tasks = len(runs)
    points = [(x_of(task, tasks), y_of(mean(values))) for task, values in enumerate(runs, start=1)]
    parts = [f'<path d="M{"L".join(f"{x:.1f} {y:.1f}" for x, y in points)}" fill="none" stroke="{colour}" '
             'stroke-width="2.5"/>']  # fmt: skip
    for (x, y), values in zip(points, runs, strict=True):
        high, low = y_of(mean(values) + stdev(values)), y_of(mean(values) - stdev(values))
        parts.append(f'<path d="M{x:.1f} {high:.1f}V{low:.1f}" stroke="{colour}" stroke-width="1.5"/>')
        parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" fill="{colour}"/>')
    parts.append(text(RIGHT + 12, label_y, f"{title} {mean(runs[-1]):.1f} %", f'fill="{colour}" font-size="13"'))
    return parts


def main() -> None:
    """Read the records and write the picture."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path, help="SVG file to write")
    options = parser.parse_args()
    found = curves(Path(__file__).with_name(archive.NAME))
    parts = axes(len(found[METHODS[0][:2]]))
    lowest = 0.0
    for method, head, title, colour in METHODS:
        runs = found[method, head]
        lowest = max(y_of(mean(runs[-1])) + 4, lowest + 18)  # labels of curves that end together do not overlap
        parts += curve(runs, title, colour, lowest)
    options.file.write_text(
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" '
        'font-family="system-ui, sans-serif" font-size="12" fill="#374151">\n'
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>\n' + "\n".join(parts) + "\n</svg>\n"
    )


if __name__ == "__main__":
    with one_line_errors():
        main()
