"""Messages and stubs of `inference.proto`, written by `make proto`."""
