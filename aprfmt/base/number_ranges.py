"""Numbers of layers, positions or channels as text, in which consecutive numbers are ranges."""

from collections.abc import Iterable


def number_ranges(numbers: Iterable[int], most: int | None = None) -> str:
    """Return numbers as text with ranges, such as `0-2, 5`; of over `most` ranges the first."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    said = [f"{low}" if low == high else f"{low}-{high}" for low, high in runs]
    return ", ".join(said if most is None or len(said) <= most else [*said[:most], "..."])
