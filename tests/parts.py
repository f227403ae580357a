"""Parts that a test may need: on a newcomer's machine it is skipped, in CI, which has all parts, it fails.

A pytest plugin. `EXSSNET_REQUIRE_PARTS=1` turns every skip for want of a part into a failure, however the test says it.
`EXSSNET_SKIPPED=FILE` writes the names of the tests that were skipped for want of one, to run them where the part is.
"""

import os
import re
from importlib.util import find_spec
from pathlib import Path
from typing import NoReturn

import pytest

# what depends on the machine itself cannot be installed
OF_THE_MACHINE = re.compile(
    "needs a CUDA device|not for a machine with a GPU|needs the right to mount a file system|needs a file system"
    "|the digests were made on"
)


def missing(message: str) -> NoReturn:
    """Skip and say what is needed."""
    pytest.skip(message, allow_module_level=True)


def need(module: str, message: str) -> None:
    """A package that not everybody has."""
    if find_spec(module) is None:
        missing(message)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport():
    report = yield
    return _as_required(report)


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report():
    report = yield
    return _as_required(report)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    file = os.environ.get("EXSSNET_SKIPPED")
    if file:
        wanting = [report.nodeid for report in terminalreporter.stats.get("skipped", []) if _wants_a_part(report)]
        Path(file).write_text("".join(f"{name}\n" for name in dict.fromkeys(wanting)), "utf-8")


def _as_required(report):
    if os.environ.get("EXSSNET_REQUIRE_PARTS") == "1" and _wants_a_part(report):
        report.outcome = "failed"
        report.longrepr = f"{_reason(report)} (EXSSNET_REQUIRE_PARTS=1: no test may be skipped for want of a part)"
    return report


def _wants_a_part(report) -> bool:
    return report.skipped and not hasattr(report, "wasxfail") and not OF_THE_MACHINE.search(_reason(report))


def _reason(report) -> str:
    """Of a skipped test or module: pytest keeps file, line and reason."""
    return str(report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr)
