"""Every method with every head still gives, bit for bit, what it gave when `cpu.json` was made."""

import re
from functools import cache
from pathlib import Path

import pytest
import torch
from tests.digests.cases import cases
from tests.digests.make import differences, file_of, machine, written

MADE_ON, BEFORE = written(file_of("cpu"))
AGAIN = "if results are meant to change, make the file again: python -m tests.digests.make"


@cache
def this_machine():
    return machine("cpu")


@pytest.mark.parametrize("name", cases("cpu"))
def test_a_short_run_leaves_what_it_left_before(name):
    if this_machine() != MADE_ON:
        pytest.skip(f"the digests were made on {MADE_ON}, this machine is {this_machine()}: no bits can be compared")
    assert differences({name: cases("cpu")[name]("cpu")}, BEFORE) == [], AGAIN


def test_the_digests_are_of_the_cases_there_are_and_of_the_version_of_torch_that_is_set_up():
    assert list(BEFORE) == list(cases("cpu")), AGAIN
    pinned = re.search(r"^torch==([\d.]+)", Path("constraints.txt").read_text(), re.MULTILINE)[1]
    assert MADE_ON["torch"].partition("+")[0] == pinned, AGAIN


def test_the_machine_is_told_by_what_torch_computes(monkeypatch):
    real = torch.nn.functional.linear
    monkeypatch.setattr(torch.nn.functional, "linear", lambda x, w: real(x, w) * (1 + 2**-22))  # one bit of rounding
    assert machine("cpu")["arithmetic"] != this_machine()["arithmetic"]
