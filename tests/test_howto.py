"""The how-to pages do what they say: their code and commands are run as they stand."""

import re
import shlex
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs/how-to/write-a-method.md"


def blocks(kind):
    found = re.findall(r"^```(\w*)\n(.*?)^```", PAGE.read_text("utf-8"), re.DOTALL | re.MULTILINE)
    return [text for name, text in found if name == kind]


def test_the_method_of_the_page_fits_in_thirty_lines_and_runs_beside_others(exssnet, tmp_path):
    (code,) = blocks("python")
    assert len([line for line in code.splitlines() if line.strip()]) <= 30
    (tmp_path / "anchor.py").write_text(code, "utf-8")
    (commands,) = blocks("")
    for command in commands.splitlines():
        words = shlex.split(command)
        if "run" in words:
            words += ["--tasks", "3", "--epochs", "3"]
            words += ["--mask-epochs", "2", "--weight-epochs", "2"] if ",exssnet" in command else []
        assert words.pop(0) == "exssnet"
        done = exssnet(*words, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
    assert re.search(r"^anchor +task +\d", done.stdout, re.MULTILINE)
    assert re.search(r"^exssnet +shared +\d", done.stdout, re.MULTILINE)


def test_a_plugin_that_cannot_be_used_is_one_line(exssnet, tmp_path):
    (tmp_path / "broken.py").write_text("import nothing_of_that_name\n")
    (tmp_path / "empty.py").write_text("x = 1\n")
    for name, why in (("none.py", "is not there"), ("broken.py", "nothing_of_that_name"), ("empty.py", "no method")):
        done = exssnet("run", "split-digits", "--plugin", name, "--method", "x", cwd=tmp_path)
        assert done.returncode == 2
        assert why in done.stderr
        assert done.stderr.count("\n") == 1


def test_pages_name_only_files_of_the_repository_that_are_there():
    package = ROOT / "src/exssnet"
    folders = [ROOT, ROOT / "src", package, *package.glob("*/")]
    named = {
        (str(page.relative_to(ROOT)), name)
        for page in [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]
        for name in re.findall(r"`([\w.-]+/[\w./-]+\.py)`", page.read_text("utf-8"))
    }
    assert len(named) > 10
    assert [one for one in sorted(named) if not any((folder / one[1]).is_file() for folder in folders)] == []
