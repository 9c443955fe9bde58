"""What all verbs share about flags: aliases from other tools, suggestions, shell completion."""
