"""A network in memory that learns task after task: what `exssnet.Model` and model directories are made of."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor, nn

from exssnet.core.engine import at_once
from exssnet.core.inputs import check_input
from exssnet.core.network import LearnedTask, MaskedNetwork
from exssnet.core.partition import check_words
from exssnet.core.proof import Verification
from exssnet.data.files.examples import as_data, as_inputs, require_two_classes
from exssnet.data.tasks import Data, Task
from exssnet.engine import choose
from exssnet.errors import InputError
from exssnet.methods import parse
from exssnet.methods.masks.supsup import SupSup
from exssnet.train.evaluate import accuracy
from exssnet.train.listener import Listener
from exssnet.train.loop import Trainer, TrainSettings
from exssnet.train.optimizers import OptimizerFactory

if TYPE_CHECKING:
    from exssnet.data.files.examples import Array, Examples


NAMED = 5  # tasks whose names a `repr` shows


@dataclass(frozen=True)
class ModelConfig:
    """How a model was made: with the same module, enough to make it again."""

    density: float
    seed: int
    method: str
    init: str
    private: tuple[str, ...]
    head: str
    head_layer: str | None


class Learner:
    """A shared network and the tasks learned on it.

    The module is copied, never changed. Its Linear, convolution and attention weights are redrawn from the seed
    (`init="keep"` leaves a pretrained module's weights) and shared by all tasks; `private` names what each task
    gets a trained copy of ("norm", "bias", or patterns of parameter names); `head="task"` gives every task a head
    of its own, with as many outputs as the task has classes. `precision` and `compile` say how a GPU computes.
    """

    def __init__(
        self, module: nn.Module, density: float = 0.1, seed: int = 0, *, method: str = "exssnet+kkt",
        init: str = "signed", private: Collection[str] = (), head: str = "shared", head_layer: str | None = None,
        device: str | torch.device | None = None, precision: str = "auto", compile: str = "off",
    ) -> None:  # fmt: skip
        kind, kkt = parse(method)
        if not issubclass(kind, SupSup):
            raise InputError(f"method '{method}' is for runs: a model learns with exssnet, ssnet or supsup")
        if type(seed) is not int:
            raise InputError(f"seed is {seed!r}: give a whole number")
        if isinstance(module, nn.Module):
            check_words(module, private)
        self.config = ModelConfig(density, seed, method, init, tuple(private), head, head_layer)
        self._method = kind(
            module, kind.settings_type(density=density, kkt=kkt), seed, head,
            init=init, private=self.config.private, head_layer=head_layer,
        )  # fmt: skip
        self._computing = precision, compile
        self.to(device or "cpu")

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        network = self._method.network
        if network.engine.name == "cuda" and network.device.type != "cuda":  # loaded with a map_location
            self.to(network.device)

    def __repr__(self) -> str:
        size, names = self._method.network.layout.size, listed([task.name for task in self.tasks])
        return f"{type(self).__name__}({size:,} weights, {100 * self.free:.1f} % of them free; {names})"

    def learn(
        self, name: str, train: Examples, epochs: tuple[int, int] = (15, 15), *,
        validation: Examples | None = None, classes: int | None = None, lr: float = 0.01, weight_lr: float = 0.003,
        batch_size: int = 64, optimizer: str | OptimizerFactory = "adam", weight_decay: float | None = None,
        select: str = "last", listener: Listener | None = None,
    ) -> LearnedTask:  # fmt: skip
        """Add a task: `epochs` of mask learning, then of training the free weights in the mask.

        `train` is a pair (inputs, labels) of tensors or arrays, a map-style torch Dataset, or a DataLoader; labels
        count from 0, and all of it is read once, into memory. With a `validation` part, `select="best"` keeps each
        phase's best epoch on it. Nothing of the model changes unless the task is learned to its end; every earlier
        task is then checked against its digest.
        """
        mask_epochs, weight_epochs = _two_epochs(epochs)
        network = self._method.network
        data = as_data(train, classes)
        require_two_classes(data.labels)  # also where `classes` says more
        network.check_new(name, data.classes)
        task = Task(
            index=len(self.tasks),
            name=name,
            classes=tuple(range(data.classes)),
            train=data.to(network.device),
            test=data,  # a Model never looks at a test split
            validation=None if validation is None else as_data(validation, data.classes).to(network.device),
        )
        settings = TrainSettings(batch_size, optimizer, select, weight_decay)
        check_input(network, _first(task.train, 1), data.classes)
        check_input(network, _first(task.train, batch_size), data.classes, training=True)
        if task.validation is not None:
            check_input(network, _first(task.validation, 1), data.classes)
        self._method.settings = replace(
            self._method.settings, mask_epochs=mask_epochs, weight_epochs=weight_epochs, lr=lr, weight_lr=weight_lr
        )
        if listener is not None:
            listener.epochs_planned(self._method.settings.epochs_per_task)
        if self._computing[1] != "off":  # a step is compiled for its batch size
            self._method.use(choose(network.device, *self._computing, batch_size))
        trainer = Trainer(self._method, self.config.seed, settings, listener)
        try:
            with self._method.engine.exclusive():
                trainer.learn(task)
        except BaseException:
            self._method.drop_unfinished()
            raise
        return network.tasks[name]

    def logits(self, x: Array, task: str) -> Tensor:
        """Raw outputs [N, classes] of a task's subnetwork."""
        network = self._method.network
        inputs = as_inputs(x).to(network.device)
        batches = torch.split(inputs, at_once(inputs.shape[1:], inputs.device))
        try:
            return torch.cat([network.logits(batch, task) for batch in batches])
        except (RuntimeError, IndexError, TypeError, ValueError):
            check_input(network, inputs[:1], network.task(task).classes)  # inputs that do not fit get their one line
            raise

    def probabilities(self, x: Array, task: str) -> Tensor:
        """Softmax of the outputs [N, classes]."""
        return self.logits(x, task).softmax(1)

    def predict(self, x: Array, task: str) -> Tensor:
        """The most likely class of each input [N], counted from 0 within the task."""
        return self.logits(x, task).argmax(1)

    def evaluate(self, examples: Examples, task: str) -> float:
        """Accuracy in percent on labelled examples of a learned task."""
        data = as_data(examples, self._method.network.task(task).classes).to(self._method.network.device)
        return accuracy(lambda x: self._method.logits(x, task), data.use(self._method.engine))

    @property
    def network(self) -> MaskedNetwork:
        """The shared weights, masks and private tensors: for those who want the parts."""
        return self._method.network

    @property
    def tasks(self) -> tuple[LearnedTask, ...]:
        """The learned tasks, in order."""
        return tuple(self._method.network.tasks.values())

    @property
    def free(self) -> float:
        """Share of the masked weights that no task uses yet."""
        bank = self._method.network.bank
        return bank.free_count / bank.size

    def verify(self) -> Verification:
        """Check every task against the digest taken when it was learned; raises `ForgettingError` if one differs.

        SSNeT, which forgets by design, reports the changed tensors instead.
        """
        report = self._method.network.verify()
        if self._method.exclusive:
            report.require()
        return report

    def bake(self, task: str) -> nn.Module:
        """A plain `nn.Module` that computes what the task's subnetwork computes, without this package."""
        return self._method.network.bake(task)

    def to(self, device: str | torch.device) -> Self:
        """Move to a device and compute with its engine."""
        try:
            engine = choose(device, *self._computing)
            self._method.to(torch.device(device))
        except (RuntimeError, AssertionError) as error:
            raise InputError(f"device '{device}' cannot be used: {' '.join(str(error).split())}") from error
        self._method.use(engine)
        return self


def _first(data: Data, count: int) -> Tensor:
    """The first inputs of some data."""
    return data.batch(torch.arange(min(count, len(data)), device=data.device))[0]


def _two_epochs(epochs: object) -> tuple[int, int]:
    match epochs:
        case (int(mask), int(weights)):
            return mask, weights
    raise InputError(f"epochs is {epochs!r}: give two whole numbers, for the mask and for the weights")


def listed(tasks: Sequence[str]) -> str:
    """How many tasks, and the names of the first ones."""
    names = ", ".join(map(repr, tasks[:NAMED])) + (", ..." if len(tasks) > NAMED else "")
    return f"{len(tasks)} task{'s' * (len(tasks) != 1)}" + (f": {names}" if tasks else "")
