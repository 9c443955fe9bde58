"""One module per format of tool calls, named after the model family that writes it."""
