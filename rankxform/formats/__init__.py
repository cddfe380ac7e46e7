"""Bytes to values and back: strategy files, checkpoint headers. No file is opened here.

Readers take bytes, or ``read_at(offset, nbytes)``; they raise FormatError, which the caller
turns into a message with the file's name.
"""
