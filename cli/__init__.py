"""The command line: `main` has the table, every other file one command."""
