"""`agreement inspect`: what a model file's header says, before anything is loaded."""

from __future__ import annotations

import click


@click.command("inspect")
@click.argument("model", type=click.Path())
def inspect_command(model: str) -> None:
    """Show experts, sizes, bytes read per token at each number of experts, and whether an override will work.

    Reads the header alone, of all shards of a split model.

    \b
    agreement inspect model-00001-of-00010.gguf
    """
    from rich.console import Console
    from rich.table import Table

    from agreement.memory import memory_limit
    from agreement.model_file import describe, expert_rows, read_model_file, size_text

    header = read_model_file(model)
    console = Console(highlight=False, soft_wrap=True)
    facts = describe(header, memory_limit())
    width = max(len(name) for name, _ in facts)
    for name, value in facts:
        console.print(f"{name:<{width}}  {value}", markup=False)
    for warning in header.warnings:
        console.print(f"warning: {warning}", markup=False)
    rows = expert_rows(header)
    if rows:
        table = Table(box=None, pad_edge=False)
        for title in ("experts", "expert bytes/token", "of all bytes read"):
            table.add_column(title, justify="right")
        for row in rows:
            table.add_row(str(row.n_used), size_text(row.expert_bytes), "" if row.share is None else f"{row.share:.0%}")
        console.print()
        console.print(table)
