"""What every part may use: types between parts, the encoding table, outcomes, text, version."""
