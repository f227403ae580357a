"""Every class has a name of its own, so no answer can show the probability of another class."""

import unicodedata
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from tests.store.small import QUICK, create, examples
from tests.store.tamper import rewrite_card

from exssnet import DataError, InputError, Model
from exssnet.data.files.labelled import read_labelled
from exssnet.store.predictions import answers

COMPOSED, DECOMPOSED = (unicodedata.normalize(form, "café") for form in ("NFC", "NFD"))


@pytest.mark.parametrize(
    ("classes", "said"),
    [
        (["cat", "cat", "dog"], "the class 'cat' is given twice"),
        ([COMPOSED, DECOMPOSED, "tea"], r"'caf\xe9' and 'cafe\u0301' look equal"),
        (["cat", "", "dog"], "'' cannot be the name of a class"),
        (["cat", 1, "dog"], "1 cannot be the name of a class"),
        (["cat", "a\x1b[2J", "dog"], r"cannot be the name of a class: give text that can be printed"),
    ],
)
def test_names_that_do_not_tell_classes_apart_are_refused(tmp_path: Path, classes: list, said: str):
    model = create(tmp_path / "model")
    with pytest.raises(InputError) as caught:
        model.learn("a", examples(1, 3), classes=classes, **QUICK)
    assert said in str(caught.value)
    assert model.tasks == ()


@pytest.mark.parametrize("kind", ["csv", "folder"])
def test_labels_that_print_alike_are_refused(tmp_path: Path, kind: str):
    if kind == "csv":
        place = tmp_path / "a.csv"
        place.write_text(f"x,y\n1,{COMPOSED}\n2,{DECOMPOSED}\n3,tea\n")
    else:
        place = tmp_path / "a"
        for name in (COMPOSED, DECOMPOSED, "tea"):
            (place / name).mkdir(parents=True, exist_ok=True)
            Image.new("L", (8, 8)).save(place / name / "1.png")
        if len(list(place.iterdir())) < 3:
            pytest.skip("needs a file system that keeps names as they are written")
    with pytest.raises(DataError) as caught:
        read_labelled(place, label="y" if kind == "csv" else None)
    assert "look equal; rename one of them" in str(caught.value)
    assert r"'caf\xe9'" in str(caught.value)


def test_a_directory_that_has_a_name_twice_shows_each_class_with_its_own_probability(tmp_path: Path):
    """Versions before took such names."""
    model = create(tmp_path / "model", width=0.2)
    model.learn("a", examples(1, 3), epochs=(10, 10), batch_size=16)
    rewrite_card(tmp_path / "model", "a", lambda card: card.update(labels=["cat", "cat", "dog"]))
    again, x = Model.open(tmp_path / "model"), examples(1, 3)[0]
    np.save(tmp_path / "x.npy", x.numpy())
    shares = again.probabilities(x, "a")
    found = answers(again, [tmp_path / "x.npy"], "a")
    names = ["cat", "cat (2)", "dog"]
    assert {answer.label for answer in found} == set(names)
    for answer, share in zip(found, shares, strict=True):
        assert answer.probabilities == dict(zip(names, share.tolist(), strict=True))
        assert answer.label == names[int(share.argmax())]
        assert answer.probability == float(share.max())
