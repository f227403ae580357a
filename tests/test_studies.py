"""What studies and docs say about records: every table is what its command prints, and links lead somewhere."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.experiments.comparing import STUDIES, record_of

from exssnet.experiments import archive

ROOT = STUDIES.parent
PAGES = [ROOT / "README.md", ROOT / "docs/performance.md", *sorted(STUDIES.rglob("README.md"))]
COMMAND = re.compile(r"exssnet compare .*|python studies/\S+/table\.py")
TABLE = re.compile(r"(?:^\|.*\n)+", re.MULTILINE)
IDS = [str(page.relative_to(ROOT)) for page in PAGES]


def tables(page: Path) -> Iterator[tuple[str, list[str]]]:
    """Every table of numbers, and the command that stands above it."""
    command = ""
    for part in re.split(r"^(```.*?^```)$", page.read_text("utf-8"), flags=re.MULTILINE | re.DOTALL):
        if part.startswith("```"):
            code = part.strip("`\n").splitlines()
            command = code[0] if len(code) == 1 and COMMAND.fullmatch(code[0]) else ""
            continue
        for found in TABLE.findall(part):
            heading, ruler, *rows = found.splitlines()
            if "---:" in ruler:  # a column of numbers
                yield command, [heading, *rows]


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_every_table_of_numbers_is_what_the_command_above_it_prints(page, exssnet):
    for command, rows in tables(page):
        assert command, f"{page.name} has a table without a command: {rows[0]}"
        program, *arguments = shlex.split(command)
        script = {"program": ROOT / arguments.pop(0)} if program == "python" else {}
        done = exssnet(*arguments, cwd=ROOT, **script)
        assert (done.returncode, done.stderr) == (0, "")
        missing = set(rows) - set(done.stdout.splitlines())
        assert not missing, f"{command} does not print {sorted(missing)[0]}"


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_links_lead_to_files(page):
    for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text("utf-8")):
        assert "://" in target or (page.parent / target).exists(), target


def test_every_study_is_in_the_list_with_a_question():
    listed = re.findall(r"^\| \[([\w-]+)\]", (STUDIES / "README.md").read_text("utf-8"), re.MULTILINE)
    folders = {file.parent.name for file in STUDIES.glob("*/README.md")}
    assert sorted(listed) == sorted(folders)
    assert folders == {path.name for path in STUDIES.iterdir() if path.is_dir() and path.name != "__pycache__"}
    for folder in folders:
        assert "**Question.**" in (STUDIES / folder / "README.md").read_text("utf-8")


def test_runs_alone_have_the_digests_of_runs_that_share_a_gpu():
    records = [record for _, record in archive.read(STUDIES / "reproducibility" / archive.NAME)]
    assert sorted(record.method for record in records) == ["exssnet", "exssnet+kkt"]
    for record in records:
        together = record_of("split-cifar100", record.method, record.seed)
        assert record.zero_forgetting.digests == together["zero_forgetting"]["digests"]
        assert record.average_accuracy == together["average_accuracy"]


def test_the_picture_is_drawn_from_the_committed_records(exssnet, tmp_path):
    done = exssnet(tmp_path / "accuracy.svg", program=STUDIES / "split-cifar100/figure.py")
    assert (done.returncode, done.stderr) == (0, "")
    assert (tmp_path / "accuracy.svg").read_text("utf-8") == (ROOT / "docs/accuracy.svg").read_text("utf-8")
