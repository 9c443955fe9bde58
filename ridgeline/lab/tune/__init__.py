"""tune: a ledger of trials, each one change away from its parent."""
