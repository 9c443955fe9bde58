"""From a decoded body to an answer: prompt, tools, grammar, job, the running request, its pieces."""
