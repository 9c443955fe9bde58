"""Where ledger rows are kept: write-ahead files, SQLite or PostgreSQL, and reports over them."""
