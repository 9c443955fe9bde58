"""The ledger: a row for every request, none lost, none twice; prices; usage reports."""
