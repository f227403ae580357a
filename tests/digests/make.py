"""Write down what the short runs leave, or compare with what was written down.

python -m tests.digests.make [--device cuda] [--check] [PATTERN ...]

Rounding differs between machines. So a file of digests says on which kind of machine it was made, by what PyTorch alone
computes there, and is compared on that kind only.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import sys
import time
from fnmatch import fnmatchcase
from importlib.metadata import version
from pathlib import Path

import torch
from tests.digests.cases import Outcome, cases
from torch.nn import functional

from exssnet.engine import has_triton

FOLDER = Path(__file__).parent


def file_of(device: str) -> Path:
    """`cpu.json`, or the file of a kind of GPU."""
    name = "cpu" if device == "cpu" else torch.cuda.get_device_name(device)
    return FOLDER / f"{re.sub('[^a-z0-9]+', '-', name.lower())}.json"


def machine(device: str) -> dict[str, str]:
    """What results may depend on besides our code."""
    facts = {"torch": torch.__version__}
    if device == "cpu":
        capability = torch.backends.cpu.get_cpu_capability()
        return facts | {"arithmetic": _arithmetic(), "capability": capability, "threads": "1"}
    triton = version("triton") if has_triton() else "none"
    return facts | {"gpu": torch.cuda.get_device_name(device), "triton": triton}


def _arithmetic() -> str:
    """A digest of what PyTorch computes on this CPU, with layers like those of the runs, forward and backward."""
    found = hashlib.sha256()
    draw = torch.Generator().manual_seed(0)
    for channels, width in ((4, 300), (32, 100), (64, 10)):
        images = torch.randn(64, channels, 8, 8, generator=draw).to(memory_format=torch.channels_last)
        kernel = torch.randn(2 * channels, channels, 3, 3, generator=draw).requires_grad_()
        matrix = torch.randn(width, 32 * channels, generator=draw).requires_grad_()
        hidden = functional.conv2d(images, kernel, padding=1, stride=2)
        hidden = functional.batch_norm(hidden, None, None, training=True).relu().flatten(1)
        logits = functional.linear(hidden, matrix)
        loss = functional.cross_entropy(logits, torch.arange(64) % 10)
        gradients = torch.autograd.grad(loss, [kernel, matrix])
        others = (torch.sigmoid(logits), logits.square().sum(1).sqrt(), torch.cdist(hidden, hidden[:4]))
        for tensor in (logits, loss, *others, *gradients):
            found.update(tensor.detach().contiguous().numpy().tobytes())
    return found.hexdigest()[:16]


def outcomes(device: str, patterns: list[str]) -> dict[str, Outcome]:
    """What the cases of these names leave."""
    wanted = {n: case for n, case in cases(device).items() if any(fnmatchcase(n, pattern) for pattern in patterns)}
    found: dict[str, Outcome] = {}
    for name, case in wanted.items():
        started = time.perf_counter()
        found[name] = case(device)
        print(f"{name:40} {time.perf_counter() - started:5.1f} s", file=sys.stderr)
    return found


def written(file: Path) -> tuple[dict[str, str], dict[str, Outcome]]:
    """The machine that a file was made on, and the outcomes."""
    content = json.loads(file.read_text("utf-8"))
    return content["machine"], content["cases"]


def write(file: Path, made_on: dict[str, str], found: dict[str, Outcome]) -> None:
    """One case in a line."""
    lines = ",\n".join(f"  {json.dumps(name)}: {json.dumps(outcome)}" for name, outcome in found.items())
    file.write_text(f'{{\n "machine": {json.dumps(made_on)},\n "cases": {{\n{lines}\n }}\n}}\n', "utf-8")


def differences(found: dict[str, Outcome], before: dict[str, Outcome]) -> list[str]:
    """A line for each case that is not what it was."""
    lines = []
    for name, outcome in found.items():
        if name not in before:
            lines.append(f"{name}: not written down")
        elif outcome != before[name]:
            parts = [part for part in outcome if outcome[part] != before[name].get(part)]
            lines.append(f"{name}: other {', '.join(parts)}")
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("patterns", nargs="*", default=["*"], metavar="PATTERN", help="names of cases, such as 'er*'")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--check", action="store_true", help="compare with the file instead of writing it")
    options = parser.parse_args()
    torch.set_num_threads(1)
    file = file_of(options.device)
    made_on = machine(options.device)
    if options.check and not file.exists():
        print(f"{file.name} is not there: make it first, without --check", file=sys.stderr)
        return 2
    if options.check:
        there, before = written(file)
        if there != made_on:
            print(f"{file.name} was made on {there}, this machine is {made_on}: nothing to compare", file=sys.stderr)
            return 2
        lines = differences(outcomes(options.device, options.patterns), before)
        print("\n".join(lines) if lines else "nothing differs")
        return bool(lines)
    before = written(file)[1] if file.exists() and written(file)[0] == made_on else {}
    found = before | outcomes(options.device, options.patterns)
    write(file, made_on, {name: found[name] for name in cases(options.device) if name in found})
    return 0


if __name__ == "__main__":
    sys.exit(main())
