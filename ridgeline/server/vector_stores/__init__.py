"""/v1/vector_stores: files made searchable, and searched, in OpenAI's shapes."""
