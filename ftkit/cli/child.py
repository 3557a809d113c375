"""`python -m ftkit.cli.child PARENT WORD ...`: a command started by a sweep or a notebook.

It gets a SIGTERM when its parent ends, however that ends, and then finishes the current step and
saves.
"""

import sys

from ftkit.cli.app import main
from ftkit.utils.process import stop_with_parent

if __name__ == "__main__":
    stop_with_parent(int(sys.argv.pop(1)))
    main("child")
