"""Commands for model directories: parse, call, print."""

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

Where = Annotated[Path, typer.Argument(metavar="MODEL", help="Model directory.")]
Task = Annotated[str, typer.Option("--task", help="Name of the task.")]
Own = Annotated[str | None, typer.Option("--network", help="Factory of your own network, as package.module:function.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Device = Annotated[str | None, typer.Option(help="Device: cpu, cuda or cuda:N.", show_default="cpu")]
Label = Annotated[str | None, typer.Option(help="Column of labels in a .csv or .parquet file.")]
Labels = Annotated[Path | None, typer.Option(help="Second .npy file with the labels of a .npy file.")]
MODEL = "New models only"
PANEL = "Model directories"


class Export(StrEnum):
    """Output format of `exssnet export`."""

    SAFETENSORS = "safetensors"
    TORCH = "torch"
    ONNX = "onnx"
    PT2 = "pt2"
    MODEL = "model"


class Rule(StrEnum):
    """Rule that finds the task of an input."""

    CONFIDENT = "confident"
    ONE_SHOT = "one-shot"
    BINARY = "binary"


FoundBy = Annotated[Rule, typer.Option(help="Rule that finds the task, with --task auto.")]
Threshold = Annotated[
    float | None,
    typer.Option(
        help="Lowest probability of a task, below which it is unknown, with --task auto.", show_default="measured"
    ),
]
NOT_MEASURED = (
    "routing was not measured in this model, so --task auto never answers unknown; "
    "`exssnet learn` measures it for each new task"
)


@app.command(rich_help_panel=PANEL)
def learn(
    path: Where,
    task: Task,
    data: Annotated[
        Path, typer.Option(help="Folder with a sub-folder per class, or a .parquet, .npz, .npy or .csv file.")
    ],
    label: Label = None,
    labels: Labels = None,
    epochs: Annotated[
        int | None,
        typer.Option(help="Number of epochs, half of them mask training.", show_default="30, more for small tables"),
    ] = None,
    lr: Annotated[float, typer.Option(help="Learning rate of mask training.")] = 0.01,
    weight_lr: Annotated[float, typer.Option(help="Learning rate of weight training.")] = 0.003,
    batch_size: Annotated[
        int | None, typer.Option(help="Number of examples per step.", show_default="64, fewer for few examples")
    ] = None,
    optimizer: Annotated[str, typer.Option(help="Optimizer: adam, adamw or sgd.")] = "adam",
    weight_decay: Annotated[float | None, typer.Option(help="Weight decay.", show_default="the optimizer's")] = None,
    held_out: Annotated[float, typer.Option(help="Fraction of examples held out to measure the accuracy.")] = 0.1,
    density: Annotated[
        float | None, typer.Option(help="Fraction of weights in the mask.", show_default="the model's, or 0.1")
    ] = None,
    network: Annotated[
        str | None,
        typer.Option(help="Network, see `exssnet list models`, or package.module:function.", rich_help_panel=MODEL),
    ] = None,
    width: Annotated[float | None, typer.Option(help="Width of the network.", rich_help_panel=MODEL)] = None,
    shape: Annotated[
        str | None, typer.Option("--input", help="Shape of an input, such as 3,32,32.", rich_help_panel=MODEL)
    ] = None,
    method: Annotated[
        str | None,
        typer.Option(
            help="Method: exssnet, supsup, exssnet+kkt or supsup+kkt.",
            show_default="exssnet+kkt",
            rich_help_panel=MODEL,
        ),
    ] = None,
    seed: Annotated[
        int | None, typer.Option(help="Seed of the initial weights.", show_default="0", rich_help_panel=MODEL)
    ] = None,
    init: Annotated[
        str | None,
        typer.Option(help="Initial weights: keep (the module's own) or hashed (from the seed).", rich_help_panel=MODEL),
    ] = None,
    private: Annotated[
        str | None,
        typer.Option(
            help="Parameters private to each task: norm, bias or names, comma-separated.", rich_help_panel=MODEL
        ),
    ] = None,
    device: Device = None,
    as_json: AsJson = False,
) -> None:
    """Learn a task from your files; the first task creates the directory."""
    from exssnet.cli import model_display as terminal_model
    from exssnet.cli import progress as terminal_progress
    from exssnet.data.files.labelled import read_labelled
    from exssnet.store.directory import Folder
    from exssnet.store.format.base_file import check_method
    from exssnet.store.plan import running_low
    from exssnet.store.routes.measured import Measured
    from exssnet.store.stored_model import StoredModel, check_name

    with stoppable(lambda: _describe_stopped(path, task)):
        check_name(task)
        if method is not None:
            check_method(method)
        if epochs is not None and epochs < 1:
            raise InputError(f"epochs is {epochs}: give at least 1")
        module = imported(network)
        own = None if private is None else private.split(",")
        given = _given(width=width, method=method, seed=seed, init=init, private=own)
        source: Path | Labelled = data
        if Folder(path).exists():
            model = StoredModel.open(path, module, device)
            base = model.base.json() | {"network": network if module is not None else model.base.network}
            wanted = numbers(shape)
            options = given | _given(input=wanted and list(wanted), network=network)
            if set(options.get("private", ())) == set(base["private"]):  # in any order
                options["private"] = base["private"]
            other = [name for name, value in options.items() if base[name] != value]
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


def _given(**options: Any) -> dict[str, Any]:
    """Options that were given."""
    return {name: value for name, value in options.items() if value is not None}


def _describe_stopped(path: Path, task: str) -> str:
    """Say whether a stopped task was stored, and how to continue."""
    from exssnet.store.directory import Folder

    if not Folder(path).exists():
        return f"nothing was written to {path}: run the same command to start again"
    if any(entry.name == task for entry in Folder(path).manifest().tasks):
        return f"task '{task}' is stored in {path}"
    return f"{path} is unchanged, without '{task}': run the same command to start again"


def _open(path: Path, network: str | None = None, device: str | None = None) -> StoredModel:
    from exssnet.store.stored_model import StoredModel

    if network is not None and ":" not in network:
        raise InputError(f"--network is '{network}': give package.module:function, or remove it for a built-in network")
    return StoredModel.open(path, imported(network), device)


@app.command(rich_help_panel=PANEL)
def tasks(path: Where, as_json: AsJson = False) -> None:
    """List the tasks: classes, accuracy, lender, overlap, trained weights, bytes, date."""
    from exssnet.cli import model_display as terminal_model

    model = _open(path)
    terminal_model.print_tasks(model, as_json)
    if model.damage is not None:
        lost = ", ".join(model.damage.tasks)
        tell(f"tasks that cannot be read: {lost}; {model.damage.reason}")
        raise typer.Exit(1)


@app.command(rich_help_panel=PANEL)
def show(path: Where, task: Annotated[str | None, typer.Option("--task", help="Name of the task.")] = None) -> None:
    """Print everything stored about the model, or about one task, as JSON."""
    model = _open(path)
    found: dict[str, Any] = dict(model.task(task).card) if task else model.summary()
    print_json(found, indent=1)


@app.command(rich_help_panel=PANEL)
def predict(
    path: Where,
    inputs: Annotated[list[Path], typer.Argument(help="Images, or a .npy, .npz, .csv or .parquet file.")],
    task: Annotated[str, typer.Option("--task", help="Name of the task, or auto.")],
    rule: FoundBy = Rule.CONFIDENT,
    threshold: Threshold = None,
    network: Own = None,
    device: Device = None,
    as_json: AsJson = False,
) -> None:
    """Predict the labels of inputs, with probabilities; --task auto also finds the task of each input."""
    from exssnet.cli import model_display as terminal_model
    from exssnet.store import predictions

    model = _open(path, network, device)
    if task != AUTO:
        if threshold is not None:
            raise InputError(f"--threshold needs --task auto, but the task is '{task}': remove one of them")
        terminal_model.print_answers(predictions.answers(model, inputs, task), as_json)
        return
    found = predictions.routed_answers(model, inputs, rule, threshold)
    terminal_model.print_routed(found, as_json)
    if found[0].routing is None and rule is Rule.CONFIDENT and len(model.manifest.tasks) > 1:
        tell(NOT_MEASURED)


@app.command(rich_help_panel=PANEL)
def evaluate(
    path: Where,
    task: Annotated[str, typer.Option("--task", help="Name of the task, or auto.")],
    data: Annotated[
        list[str], typer.Option(help="Labelled files, as for learn; with --task auto TASK=FILES, once per task.")
    ],
    label: Label = None,
    labels: Labels = None,
    rule: FoundBy = Rule.CONFIDENT,
    threshold: Threshold = None,
    network: Own = None,
    device: Device = None,
    as_json: AsJson = False,
) -> None:
    """Measure the accuracy on labelled files; --task auto also measures routing."""
    from exssnet.cli import model_display as terminal_model
    from exssnet.store import predictions

    model = _open(path, network, device)
    if task == AUTO:
        if labels is not None:
            raise InputError("--labels cannot be used with --task auto: give .npz files")
        found = predictions.evaluate_routed(model, pairs(data), rule, label, threshold)
    elif len(data) == 1:
        found = [predictions.evaluate(model, Path(data[0]), task, label, labels)]
    else:
        raise InputError("give --data once, or --task auto with --data TASK=FILES for every task")
    terminal_model.print_accuracies(found, as_json)


@app.command(rich_help_panel=PANEL)
def verify(path: Where, network: Own = None, as_json: AsJson = False) -> None:
    """Check the digests of all files, and of every task as it was learned."""
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
    tasks: Annotated[int, typer.Option(help="Number of further tasks.")] = 10,
    density: Annotated[float | None, typer.Option(help="Density of their masks.", show_default="the model's")] = None,
    network: Own = None,
    as_json: AsJson = False,
) -> None:
    """Print the free weights, and the cost of further tasks."""
    from exssnet.cli import model_display as terminal_model

    terminal_model.print_plan(_open(path, network).plan(tasks, density), as_json)


@app.command(rich_help_panel=PANEL)
def rename(path: Where, task: Task, to: Annotated[str, typer.Option("--to", help="New name.")]) -> None:
    """Rename a task."""
    _open(path).rename(task, to)
    with stored(f"'{task}' is now '{to}'"):
        say(f"{task} is now {to}")


@app.command(rich_help_panel=PANEL)
def remove(path: Where, task: Task, network: Own = None) -> None:
    """Remove a task and free the weights that no other task uses."""
    from exssnet.cli import model_display as terminal_model

    removed = _open(path, network).remove(task)
    with stored(f"'{task}' is removed"):
        terminal_model.print_removed(removed, task)


@app.command(rich_help_panel=PANEL)
def rollback(path: Where) -> None:
    """Undo the last change."""
    undone = _open(path).rollback()
    with stored(f"undone: {undone}"):
        say(f"undone: {undone}")


@app.command(rich_help_panel=PANEL)
def export(
    path: Where,
    task: Task,
    out: Annotated[Path, typer.Option(help="File or directory to write.")],
    format: Annotated[
        Export,
        typer.Option(
            help="Format: a state_dict (safetensors, torch), a program for raw inputs (onnx, pt2), or a directory."
        ),
    ] = Export.SAFETENSORS,
    network: Own = None,
) -> None:
    """Export one task."""
    _open(path, network).export(task, out, format)
    state = format in (Export.SAFETENSORS, Export.TORCH)
    with stored(f"{out} is written"):
        say(f"wrote {out}" + (f", and {out}.json with labels and scaling" if state else ""))


@app.command("import", rich_help_panel=PANEL)
def import_(
    path: Where,
    source: Annotated[
        Path, typer.Option("--from", help="Model directory with the same base, or a task exported as safetensors.")
    ],
    task: Annotated[str | None, typer.Option("--task", help="Name of the task in that directory.")] = None,
    name: Annotated[str | None, typer.Option("--as", help="Name of the task here.", show_default="the same")] = None,
    network: Own = None,
) -> None:
    """Import a task from another model directory with the same base, or from an exported file."""
    model = _open(path, network)
    if source.exists() and not source.is_dir():
        if task is not None:
            raise InputError(f"--task needs a model directory, but {source} is one task: remove --task")
        name = model.import_task(source, None, name)
    else:
        name = model.import_task(_open(source, network), task, name)
    with stored(f"'{name}' is imported"):
        say(f"imported {name}; all tasks verified unchanged")
