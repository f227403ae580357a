"""The command line: commands parse, call and print. torch is imported only by commands that need it."""

from __future__ import annotations

import sys
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from exssnet.cli import cache_commands as cli_cache
from exssnet.cli import model_commands as cli_model
from exssnet.cli.console import REFUSED, Stopped, one_line_errors, print_json, stoppable, stored
from exssnet.cli.plans import named, pairs, planned, repeated
from exssnet.errors import InputError
from exssnet.version import __version__

if TYPE_CHECKING:
    pass


class Commands(TyperGroup):
    """Passes on Ctrl-C, about which typer would print nothing."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt as error:
            raise Stopped from error


app = typer.Typer(
    name="exssnet",
    cls=Commands,
    help="Continual learning without forgetting: one network, one binary mask per task.",
    invoke_without_command=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


class Listing(StrEnum):
    """Argument of `exssnet list`."""

    METHODS = "methods"
    BENCHMARKS = "benchmarks"
    MODELS = "models"
    ENCODERS = "encoders"


class Format(StrEnum):
    """Output format of `exssnet compare`."""

    TEXT = "text"
    MARKDOWN = "markdown"
    LATEX = "latex"
    CSV = "csv"


class Order(StrEnum):
    """Order of methods in `exssnet compare`."""

    ACCURACY = "accuracy"
    NAME = "name"


# typer bundles its own click since 0.20: this is the base class of its usage errors
_UsageError: type[Exception] = typer.BadParameter.__mro__[1]


def main() -> None:
    """Run a command; errors become one line and an exit code."""
    with one_line_errors():
        try:
            code = app(prog_name="exssnet", standalone_mode=False)
        except _UsageError as error:
            raise _as_input_error(error) from error
        if code:
            sys.exit(code)


def _as_input_error(error: Any) -> InputError:
    """Describe a usage error in one line."""
    what = " ".join(error.format_message().split())
    return InputError(f"{what.rstrip('.')} (see `{error.ctx.command_path} --help`)")


def _version(wanted: bool) -> None:
    if wanted:
        print(f"exssnet {__version__}")
        raise typer.Exit


@app.callback()
def options(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Continual learning without forgetting: one network, one binary mask per task."""
    if context.invoked_subcommand is None:
        print(context.get_help())
        raise typer.Exit(REFUSED)


@app.command("list")
def list_(what: Annotated[Listing, typer.Argument(help="Kind of names.")]) -> None:
    """List methods, benchmarks, models or encoders."""
    from exssnet.cli import run_display as terminal

    terminal.print_names(_descriptions(what))


def _descriptions(what: Listing) -> dict[str, str]:
    if what is Listing.BENCHMARKS:
        from exssnet.experiments.recipes import recipes

        return {name: recipe["description"] for name, recipe in recipes().items()}
    if what is Listing.MODELS:
        from exssnet.models import describe

        return describe()
    if what is Listing.ENCODERS:
        from exssnet.encoders import describe as describe_encoders

        return describe_encoders()
    from exssnet.methods import describe as describe_methods

    return describe_methods()


RUN, STREAM, METHOD, KKT, NETWORK = "Run", "Stream", "Method", "Transfer (KKT)", "Network"


