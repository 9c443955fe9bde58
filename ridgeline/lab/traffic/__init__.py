"""Traffic: requests and their times, read from traces or drawn from distributions."""
