"""Integer geometry of row-major arrays: boxes, grids of boxes, tiles.

Nothing here has heard of MindSpore, files, bytes or MPI.
"""
