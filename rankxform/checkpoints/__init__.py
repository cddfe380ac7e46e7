"""Folder conventions: where a checkpoint's files lie."""
