"""OpenAI's chat and completions endpoints: request structs, answers, log-probabilities, tokenize."""
