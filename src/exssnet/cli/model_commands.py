"""The verbs for a model directory: parse, call, print."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from exssnet.cli.console import print_json, say, stoppable, stored, tell
from exssnet.cli.values import imported, numbers, pairs
from exssnet.errors import InputError
from exssnet.store.format.manifest import AUTO

if TYPE_CHECKING:
    from exssnet.data.files.labelled import Labelled
    from exssnet.store.stored_model import StoredModel

app = typer.Typer()

Where = Annotated[Path, typer.Argument(metavar="MODEL", help="The model directory.")]
Task = Annotated[str, typer.Option("--task", help="The task's name.")]
Own = Annotated[
    str | None, typer.Option("--network", help="package.module:factory, where the network is one of your own.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Device = Annotated[str | None, typer.Option(help="cpu, cuda, ...", show_default="cpu")]
Label = Annotated[str | None, typer.Option(help="The column with the labels, of a .csv or .parquet.")]
Labels = Annotated[Path | None, typer.Option(help="The labels of a .npy, in a second one.")]
MODEL = "A new model"
PANEL = "Model directories"


class Export(StrEnum):
    """What `exssnet export` can write."""

    SAFETENSORS = "safetensors"
    TORCH = "torch"
    ONNX = "onnx"
    PT2 = "pt2"
    MODEL = "model"


class Rule(StrEnum):
    """How a task is found for inputs that do not say theirs."""

    CONFIDENT = "confident"
    ONE_SHOT = "one-shot"
    BINARY = "binary"


FoundBy = Annotated[Rule, typer.Option(help="With --task auto: how the task is found.")]
Threshold = Annotated[
    float | None,
    typer.Option(
        help="With --task auto: the least probability of a task, or else it is unknown.", show_default="measured"
    ),
]
NOT_MEASURED = (
    "how well tasks are told apart was not measured in this model, so --task auto always answers; "
    "that is measured when a task is learned"
)


@app.command(rich_help_panel=PANEL)
def learn(
    path: Where,
    task: Task,
    data: Annotated[Path, typer.Option(help="A folder with a sub-folder per class; .parquet, .npz, .npy or .csv.")],
    label: Label = None,
    labels: Labels = None,
    epochs: Annotated[
        int | None,
        typer.Option(help="Number of epochs, half of them for the mask.", show_default="30, more for small tables"),
    ] = None,
    lr: Annotated[float, typer.Option(help="Learning rate of the mask.")] = 0.01,
    weight_lr: Annotated[float, typer.Option(help="Learning rate of the weights.")] = 0.003,
    batch_size: Annotated[
        int | None, typer.Option(help="Examples per step.", show_default="64, fewer for few examples")
    ] = None,
    optimizer: Annotated[str, typer.Option(help="adam, adamw or sgd.")] = "adam",
    weight_decay: Annotated[float | None, typer.Option(help="The optimizer's decay.", show_default="its own")] = None,
    held_out: Annotated[float, typer.Option(help="Share that is kept to measure the accuracy.")] = 0.1,
    density: Annotated[
        float | None, typer.Option(help="Share of weights the mask keeps.", show_default="the model's, 0.1")
    ] = None,
    network: Annotated[
        str | None,
        typer.Option(help="A name of `exssnet list models`, or package.module:factory.", rich_help_panel=MODEL),
    ] = None,
    width: Annotated[float | None, typer.Option(help="The network's width.", rich_help_panel=MODEL)] = None,
    shape: Annotated[str | None, typer.Option("--input", help="What it takes: 3,32,32.", rich_help_panel=MODEL)] = None,
    method: Annotated[
        str | None,
        typer.Option(help="exssnet or supsup, with +kkt or not.", show_default="exssnet+kkt", rich_help_panel=MODEL),
    ] = None,
    seed: Annotated[
        int | None, typer.Option(help="Of the first weights.", show_default="0", rich_help_panel=MODEL)
    ] = None,
    init: Annotated[
        str | None,
        typer.Option(help="keep or hashed: a module's own weights, or of the seed.", rich_help_panel=MODEL),
    ] = None,
    private: Annotated[
        str | None,
        typer.Option(help="norm, bias or parameters that each task has its own of.", rich_help_panel=MODEL),
    ] = None,
    device: Device = None,
    as_json: AsJson = False,
) -> None:
    """Add a task from your own files; the first one makes the directory."""
    from exssnet.cli import model_display as terminal_model
    from exssnet.cli import progress as terminal_progress
    from exssnet.data.files.labelled import read_labelled
    from exssnet.store.directory import Folder
    from exssnet.store.format.base_file import check_method
    from exssnet.store.plan import running_low
    from exssnet.store.routes.measured import Measured
    from exssnet.store.stored_model import StoredModel, check_name

    with stoppable(lambda: _kept(path, task)):
        check_name(task)
        if method is not None:
            check_method(method)
        if epochs is not None and epochs < 1:
            raise InputError(f"epochs is {epochs}: give at least 1")
        module = imported(network)
        own = None if private is None else private.split(",")
        given = _asked(width=width, method=method, seed=seed, init=init, private=own)
        source: Path | Labelled = data
        if Folder(path).exists():
            model = StoredModel.open(path, module, device)
            base = model.base.json() | {"network": network if module is not None else model.base.network}
            wanted = numbers(shape)
            asked = given | _asked(input=wanted and list(wanted), network=network)
            if set(asked.get("private", ())) == set(base["private"]):  # in whatever order
                asked["private"] = base["private"]
            other = [name for name, value in asked.items() if base[name] != value]
            if other:
                now = ", ".join(f"{name} {base[name]}" for name in other)
                raise InputError(f"--{', --'.join(other)} can only be set when a model is created: {path} has {now}")
        else:
            source = read_labelled(data, numbers(shape), label=label, labels=labels)
            takes = tuple(source.inputs.shape[1:])
            chosen = module if module is not None else network
            model = StoredModel.begin(
                path, chosen, takes, density=0.1 if density is None else density, device=device, **given
            )
        with terminal_progress.of_task(task, quiet=as_json) as listener:
            learned = model.learn(
                task, source, label=label, labels=labels, lr=lr, weight_lr=weight_lr, density=density,
                epochs=None if epochs is None else (epochs - epochs // 2, epochs // 2), batch_size=batch_size,
                optimizer=optimizer, weight_decay=weight_decay, held_out=held_out, listener=listener,
            )  # fmt: skip
        with stored(f"task '{task}' is stored in {path}"):
            terminal_model.print_learned(model, learned, as_json)
        measured = Measured.of_card(learned.card)
        for warning in (measured and measured.warning(), running_low(model.model.network)):
            if warning:
                tell(warning)


def _asked(**options: Any) -> dict[str, Any]:
    """Those that were given."""
    return {name: value for name, value in options.items() if value is not None}


def _kept(path: Path, task: str) -> str:
    """What became of a task whose learning was stopped, and how to go on."""
    from exssnet.store.directory import Folder

    if not Folder(path).exists():
        return f"nothing was written to {path}: the same command begins again"
    if any(entry.name == task for entry in Folder(path).manifest().tasks):
        return f"{path} has task '{task}'"
    return f"{path} is as it was, without '{task}': the same command begins again"


def _open(path: Path, network: str | None = None, device: str | None = None) -> StoredModel:
    from exssnet.store.stored_model import StoredModel

    if network is not None and ":" not in network:
        raise InputError(
            f"network is '{network}': give package.module:factory; built-in networks are known by the model"
        )
    return StoredModel.open(path, imported(network), device)


@app.command(rich_help_panel=PANEL)
def tasks(path: Where, as_json: AsJson = False) -> None:
    """List the tasks: classes, accuracy, lender, overlap, trained weights, bytes, date."""
    from exssnet.cli import model_display as terminal_model

    model = _open(path)
    terminal_model.print_tasks(model, as_json)
    if model.damage is not None:
        lost = ", ".join(model.damage.tasks)
        tell(f"not readable: {lost}; {model.damage.reason}")
        raise typer.Exit(1)


@app.command(rich_help_panel=PANEL)
def show(path: Where, task: Annotated[str | None, typer.Option("--task", help="One task.")] = None) -> None:
    """Print all that is known of the model, or of one task, as JSON."""
    model = _open(path)
    found: dict[str, Any] = dict(model.task(task).card) if task else model.summary()
    print_json(found, indent=1)


@app.command(rich_help_panel=PANEL)
def predict(
    path: Where,
    inputs: Annotated[list[Path], typer.Argument(help="Images, or a .npy, .npz, .csv or .parquet.")],
    task: Annotated[str, typer.Option("--task", help="Its name, or auto.")],
    rule: FoundBy = Rule.CONFIDENT,
    threshold: Threshold = None,
    network: Own = None,
    device: Device = None,
    as_json: AsJson = False,
) -> None:
    """Say what inputs are, with probabilities; --task auto finds the task too, or says that it is unknown."""
    from exssnet.cli import model_display as terminal_model
    from exssnet.store import ask

    model = _open(path, network, device)
    if task != AUTO:
        if threshold is not None:
            raise InputError(f"--threshold is for --task auto, but the task is '{task}'")
        terminal_model.print_answers(ask.answers(model, inputs, task), as_json)
        return
    found = ask.routed_answers(model, inputs, rule, threshold)
    terminal_model.print_routed(found, as_json)
    if found[0].routing is None and rule is Rule.CONFIDENT and len(model.manifest.tasks) > 1:
        tell(NOT_MEASURED)


@app.command(rich_help_panel=PANEL)
def evaluate(
    path: Where,
    task: Annotated[str, typer.Option("--task", help="Its name, or auto.")],
    data: Annotated[
        list[str], typer.Option(help="Labelled files as for learn; with --task auto TASK=FILES, repeated.")
    ],
    label: Label = None,
    labels: Labels = None,
    rule: FoundBy = Rule.CONFIDENT,
    threshold: Threshold = None,
    network: Own = None,
    device: Device = None,
    as_json: AsJson = False,
) -> None:
    """Measure a task on labelled files; --task auto measures how well tasks are told apart as well."""
    from exssnet.cli import model_display as terminal_model
    from exssnet.store import ask

    model = _open(path, network, device)
    if task == AUTO:
        if labels is not None:
            raise InputError("--labels belongs to one task: with --task auto give .npz files")
        found = ask.evaluate_routed(model, pairs(data), rule, label, threshold)
    elif len(data) == 1:
        found = [ask.evaluate(model, Path(data[0]), task, label, labels)]
    else:
        raise InputError("give --data once, or --task auto with --data TASK=FILES for every task")
    terminal_model.print_accuracies(found, as_json)


@app.command(rich_help_panel=PANEL)
def verify(path: Where, network: Own = None, as_json: AsJson = False) -> None:
    """Check every byte of every file, and every task against the digest it was learned with."""
    from exssnet.cli import model_display as terminal_model
    from exssnet.store.directory import Folder
    from exssnet.store.verify import verify as check

    report = check(Folder(path), imported(network))
    terminal_model.print_report(report, path, as_json)
    if not report.verified:
        raise typer.Exit(1)


@app.command(rich_help_panel=PANEL)
def plan(
    path: Where,
    tasks: Annotated[int, typer.Option(help="So many more.")] = 10,
    density: Annotated[float | None, typer.Option(help="Of their masks.", show_default="the model's")] = None,
    network: Own = None,
    as_json: AsJson = False,
) -> None:
    """Say what is free, and what more tasks will leave and cost."""
    from exssnet.cli import model_display as terminal_model

    terminal_model.print_plan(_open(path, network).plan(tasks, density), as_json)


@app.command(rich_help_panel=PANEL)
def rename(path: Where, task: Task, to: Annotated[str, typer.Option("--to", help="The new name.")]) -> None:
    """Give a task another name."""
    _open(path).rename(task, to)
    with stored(f"'{task}' is now '{to}'"):
        say(f"{task} is now {to}")


@app.command(rich_help_panel=PANEL)
def remove(path: Where, task: Task, network: Own = None) -> None:
    """Take a task out; weights that no other task reads become free, what others read stays as it is."""
    from exssnet.cli import model_display as terminal_model

    removed = _open(path, network).remove(task)
    with stored(f"'{task}' is removed"):
        terminal_model.print_removed(removed, task)


@app.command(rich_help_panel=PANEL)
def rollback(path: Where) -> None:
    """Undo the last change."""
    undone = _open(path).rollback()
    with stored(f"undone is {undone}"):
        say(f"undone: {undone}")


@app.command(rich_help_panel=PANEL)
def export(
    path: Where,
    task: Task,
    out: Annotated[Path, typer.Option(help="The file, or the directory, to write.")],
    format: Annotated[
        Export,
        typer.Option(
            help="A state_dict (safetensors, torch), a program that takes raw inputs (onnx, pt2), a directory."
        ),
    ] = Export.SAFETENSORS,
    network: Own = None,
) -> None:
    """Write one task on its own."""
    _open(path, network).export(task, out, format)
    state = format in (Export.SAFETENSORS, Export.TORCH)
    with stored(f"{out} is written"):
        say(f"wrote {out}" + (f", and {out}.json with labels and scaling" if state else ""))


@app.command("import", rich_help_panel=PANEL)
def import_(
    path: Where,
    source: Annotated[
        Path, typer.Option("--from", help="A model directory with the same base, or a task exported as safetensors.")
    ],
    task: Annotated[str | None, typer.Option("--task", help="The task's name, of a directory.")] = None,
    name: Annotated[str | None, typer.Option("--as", help="Its name here.", show_default="the same")] = None,
    network: Own = None,
) -> None:
    """Add a task from another model directory with the same base, or one that `export` wrote."""
    model = _open(path, network)
    if source.exists() and not source.is_dir():
        if task is not None:
            raise InputError(f"--task is for a directory, but {source} is one task: leave it out")
        name = model.import_task(source, None, name)
    else:
        name = model.import_task(_open(source, network), task, name)
    with stored(f"'{name}' is imported"):
        say(f"imported {name}; all tasks verified unchanged")
