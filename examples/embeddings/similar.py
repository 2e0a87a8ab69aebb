"""`python similar.py JOB JOB …` waits for jobs of type `embed` and says how similar their texts are, −1 to 1."""

import json
import os
import sys
import urllib.request

URL = os.environ.get("GPUORCH_URL", "http://127.0.0.1:8008")


def ended(job_id):
    with urllib.request.urlopen(f"{URL}/jobs/{job_id}?wait=60", timeout=90) as answer:
        job = json.load(answer)
    if job["status"] != "done":
        sys.exit(f"{job_id} is {job['status']}: {job['last_error'] or job['wait_reason']}")
    return job


jobs = [ended(job_id) for job_id in sys.argv[1:]]
for job in jobs:
    vector = job["result"]["vector"]
    print(f"{job['payload']['text']:40} {len(vector)} numbers: {vector[0]:+.4f} {vector[1]:+.4f} {vector[2]:+.4f} …")
for n, one in enumerate(jobs):
    for other in jobs[n + 1 :]:
        likeness = sum(a * b for a, b in zip(one["result"]["vector"], other["result"]["vector"], strict=True))
        print(f"{likeness:+.3f}  {one['job_id']} – {other['job_id']}")
