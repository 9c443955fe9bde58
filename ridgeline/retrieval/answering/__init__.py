"""From found chunks to an answer: passages that fit a prompt, the prompt's layout, and citations."""
