"""Short runs of every method with every head: what is left of each is compared with what was left before.

They say nothing about how good a result is, only whether it is still the same. So a change of structure can be told
from a change of results.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from tests.core.networks import Transformer, tokens
from torch import Tensor

import exssnet
from exssnet.core import changes
from exssnet.core.proof import combined_digest, tensor_digest
from exssnet.experiments.config import RunConfig, knows, resolve
from exssnet.experiments.prepare import computing, prepare, train_settings
from exssnet.methods import general, parse, transfers
from exssnet.methods.base import JointMethod
from exssnet.models import build
from exssnet.train import Trainer, accuracy

Outcome = dict[str, Any]  # JSON
Case = Callable[[str], Outcome]  # of a device

SHORT = {"mask_epochs": 2, "weight_epochs": 1, "epochs": 2, "retrain_epochs": 1, "buffer": 30.0}
CONVOLUTIONS = {"network": "resnet18", "width": 4.0, "samples_per_class": 40}
WITH_CONVOLUTIONS = (
    "supsup", "exssnet", "exssnet+kkt", "ssnet", "packnet", "piggyback", "wsn", "naive", "er", "icarl", "lwf",
    "ewc-online", "hat", "cgate",
)  # fmt: skip
OTHER_WAYS: dict[str, tuple[str, dict[str, Any]]] = {
    "exssnet best epoch": ("exssnet", {"select": "best", "validation": 0.2, "mask_epochs": 3}),
    "er best epoch": ("er", {"select": "best", "validation": 0.2}),
    "exssnet sgd": ("exssnet", {"optimizer": "sgd", "schedule": "constant"}),
    "exssnet adamw decay": ("exssnet", {"optimizer": "adamw", "weight_decay": 0.1, "schedule": "published"}),
    "si adam decay": ("si", {"optimizer": "adam", "weight_decay": 0.01}),
    "supsup density": ("supsup", {"density": 0.4, "batch_size": 37}),
}


def cases(device: str) -> dict[str, Case]:
    """Every case by name."""
    found: dict[str, Case] = {}
    names = [name + suffix for name in general() for suffix in ("", "+kkt") if not suffix or transfers(name)]
    for name in names:
        for head in parse(name)[0].heads:
            found[f"{name}@{head}"] = _of_run(name, head=head)
            if name.endswith("+kkt"):
                found[f"{name}@{head} scores"] = _of_run(name, head=head, kkt_start="scores")
    for name in WITH_CONVOLUTIONS:
        found[f"{name} resnet18"] = _of_run(name, **CONVOLUTIONS)
    for name, (method, changed) in OTHER_WAYS.items():
        found[name] = _of_run(method, **changed)
    if device != "cpu":
        found["exssnet+kkt compiled"] = _of_run("exssnet+kkt", compile="on")
        found["exssnet+kkt resnet18 compiled"] = _of_run("exssnet+kkt", compile="on", **CONVOLUTIONS)
        found["exssnet+kkt resnet18 fp32"] = _of_run("exssnet+kkt", precision="fp32", **CONVOLUTIONS)
    found["Model transformer"] = _transformer
    found["Model resnet18"] = _resnet
    return found


def _of_run(name: str, **changes: Any) -> Case:
    def case(device: str) -> Outcome:
        short = {setting: value for setting, value in SHORT.items() if knows(parse(name)[0], setting)}
        every = {"tasks": 3, "device": device, "compile": "off"}
        return _outcome(resolve("split-digits", name, 0, **{**every, **short, **changes}))

    return case


def _outcome(planned: RunConfig) -> Outcome:
    with computing(planned):
        stream, method = prepare(planned)
        trainer = Trainer(method, planned.seed, train_settings(planned))
        tests = [task.test.to(planned.device) for task in stream]
        names = [task.name for task in stream]
        matrix: list[list[float]] = []
        tasks = [replace(task, train=task.train.to(planned.device)) for task in stream]
        tasks = [
            task if task.validation is None else replace(task, validation=task.validation.to(planned.device))
            for task in tasks
        ]
        for task in [method.together(tasks)] if isinstance(method, JointMethod) else tasks:
            trainer.learn(task)
            learned = range(task.index + 1)
            matrix.append([accuracy(partial(method.logits, task=names[i]), tests[i]) for i in learned])
        few = [test.batch(torch.arange(40, device=test.device))[0] for test in tests]
        answers = [method.logits(x, name) for x, name in zip(few, names, strict=True)]
        transfer = method.report().get("transfer")
        return {
            "accuracies": matrix,
            "lenders": None if transfer is None else [found["lender"] for found in transfer],
            "answers": _digest(answers),
            "tensors": _digest(method.state()[0].values()),
        }


def _digest(tensors: Any) -> str:
    """Of tensors as a set: their names may change, and their order."""
    found = sorted(tensor_digest(tensor) for tensor in tensors)
    return combined_digest({f"{number:05d}": digest for number, digest in enumerate(found)})


# --- Without a run ---------------------------------------------------------------------------------------------


def _transformer(device: str) -> Outcome:
    torch.manual_seed(0)
    private = ("norm", "bias", "position")
    model = exssnet.Model(Transformer(), density=0.3, init="keep", head="task", private=private, device=device)
    x, y = tokens()
    return _learned(model, [(x, y), (x, 1 - y), (x.flip(0), y)])


def _resnet(device: str) -> Outcome:
    torch.manual_seed(0)
    module = build("resnet18", (3, 12, 12), 3, width=4)
    draw = torch.Generator().manual_seed(0)
    y = torch.arange(60) % 3
    x = torch.randn(60, 3, 12, 12, generator=draw) + y.view(-1, 1, 1, 1)
    return _learned(exssnet.Model(module, density=0.2, device=device), [(x, y), (x, (y + 1) % 3), (x, y % 2)])


def _learned(model: exssnet.Model, tasks: list[tuple[Tensor, Tensor]]) -> Outcome:
    with torch.backends.cudnn.flags(enabled=True, benchmark=False, deterministic=True, allow_tf32=False):
        for number, examples in enumerate(tasks):
            model.learn(f"task{number + 1}", examples, epochs=(2, 2), batch_size=16)
        names = [task.name for task in model.tasks]
        return {
            "accuracies": [[model.evaluate(task, name) for task, name in zip(tasks, names, strict=True)]],
            "lenders": [task.lender for task in model.tasks],
            "answers": _digest([model.logits(task[0], name) for task, name in zip(tasks, names, strict=True)]),
            "tensors": _digest(changes.state(model.network)[0].values()),
        }
