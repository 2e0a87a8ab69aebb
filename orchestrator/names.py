"""What jobs, types, agents, pools and nodes may be called: one alphabet that is safe in keys, paths and logs.

What is given a name gets a `NewName`: of dots alone a path would lead elsewhere. What is looked up by its name is a
`Name`: there may be rows from before.
"""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import AfterValidator, Field

PATTERN = r"^[A-Za-z0-9._:\-]+$"
#: The same, with something else than dots in it. Patterns of pydantic cannot look ahead.
NEW_PATTERN = r"^[A-Za-z0-9._:\-]*[A-Za-z0-9_:\-][A-Za-z0-9._:\-]*$"
#: Characters of the longest name; columns are as wide.
MAX_NAME = 128

Name = Annotated[str, Field(pattern=PATTERN, max_length=MAX_NAME)]
NewName = Annotated[str, Field(pattern=NEW_PATTERN, max_length=MAX_NAME)]
TypeName = Annotated[str, Field(pattern=NEW_PATTERN, max_length=64)]

#: What `GET /jobs/…` answers itself: a job of that name could not be read. A test compares it with the routes.
NO_JOBS = frozenset({"dispatchable", "stats"})


def _no_route(job_id: str) -> str:
    if job_id in NO_JOBS:
        raise ValueError(f"cannot be {job_id!r}: GET /jobs/{job_id} is something else")
    return job_id


NewJobId = Annotated[NewName, AfterValidator(_no_route)]

#: Several jobs may share a key; a slash lets it name a path or a repository.
KEY_PATTERN = r"^[A-Za-z0-9._:/\-]+$"
Key = Annotated[str, Field(pattern=KEY_PATTERN, max_length=200)]

#: What the patterns allow, for people.
ALPHABETS = {
    PATTERN: "A-Z a-z 0-9 . _ : -",
    NEW_PATTERN: "A-Z a-z 0-9 . _ : -, and not of dots alone",
    KEY_PATTERN: "A-Z a-z 0-9 . _ : / -",
}
#: Kinds of keys that every job has by itself; a job cannot bring its own.
OWN_KINDS = frozenset({"global", "pool", "agent", "type", "model"})

# To Python's `re`, unlike pydantic's, `$` also matches before a newline; a full match needs no anchors.
_UNANCHORED = re.compile(PATTERN.strip("^$"))


def is_dots(text: str) -> bool:
    """In a path such a text means where one is, or the way up."""
    return bool(text) and not text.strip(".")


def is_name(text: str) -> bool:
    return len(text) <= MAX_NAME and _UNANCHORED.fullmatch(text) is not None
