"""The rows of `validate`: what each reads is the file, damaged or not."""
