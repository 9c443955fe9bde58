"""Where chunks live: one protocol, three stores (SQLite, PostgreSQL with pgvector, Qdrant), one suite."""
