"""Speed, measured against a peer or a limit of the machine in the same run; never asserted."""
