"""A process that books requests until it is killed. Prints the id of each row once `close` has returned.

python -m tests.gateway.accounting.writer_process STATE_DIR FIRST_NUMBER [STORE_URL]
"""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

from ridgeline.gateway.accounting.config import LedgerConfig
from ridgeline.gateway.accounting.ledger import Ledger
from tests.gateway.accounting.books import opening, row


async def main(state_dir: Path, first: int, store_url: str) -> None:
    config = LedgerConfig(flush_ms=5, takeover_s=0.05, segment_bytes=20_000, ask_lost_s=0.1, retry_s=0.1)
    ledger = Ledger(config, state_dir, "w0", store_url=store_url)
    await ledger.start()
    for number in range(first, first + 100_000):
        ledger.open(opening(number))
        if number % 3:  # the others are under way when it dies
            ledger.close(row(number))
            os.write(1, b"%d\n" % number)
        if number % 20 == 0:
            await asyncio.sleep(0.001)


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3] if len(sys.argv) > 3 else ""))
