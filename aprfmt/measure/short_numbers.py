"""Numbers of few digits near a measured one, which a user may have written."""

DIGITS = (1, 2, 3, 4, 5, 6)


def short_numbers(value: float) -> list[float]:
    """Return a number rounded to 1, 2, ... 6 significant digits, then the number itself."""
    return list(dict.fromkeys([*(float(f"{value:.{digits}g}") for digits in DIGITS), value]))


def short_number(value: float, near: float) -> float:
    """Return the number of fewest digits within the relative distance `near` of a value.

    The value itself if no shorter number is.
    """
    return next((one for one in short_numbers(value) if abs(one / value - 1) <= near), value)
