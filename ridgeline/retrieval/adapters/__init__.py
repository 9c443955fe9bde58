"""Vector stores of a server or gateway as those of LangChain and LlamaIndex. Each needs its own package."""
