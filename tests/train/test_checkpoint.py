import pytest
import torch

from exssnet.errors import RunError
from exssnet.train import checkpoint


def test_a_checkpoint_is_a_round_trip(tmp_path):
    tensors = {"a": torch.randn(3, 4), "b": torch.tensor(7), "c": torch.zeros(0), "d": torch.ones(5, dtype=torch.uint8)}
    checkpoint.write(tmp_path / "c", tensors, {"matrix": [[1.5, None]]})
    read, facts = checkpoint.read(tmp_path / "c")
    assert facts == {"matrix": [[1.5, None]]}
    assert read.keys() == tensors.keys()
    assert all(torch.equal(read[name], tensors[name]) for name in tensors)


def test_a_write_that_fails_leaves_the_old_checkpoint_and_nothing_else(tmp_path, monkeypatch):
    checkpoint.write(tmp_path / "c", {"a": torch.ones(2)}, {})

    def full(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="No space left"):
        checkpoint.write(tmp_path / "c", {"a": torch.zeros(2)}, {})
    assert torch.equal(checkpoint.read(tmp_path / "c")[0]["a"], torch.ones(2))
    assert [file.name for file in tmp_path.iterdir()] == ["c"]


def test_a_damaged_checkpoint_is_an_error_that_says_what_to_do(tmp_path):
    (tmp_path / "c").write_bytes(b"not a checkpoint")
    with pytest.raises(RunError, match="delete it to start the run anew"):
        checkpoint.read(tmp_path / "c")
