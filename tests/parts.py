"""Parts that a test may need: missing on a newcomer's machine it is skipped, in CI it fails."""

import os
from importlib.util import find_spec
from typing import NoReturn

import pytest


def missing(message: str) -> NoReturn:
    """Skip and say what is needed; where CI provides all parts, fail."""
    if os.environ.get("CI") == "true":
        pytest.fail(message)
    pytest.skip(message, allow_module_level=True)


def need(module: str, message: str) -> None:
    """A package that not everybody has."""
    if find_spec(module) is None:
        missing(message)
