"""The checks of `validate`, which need nothing but the file, damaged or not."""
