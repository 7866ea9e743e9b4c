"""Running a model with named capture points."""
