import os

import pytest
import torch
from safetensors.torch import save_file

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


def refused(path) -> str:
    with pytest.raises(RunError, match="delete it, and the run starts again") as error:
        checkpoint.read(path)
    assert str(path) in str(error.value)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_no_flipped_bit_of_any_byte_goes_unnoticed(tmp_path):
    tensors = {"a": torch.randn(3, 4), "b": torch.tensor([True, False]), "c": torch.ones(5, dtype=torch.uint8)}
    tensors["a again"] = tensors["a"]
    checkpoint.write(tmp_path / "c", tensors, {"matrix": [[1.5, None]], "text": 'with "sha256":"quotes"'})
    content = (tmp_path / "c").read_bytes()
    assert checkpoint.read(tmp_path / "c")[1]["matrix"] == [[1.5, None]]
    for position in range(len(content)):
        flipped = content[position] ^ (1 << position % 8)
        (tmp_path / "c").write_bytes(content[:position] + bytes([flipped]) + content[position + 1 :])
        refused(tmp_path / "c")
    for damaged in (content[:-1], content[: len(content) // 2], content + b"\0", content[:8], b"", content * 2):
        (tmp_path / "c").write_bytes(damaged)
        refused(tmp_path / "c")


def test_exchanged_tensors_are_noticed(tmp_path):
    """The same bytes under other names, in a file that is as good as any other."""
    checkpoint.write(tmp_path / "c", {"a": torch.zeros(3), "b": torch.ones(3)}, {})
    content = (tmp_path / "c").read_bytes()
    (tmp_path / "c").write_bytes(content.replace(b'"a":', b'"x":').replace(b'"b":', b'"a":').replace(b'"x":', b'"b":'))
    assert "does not have its digest" in refused(tmp_path / "c")


def test_a_checkpoint_without_a_digest_is_refused(tmp_path):
    """As versions before wrote them."""
    save_file({"a": torch.ones(2)}, tmp_path / "c", {"facts": "{}", "same": "{}"})
    assert "it has no digest: an earlier version wrote it" in refused(tmp_path / "c")


def test_what_is_not_a_checkpoint_is_refused_unread(tmp_path):
    (tmp_path / "c").write_bytes(b"not a checkpoint")
    refused(tmp_path / "c")
    (tmp_path / "c").unlink()
    os.mkfifo(tmp_path / "c")
    assert "is a FIFO" in refused(tmp_path / "c")
    (tmp_path / "c").unlink()
    for size in (2**30, 2**42):
        with (tmp_path / "c").open("wb") as file:
            file.truncate(size)
        assert "is not a safetensors file" in refused(tmp_path / "c") or size > checkpoint.MOST_BYTES