@app.command()
def run(
    benchmark: Annotated[str, typer.Argument(help="Name of the benchmark, see `exssnet list benchmarks`.")] = "",
    method: Annotated[
        str | None,
        typer.Option(help="Method, comma-separated methods, or all; x+kkt means x with --kkt.", show_default="exssnet"),
    ] = None,
    kkt: Annotated[bool, typer.Option("--kkt", help="Start each task from the mask of an earlier task.")] = False,
    seeds: Annotated[str | None, typer.Option(help="Comma-separated seeds.", show_default="0")] = None,
    # the stream
    tasks: Annotated[int | None, typer.Option(help="Number of tasks.", rich_help_panel=STREAM)] = None,
    class_order: Annotated[
        str | None,
        typer.Option(help="Order of classes: seed, natural, or a list such as 3,1,0,2.", rich_help_panel=STREAM),
    ] = None,
    class_order_seed: Annotated[
        int | None, typer.Option(help="Seed of the class order.", show_default="the run's seed", rich_help_panel=STREAM)
    ] = None,
    validation: Annotated[
        float | None, typer.Option(help="Fraction of the training data held out.", rich_help_panel=STREAM)
    ] = None,
    samples_per_class: Annotated[
        int | None, typer.Option(help="Number of training images per class, for a miniature.", rich_help_panel=STREAM)
    ] = None,
    images: Annotated[
        str | None, typer.Option(help="Folder of images for split-imagenet.", rich_help_panel=STREAM)
    ] = None,
    stream: Annotated[
        Path | None, typer.Option(help="YAML file that lists tasks of your own data.", rich_help_panel=STREAM)
    ] = None,
    sample: Annotated[
        int | None, typer.Option(help="Training rows a class, of texts; 2000 in the paper.", rich_help_panel=STREAM)
    ] = None,
    encoder: Annotated[
        str | None,
        typer.Option(help="Encoder of texts: a name, a path, or random.", rich_help_panel=STREAM, show_default="auto"),
    ] = None,
    setting: Annotated[
        str | None,
        typer.Option(help="task-incremental, or class-incremental: tests name no task.", rich_help_panel=STREAM),
    ] = None,
    routing: Annotated[
        str | None, typer.Option(help="How masks find the task: confident, one-shot, binary.", rich_help_panel=STREAM)
    ] = None,
    # the network
    network: Annotated[
        str | None, typer.Option(help="Network, see `exssnet list models`.", rich_help_panel=NETWORK)
    ] = None,
    width: Annotated[float | None, typer.Option(help="Width of the network.", rich_help_panel=NETWORK)] = None,
    head: Annotated[
        str | None,
        typer.Option(
            help="Output layer: shared, task or masked-test; comma-separated for several.",
            show_default="the method's",
            rich_help_panel=NETWORK,
        ),
    ] = None,
    # the method
    density: Annotated[
        float | None, typer.Option(help="Fraction of weights in a mask.", rich_help_panel=METHOD)
    ] = None,
    mask_epochs: Annotated[
        int | None, typer.Option(help="Number of epochs of mask training.", rich_help_panel=METHOD)
    ] = None,
    weight_epochs: Annotated[
        int | None, typer.Option(help="Number of epochs of weight training.", rich_help_panel=METHOD)
    ] = None,
    epochs: Annotated[
        int | None, typer.Option(help="Number of epochs per task, all phases together.", rich_help_panel=METHOD)
    ] = None,
    lr: Annotated[
        float | None, typer.Option(help="Learning rate of masks, or of dense weights.", rich_help_panel=METHOD)
    ] = None,
    weight_lr: Annotated[
        float | None, typer.Option(help="Learning rate of weight training.", rich_help_panel=METHOD)
    ] = None,
    buffer: Annotated[
        float | None,
        typer.Option(
            help="Examples stored by a replay method: a number, or a fraction below 1.", rich_help_panel=METHOD
        ),
    ] = None,
    batch_size: Annotated[int | None, typer.Option(help="Number of images per step.", rich_help_panel=METHOD)] = None,
    optimizer: Annotated[
        str | None, typer.Option(help="Optimizer: adam, adamw or sgd.", rich_help_panel=METHOD)
    ] = None,
    weight_decay: Annotated[
        float | None,
        typer.Option(help="Weight decay.", show_default="the recipe's, or 0; 0.01 with adamw", rich_help_panel=METHOD),
    ] = None,
    schedule: Annotated[
        str | None,
        typer.Option(
            help="Schedule of the learning rate in a phase: cosine, linear, constant or published.",
            rich_help_panel=METHOD,
        ),
    ] = None,
    select: Annotated[
        str | None, typer.Option(help="Epoch to use: last, or best on the --validation part.", rich_help_panel=METHOD)
    ] = None,
    evaluate: Annotated[
        str | None,
        typer.Option(
            help="Tasks to evaluate after each task: all so far, or the new one and all at the end (ends).",
            rich_help_panel=METHOD,
        ),
    ] = None,
    kkt_start: Annotated[
        str | None, typer.Option(help="What the earlier task lends: bits or scores.", rich_help_panel=KKT)
    ] = None,
    kkt_samples: Annotated[
        int | None, typer.Option(help="Number of images in the KKT test.", rich_help_panel=KKT)
    ] = None,
    kkt_neighbours: Annotated[
        int | None, typer.Option(help="Number of neighbours in the KKT test.", rich_help_panel=KKT)
    ] = None,
    more: Annotated[
        list[str] | None,
        typer.Option("--set", help="Another setting of the method, as name=value.", rich_help_panel=METHOD),
    ] = None,
    plugin: Annotated[
        list[Path] | None, typer.Option(help="Python file with your own method.", rich_help_panel=METHOD)
    ] = None,
    # the run
    config: Annotated[Path | None, typer.Option(help="config.yaml of a run to repeat.")] = None,
    device: Annotated[str | None, typer.Option(help="Device: auto, cpu or cuda.")] = None,
    precision: Annotated[str | None, typer.Option(help="Number type: fp32, bf16, or auto (bf16 on a GPU).")] = None,
    compile: Annotated[
        str | None, typer.Option(help="Compilation of the training step: on, off, or auto (on with a GPU).")
    ] = None,
    threads: Annotated[int | None, typer.Option(help="Number of CPU threads; 0 lets PyTorch choose.")] = None,
    together: Annotated[str, typer.Option(help="Number of runs at once on one GPU, or auto.")] = "auto",
    out: Annotated[Path, typer.Option(help="Output folder.")] = Path("runs"),
    checkpoint_seconds: Annotated[float, typer.Option(help="Minimum seconds between checkpoints.")] = 30.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print the records as JSON.")] = False,
) -> None:
    """Run methods on a benchmark. Finished runs are read, interrupted runs are resumed."""
    changes = {name: value for name, value in locals().items() if name not in _NOT_CHANGES}
    from exssnet.cli import progress as terminal_progress
    from exssnet.cli import run_display as terminal
    from exssnet.experiments.run_folder import describe_stopped
    from exssnet.experiments.together import how_many, refuse_early, run_all
    from exssnet.methods import plug_in

    for file in plugin or []:
        plug_in(file)

    plans = (
        repeated(config, [benchmark, stream, method, seeds, kkt, more, *changes.values()])
        if config
        else planned(named(benchmark, stream), method or "exssnet", kkt, seeds or "0", changes | pairs(more or []))
    )
    at_once = how_many(together, plans)
    refuse_early(plans, out)

    records = []
    for batch in [[plan] for plan in plans] if at_once == 1 else [plans]:
        with (
            stoppable(lambda: describe_stopped(plans, out)),
            terminal_progress.of_runs(batch, quiet=as_json) as listeners,
            terminal_progress.of_encoding(quiet=as_json),
        ):
            finished = run_all(batch, out, listeners, checkpoint_seconds, at_once)
        if not as_json:
            with stored(f"the record is in {out / batch[-1].folder}"):
                for plan, record in zip(batch, finished, strict=True):
                    terminal.print_record(record, out / plan.folder)
        records += finished
    with stored(f"all records are in {out}"):
        if as_json:
            print_json(records if len(records) > 1 else records[0], indent=1)
        elif len(records) > 1:
            terminal.print_summary(records)


_NOT_CHANGES = {
    "benchmark",
    "stream",
    "method",
    "kkt",
    "seeds",
    "more",
    "plugin",
    "config",
    "together",
    "out",
    "checkpoint_seconds",
    "as_json",
}


@app.command()
def compare(
    runs: Annotated[
        list[Path] | None, typer.Argument(help="Folders with runs, or records.jsonl.gz files.", show_default="runs")
    ] = None,
    against: Annotated[
        str | None, typer.Option(help="Method, or method@head, to compare the others with.", show_default="exssnet")
    ] = None,
    sort: Annotated[Order, typer.Option(help="Order of the methods.")] = Order.ACCURACY,
    format: Annotated[Format, typer.Option(help="Format of the tables.")] = Format.TEXT,
) -> None:
    """Compare runs: mean ± std over seeds, differences and published numbers, in a table per benchmark."""
    from exssnet.cli.compare_tables import FORMATS
    from exssnet.experiments import compare as comparison

    print(FORMATS[format](comparison.compare(comparison.read(runs or [Path("runs")]), against, sort)))


app.add_typer(cli_model.app)
app.add_typer(cli_cache.app)
