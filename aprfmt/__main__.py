"""`python -m aprfmt` is the command line."""

from aprfmt.cli.main import main

main()
