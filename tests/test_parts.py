"""What CI relies on: no test is skipped there for want of a part, and those that were can be run by name."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SUITE = """
import pytest
from tests.parts import missing, need

def test_runs():
    pass

def test_says_what_it_needs():
    missing("needs a part")

@pytest.mark.parametrize("name", ["a b[1]"])
def test_needs_a_package(name):
    need("no_such_package", "install no_such_package")

@pytest.mark.skipif(True, reason="needs another part")
def test_is_marked():
    pass

@pytest.fixture
def part():
    pytest.skip("needs a part of a fixture")

def test_has_a_fixture(part):
    pass

@pytest.mark.skipif(True, reason="needs a CUDA device")
def test_needs_a_gpu():
    pass

@pytest.mark.xfail(reason="known")
def test_is_known_to_fail():
    raise AssertionError
"""
MODULE = "import pytest\npytest.importorskip('no_such_package')\n\ndef test_never_collected():\n    pass\n"
WANTING = {
    "test_suite.py::test_says_what_it_needs", "test_suite.py::test_needs_a_package[a b[1]]", "test_module.py",
    "test_suite.py::test_is_marked", "test_suite.py::test_has_a_fixture",
}  # fmt: skip


@pytest.fixture
def suite(tmp_path):
    (tmp_path / "test_suite.py").write_text(SUITE)
    (tmp_path / "test_module.py").write_text(MODULE)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")

    def run(*arguments, **environment):
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-p", "tests.parts", "-rA", *arguments], cwd=tmp_path, text=True,
            capture_output=True, env=os.environ | {"PYTHONPATH": str(ROOT), "PYTEST_ADDOPTS": ""} | environment,
        )  # fmt: skip
        counts = {what: int(number) for number, what in re.findall(r"(\d+) (\w+)", done.stdout.splitlines()[-1])}
        return done, {what: n for what, n in counts.items() if what in ("passed", "skipped", "failed", "xfailed")}

    return run


@pytest.mark.parametrize("workers", [(), ("-n", "1")], ids=["one process", "workers"])
def test_a_test_that_lacks_a_part_is_skipped_by_a_newcomer_and_can_be_run_by_name_later(suite, tmp_path, workers):
    done, counts = suite(*workers, EXSSNET_SKIPPED="skipped.txt", EXSSNET_REQUIRE_PARTS="")
    assert done.returncode == 0, done.stdout
    assert counts == {"passed": 1, "skipped": 6, "xfailed": 1}
    assert set((tmp_path / "skipped.txt").read_text().splitlines()) == WANTING
    if not workers:
        _, counts = suite("@skipped.txt", EXSSNET_REQUIRE_PARTS="")
        assert counts == {"skipped": 5}


@pytest.mark.parametrize("workers", [(), ("-n", "1")], ids=["one process", "workers"])
def test_where_all_parts_are_required_a_skip_is_a_failure_but_for_a_gpu(suite, workers):
    done, counts = suite(*workers, "--continue-on-collection-errors", EXSSNET_REQUIRE_PARTS="1")
    assert done.returncode == 1
    assert {what: counts[what] for what in ("passed", "skipped", "xfailed")} == {
        "passed": 1,
        "skipped": 1,
        "xfailed": 1,
    }
    failed = re.findall(r"^(?:FAILED|ERROR) (test_\w+\.py(?:::\w+)?)", done.stdout, re.MULTILINE)
    assert set(failed) == {name.partition("[")[0] for name in WANTING}
    assert "install no_such_package (EXSSNET_REQUIRE_PARTS=1: no test may be skipped for want of a part)" in done.stdout
