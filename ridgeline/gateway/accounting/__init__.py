"""The ledger: exactly one row per request; prices; usage reports."""
