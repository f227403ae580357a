import pytest
from hypothesis import given
from hypothesis import strategies as st

from exssnet.core import reference
from exssnet.experiments import metrics


@st.composite
def matrices(draw):
    size = draw(st.integers(1, 7))
    accuracy = st.floats(0, 100)
    return [[draw(accuracy) if j <= i else None for j in range(size)] for i in range(size)]


@given(matrices())
def test_metrics_equal_the_reference(matrix):
    assert metrics.average_accuracy(matrix) == pytest.approx(reference.average_accuracy(matrix))
    assert metrics.forgetting(matrix) == pytest.approx(reference.forgetting(matrix), abs=1e-9)
    assert metrics.FORGETTING["avalanche"](matrix) == pytest.approx(reference.forgetting_avalanche(matrix), abs=1e-9)
    assert metrics.FORGETTING["mammoth"](matrix) == pytest.approx(reference.forgetting_mammoth(matrix), abs=1e-9)


def test_forgetting_may_be_negative_and_the_named_variants_differ():
    matrix = [[80.0, None, None], [90.0, 70.0, None], [85.0, 75.0, 60.0]]
    assert metrics.average_accuracy(matrix) == pytest.approx(220 / 3)
    assert metrics.forgetting(matrix) == pytest.approx((5 - 5) / 2)
    assert metrics.forgetting_first(matrix) == pytest.approx((-5 - 5) / 2)
    assert metrics.forgetting_maximum(matrix) == pytest.approx((5 + 0) / 2)


def test_what_was_not_measured_between_a_task_and_the_end_is_no_reference():
    matrix = [[80.0, None, None], [None, 70.0, None], [60.0, 90.0, 50.0]]
    assert metrics.forgetting(matrix) == metrics.forgetting_first(matrix) == pytest.approx((20 - 20) / 2)
    assert metrics.forgetting_maximum(matrix) == pytest.approx(20 / 2)
    with pytest.raises(ValueError, match="gap"):
        metrics.forgetting([[80.0, None], [None, 70.0]])


def test_average_overlap_leaves_the_first_task_out():
    assert metrics.average_overlap([None, 0.1, 0.3]) == pytest.approx(0.2)
    assert metrics.average_overlap([None]) is None
