"""``python -m rankxform``: see `rankxform.cli`."""

import os
import sys

from rankxform.cli.main import main

if __name__ == "__main__":
    code = main()
    sys.stderr.flush()
    os._exit(code)  # taking the interpreter down in order takes as long as moving 100 MB
