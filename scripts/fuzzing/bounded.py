"""Runs one `ftkit` command under limits and writes its resource usage to a file.

Usage: bounded.py USAGE.json ARGUMENT ... The CPU limit kills whatever does not end; the limit on
data only protects the machine: the memory that was really used is judged.
"""

import json
import resource
import sys
from pathlib import Path

CPU_LIMIT_S = 20
_DATA_LIMIT_BYTES = 8 * 2**30


def main() -> None:
    """Run the command, and write its usage when it ends."""
    usage_file = Path(sys.argv[1])
    sys.argv[:] = ["ftkit", *sys.argv[2:]]
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_LIMIT_S, CPU_LIMIT_S + 5))
    resource.setrlimit(resource.RLIMIT_DATA, (_DATA_LIMIT_BYTES, _DATA_LIMIT_BYTES))
    from ftkit.cli.app import main as command

    try:
        command()
    finally:
        used = [resource.getrusage(w) for w in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
        values = {
            "cpu_s": sum(u.ru_utime + u.ru_stime for u in used),
            # Linux counts it in KiB.
            "peak_bytes": max(u.ru_maxrss for u in used) * 1024,
        }
        usage_file.write_text(json.dumps(values))


if __name__ == "__main__":
    main()
