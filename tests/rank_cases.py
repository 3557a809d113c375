"""Runs several jobs one after the other in the ranks of one process group.

Imports and connecting cost more than the tiny runs themselves. Started by test_strategies.py with
torchrun's environment variables: `python rank_cases.py JOB.json ...`.
"""

import sys

from ftkit.process import die_with_parent

if __name__ == "__main__":
    die_with_parent()
    from ftkit.train import main

    for job in sys.argv[1:]:
        if main(["ftkit.train", job]):
            sys.exit(f"{job} failed")
