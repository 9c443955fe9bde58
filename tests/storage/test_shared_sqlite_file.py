"""A SQLite file that several connections of one process and other processes use at once."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from ridgeline.storage.database import statement
from ridgeline.storage.sqlite import SqliteDatabase

ANOTHER = """
import sqlite3, sys
connection = sqlite3.connect(sys.argv[1])
print(connection.execute("SELECT COUNT(*) FROM t").fetchone()[0])
connection.close()
"""


def counted_by_another_process(path: Path) -> int:
    done = subprocess.run([sys.executable, "-c", ANOTHER, str(path)], capture_output=True, check=True)
    return int(done.stdout)


async def test_commits_are_kept_after_another_process_has_closed_the_file(tmp_path: Path) -> None:
    """With the locks of the first connection gone, the other process would remove the log in use."""
    path = tmp_path / "one.db"
    database = SqliteDatabase(path, 60.0)
    await database.migrate("t", [["CREATE TABLE t (n BIGINT)"]])
    await database.write(statement("INSERT INTO t VALUES (1)"))
    await database.ask("SELECT 1")  # the second connection of this process
    assert counted_by_another_process(path) == 1
    for number in (2, 3):
        await database.write(statement("INSERT INTO t VALUES (?)", number))
    assert counted_by_another_process(path) == 3
    await database.close()
    assert path.stat().st_mode & 0o777 == 0o600
