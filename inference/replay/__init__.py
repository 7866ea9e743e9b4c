"""A model's pass made again: with parts replaced, or on the values that another run recorded."""
