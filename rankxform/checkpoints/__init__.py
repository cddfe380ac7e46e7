"""Folder conventions of checkpoints: which file is which, and where a new one belongs.

The table of all of them is `base.FORMS`.
"""
