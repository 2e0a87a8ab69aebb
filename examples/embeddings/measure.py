"""`python measure.py POOL [COUNT]` has COUNT sentences embedded in one go and says how many a second that were.

POOL is also the type of the jobs, as in the README. All figures are the orchestrator's own.
"""

import json
import os
import sys
import urllib.request
import uuid
from datetime import datetime

URL = os.environ.get("GPUORCH_URL", "http://127.0.0.1:8008")
POOL, COUNT = sys.argv[1], int(sys.argv[2]) if sys.argv[2:] else 500
RUN = f"{POOL}-{uuid.uuid4().hex[:8]}"


def ask(path, body=None):
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(URL + path, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=90) as answer:
        return json.load(answer)


def ended(n):
    while not (job := ask(f"/jobs/{RUN}-{n}?wait=60"))["finished_at"]:
        pass
    return job


def time_of(job, moment):
    return datetime.fromisoformat(job[moment])


texts = [f"Sentence number {n} tells of {n % 7} cats and {n % 11} dogs in a garden." for n in range(COUNT)]
wanted = [
    {"job_id": f"{RUN}-{n}", "type": POOL, "pool_id": POOL, "payload": {"text": text}} for n, text in enumerate(texts)
]
ask("/jobs/submit_batch", {"jobs": wanted})
jobs = [ended(n) for n in range(COUNT)]
done = sum(job["status"] == "done" for job in jobs)
seconds = (max(time_of(job, "finished_at") for job in jobs) - time_of(jobs[0], "created_at")).total_seconds()
print(f"{done} of {COUNT} done in {seconds:.2f} s: {done / seconds:.0f} jobs/s")
