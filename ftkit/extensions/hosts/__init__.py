"""Runs over several hosts, and ranks that torchrun or SLURM has started."""

MOVED = {
    "ftkit.launch.heartbeats": "heartbeats",
    "ftkit.launch.multihost": "multihost",
    "ftkit.launch.torchrun": "torchrun",
}
