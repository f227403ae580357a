"""A model in a directory that learns task after task; every change is atomic."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save
from torch import Tensor, nn

from exssnet.core import changes
from exssnet.data.files import labelled as files
from exssnet.data.files.examples import check_labels, count_classes, read_examples
from exssnet.data.files.naming import class_names
from exssnet.errors import InputError, StoreError
from exssnet.store import exchange
from exssnet.store.change import Change
from exssnet.store.directory import FILES, LOCK, UNFINISHED, Folder
from exssnet.store.format import probe, task_files
from exssnet.store.format.base_file import check_method, new_base
from exssnet.store.format.card import Card, identity, of_network, renamed, with_task, without
from exssnet.store.format.manifest import AUTO, File, Manifest
from exssnet.store.format.stored_task import StoredTask
from exssnet.store.learning import cut, fitting_scaling, parts, usual_batch, usual_epochs
from exssnet.store.plan import Plan, plan
from exssnet.store.reader import Reader
from exssnet.store.routes.held_out import source_of
from exssnet.store.routes.measured import measure, written
from exssnet.store.verify import Report, verify
from exssnet.store.writer import writing
from exssnet.train import Listener

if TYPE_CHECKING:
    from exssnet.data.files.examples import Examples

    Source = str | Path | Examples | files.Labelled

LONGEST_NAME = 100


@dataclass(frozen=True)
class Removed:
    """Result of removing a task."""

    freed: int  # weights that no other task uses, which have their initial values again
    staying: int  # values trained on it that stay because masks of other tasks use them
    undoable: bool  # its files stay until the next change, and `rollback` restores it


class StoredModel(Reader):
    """A model directory. Reading needs no lock; one process at a time may change it.

    model = exssnet.Model.create("model", network="resnet18", input=(3, 32, 32))
    model.learn("animals", "animals/")
    model.predict(photos, tasks=["animals", "animals", "plants"])
    """

    @classmethod
    def create(
        cls, path: str | Path, network: str | nn.Module | None = None, input: Sequence[int] = (3, 32, 32), *,
        density: float = 0.1, seed: int = 0, method: str = "exssnet+kkt", width: float | None = None,
        init: str | None = None, private: Collection[str] | None = None, head_layer: str | None = None,
        device: str | torch.device | None = None,
    ) -> StoredModel:  # fmt: skip
        """Create a directory without tasks. Every task gets its own head.

        `network` is the name of a built-in network or your module; by default it is chosen by the shape of an
        input: `mlp` for tables and vectors, LeNet-300-100 for small grey images, ResNet-18 for others. A module keeps
        its weights unless `init` is "hashed" (drawn from the seed). The module itself is not stored: pass it again to
        `open`. `private` names parameters that each task has its own copy of ("norm", "bias", or patterns of names);
        by default the biases of `mlp`, and nothing for other networks.
        """
        model = cls.begin(path, network, input, density=density, seed=seed, method=method, width=width, init=init,
                          private=private, head_layer=head_layer, device=device)  # fmt: skip
        with Change(model) as change:
            change.commit("create", [])
        return model

    @classmethod
    def begin(
        cls, path: str | Path, network: str | nn.Module | None, input: Sequence[int], *, density: float = 0.1,
        seed: int = 0, method: str = "exssnet+kkt", width: float | None = None, init: str | None = None,
        private: Collection[str] | None = None, head_layer: str | None = None, device: str | torch.device | None = None,
    ) -> StoredModel:  # fmt: skip
        """Like `create`, but nothing is written before the first task is learned."""
        folder = _new_folder(path)
        base, stored = new_base(network, input, width, density, seed, method, init, private, head_layer)
        content = None if stored is None else save(_plain(stored))
        file = None if content is None else File.of(content, "safetensors")
        module = network if isinstance(network, nn.Module) else None
        return cls(folder, module, device, Manifest(base.json(), file, (), "", "", None), content)

    @classmethod
    def with_base(cls, path: str | Path, like: StoredModel) -> StoredModel:
        """Begin a directory with the base of another one, written with its first task."""
        folder, file = _new_folder(path), like._manifest.base_file
        content = None if file is None else like._folder.read(file)
        manifest = Manifest(like._manifest.base, file, (), "", "", None)
        return cls(folder, like._module, like._device, manifest, content)

    @classmethod
    def open(
        cls, path: str | Path, module: nn.Module | None = None, device: str | torch.device | None = None
    ) -> StoredModel:
        """Open a directory. `module`: your own network, if it was created with one.

        A module is refused if it has other tensors, or does not compute the answers of the first task.
        """
        model = cls(Folder(Path(path)), module, device)
        model.check_module()
        return model

    # --- learning ----------------------------------------------------------------------------------------------

    def learn(
        self, name: str, data: Source, *, label: str | None = None, labels: str | Path | None = None,
        classes: Sequence[str] | None = None, density: float | None = None, held_out: float = 0.1,
        epochs: tuple[int, int] | None = None, lr: float = 0.01, weight_lr: float = 0.003,
        batch_size: int | None = None, optimizer: str = "adam", weight_decay: float | None = None, select: str = "last",
        listener: Listener | None = None,
    ) -> StoredTask:  # fmt: skip
        """Learn a task from files or from examples in memory; it is on disk when this returns.

        `data` is a folder of images with a sub-folder per class, a .parquet, .npz, .npy or .csv file (`label` names
        its column of labels, `labels` a second array), or what `Model.learn` takes; `classes` are then their names.
        The fraction `held_out` measures the accuracy and is never trained on; `select="best"` chooses the best epoch of
        each phase on an equal fraction of the rest. The default `batch_size` is smaller for few examples; the default
        `epochs` are 15 for the mask and 15 for its weights, and more for a table of few rows.
        """
        check_name(name)
        check_method(self.base.method)
        if not 0 <= held_out < 1:
            raise InputError(f"held_out is {held_out}: give a fraction from 0, below 1")
        now = self._manifest if self._unwritten else self._folder.manifest()
        if any(entry.name == name for entry in now.tasks):  # before the data is read
            raise InputError(f"task '{name}' exists: choose another name")
        cards = self.cards
        self.require_whole()
        found = self._labelled(data, label, labels, classes)
        train, rest = files.hold_out(found.labels, held_out, self.base.seed)
        chooses = rest  # the part that measures every epoch
        if select == "best":  # the chosen epoch is biased on that part, so another part measures the reported accuracy
            train, chooses = cut(train, found.labels, held_out, self.base.seed)
        scaling, source = fitting_scaling(found, train, cards), source_of(found, held_out)
        part = parts(found, scaling)
        batch_size = usual_batch(len(train)) if batch_size is None else batch_size
        epochs = usual_epochs(self.base.input, len(train), batch_size) if epochs is None else epochs
        with self._changing() as change:
            model = change.model
            model.network.set_density(self.base.density if density is None else density)
            used = model.network.bank.used.clone()
            validation = part(chooses) if len(chooses) else None
            learned = model.learn(
                name, part(train), epochs, validation=validation,
                classes=len(found.classes), lr=lr, weight_lr=weight_lr, batch_size=batch_size, optimizer=optimizer,
                weight_decay=weight_decay, select=select, listener=listener,
            )  # fmt: skip
            accuracy = model.evaluate(part(rest), name) if len(rest) else None
            card: dict[str, Any] = {
                "labels": list(found.classes), "label": label, "recipe": dict(found.recipe), "scaling": scaling,
                "accuracy": accuracy, "examples": len(train), "held_out": len(rest),
                "settings": {
                    "method": self.base.method, "density": model.network.density, "epochs": list(epochs), "lr": lr,
                    "weight_lr": weight_lr, "batch_size": batch_size, "optimizer": optimizer,
                    "weight_decay": weight_decay, "select": select,
                    "selected_on": len(chooses) if select == "best" else 0,
                },
                "date": datetime.now(UTC).isoformat(timespec="seconds"), "source": source,
            }  # fmt: skip
            card = with_task(card, learned)
            card["digest"] = identity(card)
            if len(rest):
                self._held_out.keep(card["digest"], found.inputs[rest])
            card["routing"] = self._routing([*self.cards, card])
            card["probe"] = probe.made(model.network, name, found.recipe, found.inputs)
            coded = task_files.write(model.network, self._first(), len(model.tasks) - 1, used)[0]
            change.add(f"learn {name}", card, coded)
        return self.task(name)

    def summary(self) -> dict[str, Any]:
        """Everything stored about the model, as JSON."""
        return {
            "path": str(self.path), "base": self.base.json(), "changes": self._manifest.number,
            "last_change": self._manifest.change, "time": self._manifest.time,
            "tasks": [entry.name for entry in self._manifest.tasks],
            "bytes": sum(file.size for file in self._manifest.files()),
            "routing": self.measured and self.measured.json(),
        }  # fmt: skip

    def _labelled(
        self, data: Source, label: str | None, labels: str | Path | None, classes: Sequence[str] | None
    ) -> files.Labelled:
        if isinstance(data, files.Labelled):
            return data
        if isinstance(data, str | Path):
            labels = None if labels is None else Path(labels)
            return files.read_labelled(Path(data), self.base.input, label=label, labels=labels)
        inputs, numbers = read_examples(data)
        count = count_classes(numbers) if classes is None else len(classes)
        check_labels(numbers, count)
        names = [str(number) for number in range(count)] if classes is None else class_names(classes)
        kind = str(inputs.dtype).removeprefix("torch.")
        return files.Labelled(
            inputs, numbers, names, {"kind": "tensor", "shape": list(inputs.shape[1:]), "dtype": kind}
        )

    # --- changing ----------------------------------------------------------------------------------------------

    def rename(self, task: str, name: str) -> None:
        """Rename a task."""
        check_name(name)
        with self._changing() as change:
            self.task(task)
            self._read_tensors()  # a rename reads none, but would delete the previous state
            self.require_whole()
            if any(entry.name == name for entry in self._manifest.tasks):
                raise InputError(f"task '{name}' exists: choose another name")
            entries = []
            for entry, card in zip(self._manifest.tasks, self.cards, strict=True):
                now = renamed(card, task, name)
                changed = entry if now == card else change.with_card(entry, now)
                predictor = name if entry.predictor == task else entry.predictor
                entries.append(replace(changed, predictor=predictor))
            change.commit(f"rename {task} to {name}", entries)

    def remove(self, task: str) -> Removed | None:
        """Remove a task. Weights that other tasks use stay, and these tasks are verified.

        Its files stay until the next change, so that `rollback` can restore it. In a damaged directory the last task
        can be removed without reading it; the result is None.
        """
        with self._changing() as change:
            change.spend_way_back()
            last = self._position(task) + 1 == len(self._manifest.tasks)
            network = self.model.network  # reading finds damage
            if self.damage is not None and last:
                change.commit(f"remove {task}", self._manifest.tasks[:-1])
                return None
            self.require_whole()
            before = network.bank.free_count
            first, start = self._first(), list(network.tasks).index(task)
            trained = (network.bank.owners() == start) & (network.weights != first)
            changes.remove(network, task, first)
            for learned in network.tasks.values():  # another task may get this name
                learned.lender = None if learned.lender == task else learned.lender
            used = torch.zeros_like(network.bank.used)
            for index in range(start):
                used |= network.bank.mask(index)
            left = [entry for entry in self._manifest.tasks if entry.name != task]
            cards = [card for card in self.cards if card["task"]["name"] != task]
            entries = left[:start]
            for card, coded in zip(cards[start:], task_files.write(network, first, start, used), strict=True):
                entries.append(change.entry(without(card, task), coded))
            staying = int((trained & network.bank.used).count_nonzero())
            freed = network.bank.free_count - before
            change.commit(f"remove {task}", entries)
            return Removed(freed, staying, change.undoable)

    def adopt(
        self, card: dict[str, Any], name: str, mask: Tensor, masked: Tensor, private: dict[str, Tensor]
    ) -> StoredTask:
        """Add a task that was learned elsewhere on the same base: its card, mask, weights and private tensors."""
        check_name(name)
        with self._changing() as change:
            network = change.model.network
            used = network.bank.used.clone()
            learned = changes.adopt(network, of_network(card) | {"name": name}, mask, masked, private)
            card = with_task(card, learned)
            if (wrong := probe.difference(network, card)) is not None:
                raise StoreError(probe.refusal(name, wrong, self._module is not None))
            card["routing"] = self._routing([*self.cards, card])  # routing among other tasks is meaningless here
            coded = task_files.write(network, self._first(), len(network.tasks) - 1, used)[0]
            change.add(f"import {name}", card, coded)
        return self.task(name)

    def import_task(self, other: StoredModel | str | Path, task: str | None = None, name: str | None = None) -> str:
        """Import a task of a directory, or a safetensors export, with the same base; return its name here."""
        if isinstance(other, str | Path):
            return exchange.adopt_file(self, Path(other), name)
        if task is None:
            raise InputError(f"give a task of {other.path}: it has {', '.join(one.name for one in other.tasks)}")
        exchange.adopt(self, other, task, name or task)
        return name or task

    def export(self, task: str, path: str | Path, format: str = "safetensors") -> nn.Module:
        """Export one task: `safetensors` or `torch` (a state_dict, and a .json that describes the scaling of inputs),
        `onnx` or `pt2` (the computation from raw inputs), or `model` (a directory).

        Returns the task's module, from raw inputs to logits.
        """
        return exchange.export(self, task, Path(path), format)

    def rollback(self) -> str:
        """Undo the last change; return its description."""
        with writing(self._folder) as writer:
            now = writer.manifest
            undone = "" if now is None else now.change
            self._forget(writer.rollback())
        return undone

    def plan(self, tasks: int = 10, density: float | None = None) -> Plan:
        """Free weights, and what `tasks` further tasks at a density leave and cost."""
        density = self.base.density if density is None else density
        network = self.model.network
        self.require_whole()
        return plan(network, tasks, density, not self.base.method.startswith("supsup"), self._card_bytes(tasks))

    def _card_bytes(self, tasks: int) -> float:
        """Bytes besides tensors of each further task: a card and a header."""
        more = range(len(self._manifest.tasks) + 1, len(self._manifest.tasks) + 1 + min(max(tasks, 1), 100))
        routing = sum(map(written, more)) / len(more)
        if not self._manifest.tasks:
            network = self.model.network
            return routing + 900 + 200 * (len(network.layout.layers) + len(network.private_start))  # names, digests
        last = self._manifest.tasks[-1]
        header = 8 + int.from_bytes(self._folder.read(last.tensors)[:8], "little")
        return routing - written(len(self._manifest.tasks)) + last.card.size + header

    def verify(self) -> Report:
        """Check the digests of all files, and of every task as it was learned."""
        return verify(self._folder, self._module).require()

    def _routing(self, cards: Sequence[Card]) -> dict[str, Any] | None:
        """Measure routing with the newest task, for its card."""
        found = measure(self.model.network, cards, self._held_out.reader(self.base.seed))
        return None if found is None else found.json()

    def _changing(self) -> Change:
        return Change(self)

    def _forget(self, manifest: Manifest) -> None:
        """Forget the state that was read."""
        with self._lock:
            self._manifest, self._cards, self._damage, self._loaded, self._mixed = manifest, None, None, None, None


def check_name(name: str) -> None:
    """Refuse a name that would be hard to read, type or show."""
    good = isinstance(name, str) and name and name == name.strip() and name.isprintable()
    if not good or len(name) > LONGEST_NAME or name == AUTO or name[0] == "-" or any(sign in name for sign in "/\\,="):
        raise InputError(
            f"{name!r} cannot be the name of a task: give up to {LONGEST_NAME} letters, digits and signs without / \\ "
            f"= or commas, not starting with -, and not '{AUTO}'"
        )


def _new_folder(path: str | Path) -> Folder:
    """Check the directory of a new model, which must be empty."""
    folder = Folder(Path(path))
    if not folder.exists() and folder.path.is_dir():
        ours = {FILES, LOCK, UNFINISHED}  # of an unfinished model
        if any(entry.name not in ours and not entry.name.startswith(".") for entry in folder.path.iterdir()):
            raise StoreError(f"{path} has other files and is not a model directory: choose another path")
    return folder


def _plain(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
