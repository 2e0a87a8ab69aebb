"""Types of columns, and what tables are made of."""

from __future__ import annotations

from typing import Any

from sqlalchemy import BigInteger, DateTime, Integer, Text
from sqlalchemy.dialects import mysql

LongText = Text().with_variant(mysql.LONGTEXT(), "mysql", "mariadb")
#: SQLite counts rows only in a column that is exactly INTEGER.
CountingId = BigInteger().with_variant(Integer, "sqlite")
#: Names compare byte by byte: job "A" is not job "a", on either database.
TABLE_OPTIONS: dict[str, Any] = {
    "mysql_engine": "InnoDB",
    "mysql_charset": "utf8mb4",
    "mysql_collate": "utf8mb4_bin",
}
#: Microseconds on MariaDB; SQLite keeps text in the same shape, so both sort and compare.
UtcDateTime = DateTime().with_variant(mysql.DATETIME(fsp=6), "mysql", "mariadb")
