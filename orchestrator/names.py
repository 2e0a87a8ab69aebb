"""What jobs, types, agents, pools and nodes may be called: one alphabet that is safe in keys, paths and logs."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import Field

PATTERN = r"^[A-Za-z0-9._:\-]+$"
#: Characters of the longest name; columns are as wide.
MAX_NAME = 128

Name = Annotated[str, Field(pattern=PATTERN, max_length=MAX_NAME)]
TypeName = Annotated[str, Field(pattern=PATTERN, max_length=64)]

#: Several jobs may share a key; a slash lets it name a path or a repository.
KEY_PATTERN = r"^[A-Za-z0-9._:/\-]+$"
Key = Annotated[str, Field(pattern=KEY_PATTERN, max_length=200)]

#: What the patterns allow, for people.
ALPHABETS = {PATTERN: "A-Z a-z 0-9 . _ : -", KEY_PATTERN: "A-Z a-z 0-9 . _ : / -"}
#: Kinds of keys that every job has by itself; a job cannot bring its own.
OWN_KINDS = frozenset({"global", "pool", "agent", "type", "model"})

# To Python's `re`, unlike pydantic's, `$` also matches before a newline; a full match needs no anchors.
_UNANCHORED = re.compile(PATTERN.strip("^$"))


def is_name(text: str) -> bool:
    return len(text) <= MAX_NAME and _UNANCHORED.fullmatch(text) is not None
