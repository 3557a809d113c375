"""`python -m ftkit.cli.child PARENT WORD ...`: the command as the child of a sweep or a notebook.

However its parent ends, it gets a SIGTERM then: the current step is finished and saved.
"""

import sys

from ftkit.cli.app import main
from ftkit.utils.process import stop_with_parent

if __name__ == "__main__":
    stop_with_parent(int(sys.argv.pop(1)))
    main("child")
