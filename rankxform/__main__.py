"""``python -m rankxform``: see `rankxform.cli`."""

from .process import Signals

signals = Signals()  # before anything else is imported, which takes a while


def run() -> int:
    """Run the command that this process was started with; return its exit code."""
    from rankxform.cli.main import main

    return main(signals=signals)


if __name__ == "__main__":
    import sys

    sys.exit(run())
