"""BM25: how texts become terms, and how chunks are scored by them. The same for every store."""
