"""`ridgeline rag`: files into a vector store of a running server, answers from them, and their quality."""
