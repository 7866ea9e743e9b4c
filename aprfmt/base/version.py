"""The version of the package: here and nowhere else."""

__version__ = "0.2.0"
