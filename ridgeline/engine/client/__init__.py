"""Code that runs in the caller's process: AsyncClient, LLM, launch, inbox, token text."""
