"""From a decoded body to an answer: prompt, tools, grammar, the running request, its choices, SSE."""
