"""SQLite and PostgreSQL behind one face: transactions, bulk inserts, and one scheme of migrations."""
