"""The production trace: 26,823 requests for images over 23 days, of 87 models (alibaba/clusterdata, 2026, GenAI).

It is no part of the project: it is read from `../shared/data` beside the project, where it may be absent.
"""

import csv
from collections import defaultdict
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

from tests.sim.trace import FOLDER

FILE = "genai_requests.csv"
HOUR_S = 3600.0


class Request(NamedTuple):
    at_s: float
    model: str
    run_s: float


def absent(folder: Path = FOLDER) -> str | None:
    """Why there is nothing to read."""
    where = "../shared/data beside the project" if folder == FOLDER else folder
    return None if (folder / FILE).is_file() else f"no {FILE} in {where}"


def requests(folder: Path = FOLDER) -> list[Request]:
    """In order of arrival, without the 30 that never ran."""
    with (folder / FILE).open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if float(row["exec_time_seconds"])]
    begin = datetime.fromisoformat(rows[0]["gmt_create"])
    return [
        Request(
            (datetime.fromisoformat(row["gmt_create"]) - begin).total_seconds(),
            row["checkpoint_model_version_id"],
            float(row["exec_time_seconds"]),
        )
        for row in rows
    ]


def compressed(some: list[Request], factor: float) -> list[Request]:
    return [one._replace(at_s=one.at_s / factor) for one in some]


def levelled(some: list[Request]) -> list[Request]:
    """Each hour takes as long as its work: the rush within an hour stays, nights and busy days do not."""
    hours: defaultdict[int, list[Request]] = defaultdict(list)
    for one in some:
        hours[int(one.at_s // HOUR_S)].append(one)
    begin_s, level = 0.0, []
    for hour in sorted(hours):
        work_s = sum(one.run_s for one in hours[hour])
        level += [one._replace(at_s=begin_s + (one.at_s / HOUR_S - hour) * work_s) for one in hours[hour]]
        begin_s += work_s
    return level
