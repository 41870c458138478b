"""What holds a run back: a measured window, a verdict with its evidence, and the override that should help."""
