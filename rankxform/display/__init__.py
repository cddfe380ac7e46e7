"""What a person is shown on a terminal: texts folded to its width, units, and progress."""
