"""Plans without a process or a file."""

from rankxform.planning.assign import Writers, assignment_of


def assigned(planner, files, processes):
    """Return who writes the first `files` files, by so many processes of one node."""
    writers = Writers.of_one_folder((0,) * processes, range(files))
    return assignment_of(planner, range(files), writers)
