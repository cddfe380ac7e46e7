"""Checkpoints opened for reading: which files, what they hold, who can read them, what is wrong."""
