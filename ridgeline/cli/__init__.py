"""The command line: one file per verb, `lab` for those of the laboratory; each parses, calls and prints."""
