"""What a directory reports of a task was measured on examples that decided nothing."""

from pathlib import Path

import numpy as np
import pytest
import torch
from tests.store.small import create, examples

from exssnet.data.files.labelled import hold_out
from exssnet.errors import InputError
from exssnet.train.listener import EpochReport, Listener


class Heard(Listener):
    def __init__(self) -> None:
        self.reports: list[EpochReport] = []

    def epoch_ended(self, report: EpochReport) -> None:
        self.reports.append(report)


def test_noise_is_reported_as_noise_also_where_the_best_epoch_was_chosen(tmp_path: Path):
    reported, chosen = [], []
    for seed in range(6):
        draw = torch.Generator().manual_seed(seed)
        x, y = torch.randn(400, 12, generator=draw), torch.randint(0, 2, (400,), generator=draw)
        heard = Heard()
        model = create(tmp_path / f"{seed}", width=0.2, seed=seed)
        model.learn("noise", (x, y), held_out=0.3, select="best", epochs=(15, 15), listener=heard)
        reported.append(model.task("noise").accuracy)
        chosen.append(max(report.validation for report in heard.reports if report.phase == "weights"))
    assert np.mean(chosen) > 55  # what selection sees of luck
    assert abs(np.mean(reported) - 50) < 4  # 718 examples: two standard deviations are 3.7


@pytest.mark.parametrize("select", ["last", "best"])
def test_no_example_is_in_two_parts(tmp_path: Path, select: str):
    x, y = examples(1, classes=3, rows=120)
    heard, model = Heard(), create(tmp_path / "model", width=0.2)
    card = model.learn("a", (x, y), held_out=0.2, select=select, epochs=(3, 3), batch_size=16, listener=heard).card
    rest = hold_out(y, 0.2, model.base.seed)[1]
    assert card["held_out"] == len(rest) == 24
    assert card["accuracy"] == model.evaluate((x[rest], y[rest]), "a")
    on = card["settings"]["selected_on"]
    assert card["examples"] + on + card["held_out"] == 120
    assert on == (18 if select == "best" else 0)  # a fifth of the 32 left of each class, rounded down


def test_the_best_epoch_needs_examples_to_choose_by(tmp_path: Path):
    with pytest.raises(InputError, match="select 'best' needs a validation part"):
        create(tmp_path / "model").learn("a", examples(1), held_out=0, select="best", epochs=(1, 1))
