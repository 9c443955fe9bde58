"""What runs in the next step: requests, queue, admission, scheduler. Pure logic: no tensors, no I/O."""
