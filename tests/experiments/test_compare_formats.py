"""Tables of a comparison: they fit, they can be read back, and they say what the results page says."""

import csv
import re

import pytest
from tests.experiments.comparing import STUDIES, exssnet, rows

from exssnet.cli.compare_tables import FORMATS
from exssnet.experiments import compare


def test_several_benchmarks_have_one_table_of_methods_by_benchmarks(put):
    put("exssnet", [90.0, 92.0])
    put("er", [80.0, 82.0])
    folder = put("exssnet", [70.0, 72.0], benchmark="split-digits")
    for form in ("text", "markdown"):
        lines = FORMATS[form](rows(folder)).splitlines()
        assert lines[0].startswith("all benchmarks")
        assert next(line for line in lines if "exssnet" in line).split().count("(0.00)") == 2
        assert "–" in next(line for line in lines if re.match(r"\W*er\b", line))
    assert "| exssnet | shared | **71.00 ± 1.41** (0.00) | **91.00 ± 1.41** (0.00) |" in lines
    latex = FORMATS["latex"](rows(folder)).splitlines()
    assert r"exssnet & shared & \textbf{71.00 $\pm$ 1.41} (0.00) & \textbf{91.00 $\pm$ 1.41} (0.00) \\" in latex
    put("er", [60.0, 62.0], place="b", settings={"lr": 0.5})
    table = FORMATS["markdown"](rows(folder)).split("\n\n")[1].splitlines()
    assert [line.split(" | ")[1] for line in table if line.startswith("| er")] == ["lr=0.001", "lr=0.5"]


@pytest.fixture
def several(put):
    put("multitask", [97.0, 97.5], forgetting=None, storage=None)
    put("exssnet", [90.0, 92.0, 97.0])
    put("der++", [80.0, 80.5, 81.0], config={"head": "masked-test"}, forgetting=20.0)
    put("exssnet+kkt", [91.0, 92.0], place="b", settings={"kkt_start": "scores"})
    put("exssnet+kkt", [91.5, 92.0])
    return rows(put("si", [70.0, 71.0], benchmark="rotated-mnist", zero_forgetting=None, average_sparse_overlap=None))


def test_csv_gives_back_every_number_as_it_was(several):
    found = list(csv.DictReader(FORMATS["csv"](several).splitlines()))
    assert len(found) == len(several)
    for line, row in zip(found, several, strict=True):
        assert (line["benchmark"], line["method"], line["head"]) == (row.benchmark, row.method, row.head)
        assert float(line["accuracy"]) == row.accuracy[0]
        assert line["forgetting"] == ("" if row.forgetting is None else str(row.forgetting[0]))
        assert line["proved"] == {None: "", True: "yes", False: "no"}[row.proved]
        if row.difference is not None:
            low, high = float(line["difference_low"]), float(line["difference_high"])
            assert ((low + high) / 2, (high - low) / 2) == pytest.approx((row.difference.mean, row.difference.half))
            assert line["against"] == "exssnet"


def test_markdown_rows_have_as_many_cells_as_their_header_and_the_best_is_bold(several):
    blocks = [block for block in FORMATS["markdown"](several).split("\n\n") if block.startswith("|")][1:]
    assert len(blocks) == 2
    for block, benchmark in zip(blocks, ("rotated-mnist", "split-mnist"), strict=True):
        table = [line.strip("|").split("|") for line in block.splitlines()]
        assert len({len(cells) for cells in table}) == 1
        assert set(block.splitlines()[1]) <= set("|-: ")
        assert len(table) == 2 + sum(row.benchmark == benchmark for row in several)
        bold = [cells[0].strip() for cells in table if any("**" in cell for cell in cells)]
        assert bold == [row.method for row in several if row.best and row.benchmark == benchmark]


def test_latex_is_a_tabular_with_equal_rows_and_nothing_unescaped(several):
    overview, text = FORMATS["latex"](several).split("\n\n")
    assert overview.count(r"\textbf{") == text.count(r"\textbf{")
    body = re.fullmatch(
        r"\\begin\{tabular\}\{([lr]+)\}\n\\toprule\n(.*)\\bottomrule\n\\end\{tabular\}", text, re.DOTALL
    )
    lines = [line for line in body[2].splitlines() if line != r"\midrule"]
    assert all(line.endswith(r" \\") for line in lines)
    wide = [line for line in lines if line.startswith(r"\multicolumn")]
    assert wide == [rf"\multicolumn{{{len(body[1])}}}{{l}}{{{name}}} \\" for name in ("rotated-mnist", "split-mnist")]
    assert {line.count(" & ") for line in lines if line not in wide} == {len(body[1]) - 1}
    assert text.isascii()
    assert not re.search(r"(?<!\\)[%_#]", text)
    assert text.count("$") % 2 == 0
    assert text.count(r"\textbf{") == sum(row.best for row in several)
    assert r"kkt\_start=scores" in text


@pytest.mark.parametrize(
    "folders", [["split-mnist"], ["split-cifar100"], ["split-mnist-all-methods"], ["split-cifar100", "precision"]]
)
def test_a_benchmark_of_real_records_fits_in_80_columns_a_line_per_method(folders):
    done = exssnet(*(STUDIES / folder for folder in folders), COLUMNS="40")
    assert (done.returncode, done.stderr) == (0, "")
    assert max(map(len, done.stdout.splitlines())) <= 80
    row = re.compile(r"± \d+\.\d+ +\(|^exssnet.* \(0.00\)")
    found = [line.split()[0] for line in done.stdout.splitlines() if row.search(line)]
    shown = [row.method for row in compare.compare(compare.read(STUDIES / folder for folder in folders))]
    assert sorted(found) == sorted(shown)


def test_many_heads_and_methods_still_fit(put):
    for method, head in [("individual", "shared"), ("ewc-online", "task"), ("icarl", "masked-test"), ("er", "task")]:
        put(method, [40.0, 44.0, 46.0], benchmark="split-cifar100", config={"head": head}, forgetting=44.4)
    folder = put("exssnet+kkt", [80.0, 81.0, 83.0], benchmark="split-cifar100")
    done = exssnet(folder, "--against", "exssnet+kkt")
    assert max(map(len, done.stdout.splitlines())) <= 80, done.stdout
