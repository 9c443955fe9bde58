"""How much may be asked: rates, tokens, concurrency, money; and who goes first when all cannot."""
