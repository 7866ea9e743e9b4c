"""The gates of `qa`: what each works on is a whole model, and mostly a session that runs it."""
