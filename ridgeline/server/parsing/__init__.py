"""Tool calls and reasoning in a model's text: parsers, the grammars that enforce them, prepared messages."""
