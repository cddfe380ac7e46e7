"""``python -m rankxform``: see `rankxform.cli`."""

import sys

from rankxform.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
