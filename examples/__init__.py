"""Scenarios of MindSpore's tutorials, each run in an empty folder: python -m examples.NAME FOLDER.

fewer_ranks        8 devices to 4, all ranks at once and rank by rank
complete           a complete checkpoint to slices, and slices to one for a single device
pipeline           a pipeline of 2 stages to a job without one
any_number         16 devices to 4 and to 8; 64 to 56
other_sharding     the same devices, another sharding
by_hand            slices that the user sharded (hybrid parallel)
transform_by_rank  the tutorial's script, rank by rank, with its import changed
data_parallel      a data-parallel job goes on after two conversions (needs MindSpore)
four_ways          a network filled from four ways of training in parallel (needs MindSpore)
training_goes_on   a training goes on after two conversions (needs MindSpore)
"""
