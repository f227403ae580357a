"""Routing with the batch's own norm statistics, against differences of the entropy itself."""

import pytest
import torch
from tests.core.superposed import ROWS, case, entropy_at, same
from torch import nn
from torch.nn import functional

from exssnet import InputError
from exssnet.core.routing.rules import route
from exssnet.core.routing.superposition import Superposition


@pytest.fixture
def of_the_batch(monkeypatch):
    """Evaluation with the statistics of the batch, by torch's own batch norm."""
    forward = functional.batch_norm

    def trained(x, mean, variance, weight=None, bias=None, training=False, momentum=0.1, eps=1e-5):
        return forward(x, None, None, weight, bias, training=True, eps=eps)

    return lambda: monkeypatch.setattr(nn.functional, "batch_norm", trained)


def differences(network, module, x, names):
    step, columns = 1e-5, []
    for name in names:
        sides = []
        for sign in (1, -1):
            alphas = {other: 1 / len(names) + sign * step * (other == name) for other in names}
            sides.append(entropy_at(network, module, x, alphas))  # all rows at once: they share their statistics
        columns.append((sides[1] - sides[0]) / (2 * step))
    return torch.stack(columns, 1)


@pytest.mark.parametrize("options", ["shared", "private"])
def test_scores_are_the_slopes_under_the_statistics_of_the_batch(options, of_the_batch):
    network, module, x = case("convolutional", options)
    found = route(network, x, "one-shot")
    of_batch = route(network, x, "one-shot", per="batch")
    backward = Superposition(network, list(network.tasks), batch_statistics=True)._row_by_row(x, range(5))
    of_the_batch()
    expected = differences(network, module, x, list(network.tasks))
    same(found.scores, expected)
    same(backward, expected)
    same(of_batch.scores, expected.mean(0).expand(ROWS, -1))


def test_statistics_matter_only_where_there_is_a_batch_norm_and_a_batch():
    network, _, x = case("convolutional", "shared")
    by_batch, by_tasks = (route(network, x, "one-shot", statistics=which).scores for which in ("batch", "tasks"))
    assert not torch.allclose(by_batch, by_tasks)
    one = [route(network, x[:1], "one-shot", statistics=which).scores for which in ("batch", "tasks")]
    same(*one)
    network, _, x = case("transformer", "shared")
    assert torch.equal(*(route(network, x, "binary", statistics=which).scores for which in ("batch", "tasks")))


def test_unknown_statistics_are_refused_in_one_line():
    network, _, x = case("mlp", "shared")
    with pytest.raises(InputError, match=r"^statistics is 'running': choose one of batch, tasks$"):
        route(network, x, "one-shot", statistics="running")
