"""Runs that are cut off, fail or are killed, and go on to the same record."""

import json
import os
import random
import signal
import subprocess
import sys
import time

import pytest
from tests.experiments.short_runs import outcome, short
from tests.stopping import cut_after

from exssnet.errors import DataError, RunError
from exssnet.experiments.prepare import prepare
from exssnet.experiments.run import run


def test_a_resumed_run_counts_all_its_seconds(tmp_path, monkeypatch):
    with cut_after(monkeypatch, 5):
        run(short(), tmp_path, checkpoint_seconds=0)
    record = run(short(), tmp_path)
    folder = tmp_path / "split-digits/exssnet+kkt/seed-0"
    events = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    for number, seconds in enumerate(record["seconds"]["tasks"], start=1):
        for phase in ("mask", "weights"):
            logged = [e["seconds"] for e in events if e.get("phase") == phase and e["task"] == f"task{number}"]
            assert seconds[phase] == pytest.approx(sum(logged))


@pytest.mark.parametrize("head", ["shared", "task"])
@pytest.mark.parametrize("epochs", [1, 3])
def test_a_network_with_tensors_of_each_tasks_own_resumes_to_the_same_record(tmp_path, monkeypatch, head, epochs):
    """Normalisation layers, and heads: many private tensors, which a checkpoint may hold in another order."""
    config = short(network="resnet18", width=4.0, head=head, mask_epochs=1, weight_epochs=1)
    whole = run(config, tmp_path / "whole")
    with cut_after(monkeypatch, epochs):
        run(config, tmp_path / "cut", checkpoint_seconds=0)
    assert outcome(run(config, tmp_path / "cut")) == outcome(whole)


@pytest.mark.parametrize("what", ["data", "versions"])
def test_a_run_begun_with_other_data_or_versions_is_not_continued(tmp_path, monkeypatch, what):
    with cut_after(monkeypatch, 6):
        run(short(), tmp_path, checkpoint_seconds=0)
    module = "exssnet.experiments.run"
    if what == "versions":
        monkeypatch.setattr(f"{module}.versions", lambda: {"torch": "1.0"})
    else:
        real = prepare

        def other(*arguments):
            stream, method = real(*arguments)
            stream.data_digests = {"train": "another"}
            return stream, method

        monkeypatch.setattr(f"{module}.prepare", other)
    with pytest.raises(RunError, match="started with other data, other versions"):
        run(short(), tmp_path)


def test_a_run_does_not_resume_from_a_checkpoint_with_a_flipped_bit(tmp_path, monkeypatch):
    with cut_after(monkeypatch, 6):
        run(short(), tmp_path, checkpoint_seconds=0)
    file = tmp_path / "split-digits/exssnet+kkt/seed-0/checkpoint.safetensors"
    content, dice = file.read_bytes(), random.Random(0)
    header = int.from_bytes(content[:8], "little")
    regions = [range(8, 8 + header), *(range(start, start + 999) for start in range(8 + header, len(content), 9999))]
    for region in regions:
        position = dice.choice(range(region.start, min(region.stop, len(content))))
        file.write_bytes(content[:position] + bytes([content[position] ^ 1]) + content[position + 1 :])
        with pytest.raises(RunError, match=r"checkpoint.safetensors is not a whole checkpoint .*: delete it"):
            run(short(), tmp_path)
    file.unlink()
    assert outcome(run(short(), tmp_path)) == outcome(run(short(), tmp_path / "whole"))


def test_a_run_that_fails_late_keeps_what_it_has(tmp_path, monkeypatch):
    from exssnet.data.tensors import TensorData

    real = TensorData.batch

    def damaged(self, index, generator=None):
        if self.classes == 3 and generator is not None:
            raise DataError("image 7 cannot be decoded: remove it")
        return real(self, index, generator)

    monkeypatch.setattr(TensorData, "batch", damaged)
    with pytest.raises(DataError):
        run(short(), tmp_path, checkpoint_seconds=0)
    monkeypatch.undo()
    folder = tmp_path / "split-digits/exssnet+kkt/seed-0"
    assert (folder / "checkpoint.safetensors").exists()
    resumed = run(short(), tmp_path)
    assert outcome(resumed) == outcome(run(short(), tmp_path / "whole"))


def command(out, *extra):
    return [
        sys.executable, "-m", "exssnet", "run", "split-digits", "--method", "exssnet+kkt", "--tasks", "4",
        "--mask-epochs", "6", "--weight-epochs", "6", "--out", str(out), *extra,
    ]  # fmt: skip


@pytest.mark.slow
def test_a_run_killed_again_and_again_ends_with_the_same_record_bit_for_bit(tmp_path):
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    subprocess.run(command(tmp_path / "whole"), check=True, env=environment, capture_output=True)
    folder = "split-digits/exssnet+kkt/seed-0"
    whole = json.loads((tmp_path / "whole" / folder / "results.json").read_text())

    killed, interrupted = tmp_path / "killed", 0
    dice = random.Random(0)
    log = killed / folder / "log.jsonl"
    for _ in range(40):
        process = subprocess.Popen(command(killed, "--checkpoint-seconds", "0"), env=environment,
                                   stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)  # fmt: skip
        lines = len(log.read_text().splitlines()) if log.exists() else 0
        goal = lines + dice.randint(1, 14)
        while process.poll() is None and (not log.exists() or len(log.read_text().splitlines()) < goal):
            time.sleep(0.002)
        if process.poll() is None:
            time.sleep(dice.random() * 0.03)  # anywhere inside an epoch, a checkpoint or an evaluation
            process.send_signal(signal.SIGKILL)
            interrupted += 1
        if process.wait() == 0:
            break
    assert interrupted >= 3
    resumed = json.loads((killed / folder / "results.json").read_text())
    assert outcome(resumed) == outcome(whole)

    def epochs(root):
        events = [json.loads(line) for line in (root / folder / "log.jsonl").read_text().splitlines()]
        return [{key: value for key, value in event.items() if key != "seconds"} for event in events]

    assert epochs(killed) == epochs(tmp_path / "whole")
    assert {file.name for file in (killed / folder).iterdir()} == {"config.yaml", "log.jsonl", "results.json"}
