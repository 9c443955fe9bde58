"""Tool calls and reasoning in a model's text: one parser per format, whole and streamed alike."""
