"""`exssnet cache`: what is kept of encoded texts, and its removal."""

from __future__ import annotations

import time

import typer

from exssnet.cli.console import print_table, say

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
cache = typer.Typer(
    name="cache",
    help="Show the cache of encoded texts, or clear it.",
    invoke_without_command=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.add_typer(cache)


@cache.callback()
def show(context: typer.Context) -> None:
    """Show the cache of encoded texts, or clear it."""
    if context.invoked_subcommand is not None:
        return
    from exssnet.encoders.states import GB, VARIABLE, state_cache

    states = state_cache()
    kept = states.kept()
    rows = [
        (one.encoder, str(one.width), f"{one.texts:,}", f"{one.size / GB:.2f}", _ago(one.used))
        for one in sorted(kept, key=lambda one: -one.used)
    ]
    if rows:
        print_table(("encoder", ">width", ">texts", ">GB", "last used"), rows)
    total = sum(one.size for one in kept)
    say(f"{total / GB:.2f} GB of at most {states.most_bytes / GB:g} ({VARIABLE}) in {states.folder}")


@cache.command()
def clear() -> None:
    """Delete all encoded texts; they are encoded again when they are needed."""
    from exssnet.encoders.states import GB, state_cache

    states = state_cache()
    say(f"{states.clear() / GB:.2f} GB deleted from {states.folder}")


def _ago(moment: float) -> str:
    seconds = max(time.time() - moment, 0)
    for unit, size in (("days", 86400), ("hours", 3600), ("minutes", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit} ago"
    return "just now"
