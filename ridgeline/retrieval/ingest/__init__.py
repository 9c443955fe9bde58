"""Files to searchable chunks: the catalog of vector stores and files, and the journalled jobs over it."""
