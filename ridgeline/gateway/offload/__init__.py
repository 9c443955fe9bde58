"""Work on large inputs in processes beside the worker, so that its event loop stays free."""
