"""How it is computed. `reference` is the specification in plain torch; faster twins must agree with it."""
