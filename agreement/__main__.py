"""`python -m agreement`: the same as the `agreement` command."""

from agreement.cli import main

main(prog_name="agreement")
