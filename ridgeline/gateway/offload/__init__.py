"""Processes beside the worker that handle large inputs, so that its event loop stays free."""
