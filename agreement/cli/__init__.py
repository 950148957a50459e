"""The command line: a command parses, calls one library function, renders, and sets the exit code.

Heavy modules are imported inside the commands, so that `agreement --help` answers at once.
"""

from __future__ import annotations

import click

from agreement.cli.group import AgreementGroup
from agreement.cli.version import print_version

_COMMANDS = {
    "breakdown": ("agreement.cli.breakdown", "breakdown_command"),
    "compare": ("agreement.cli.passes", "compare_command"),
    "corpus": ("agreement.cli.corpus", "corpus_group"),
    "demo": ("agreement.cli.demo", "demo_command"),
    "gate": ("agreement.cli.gate", "gate_command"),
    "kld": ("agreement.cli.kld", "kld_group"),
    "inspect": ("agreement.cli.inspect", "inspect_command"),
    "record": ("agreement.cli.passes", "record_command"),
    "sweep": ("agreement.cli.passes", "sweep_command"),
    "table": ("agreement.cli.results", "table_command"),
}


@click.group(cls=AgreementGroup, lazy=_COMMANDS, context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--version",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=print_version,
    help="Show the version and the engine's build, and exit.",
)
def main() -> None:
    """How often does a Mixture-of-Experts model's output change when it runs with fewer experts, and how sure are we?

    \b
    agreement inspect MODEL.gguf
    agreement sweep MODEL.gguf CORPUS --experts 7,6,4,2 -o runs/NAME
    agreement table runs/NAME
    agreement gate runs/NAME --require "experts=7 agreement>=90%"

    Exit codes: 0 done or passed, 1 error, 2 usage, 3 gate failed, 4 gate inconclusive.
    """
