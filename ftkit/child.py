"""`python -m ftkit.child PARENT WORD ...`: the command as the child of a sweep or a notebook.

However its parent ends, it gets a SIGTERM then: the current step is finished and saved.
"""

import signal
import sys

from ftkit.cli import main
from ftkit.process import die_with_parent

if __name__ == "__main__":
    die_with_parent(int(sys.argv.pop(1)), signal.SIGTERM)
    main()
