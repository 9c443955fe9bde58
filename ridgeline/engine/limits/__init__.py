"""What this machine can do at most, measured: bandwidth, FLOPs, and the step sizes that follow."""
