"""The rows of the table of causes, a file for where each is first seen."""
