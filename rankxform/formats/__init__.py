"""Bytes to values and back: strategy files, and the containers of checkpoints.

Readers find things in bytes that they are handed; they open nothing and import no MindSpore. The
table of all containers is `container.CONTAINERS`.
"""
