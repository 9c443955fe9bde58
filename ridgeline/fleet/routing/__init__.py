"""Which replica answers a request. Pure logic: no I/O, no clock of its own."""
