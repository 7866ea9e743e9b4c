"""A model's pass made again: with replaced weights or operations, or on another run's values."""
