"""A worker without our package: `python http_worker.py http://localhost:8008 shouts` runs jobs of type `shout`."""

import json
import os
import signal
import sys
import threading
import time
import urllib.request

if len(sys.argv) != 3:
    sys.exit("usage: python http_worker.py URL POOL    (such as http://localhost:8008 shouts)")
URL, POOL = sys.argv[1:]
running = {}  # path of a job → what proves that it is ours
ended = {"done": 0, "failed": 0}  # for `gpuorch workers list`


def post(path, body):
    request = urllib.request.Request(URL + path, json.dumps(body).encode(), {"Content-Type": "application/json"})
    return json.load(urllib.request.urlopen(request, timeout=60))


def shout(payload):
    time.sleep(payload.get("seconds", 0))
    return payload["text"].upper()


def beat():
    while True:
        time.sleep(me["heartbeat_s"])
        try:
            post("/workers/heartbeat", who | ended | {"busy": len(running)})
            for path, proof in list(running.items()):
                if post(f"{path}/heartbeat", proof)["cancel_requested"]:
                    print(path, "was cancelled; a worker that can stop its jobs would stop it here", flush=True)
        except OSError as trouble:
            print(trouble, flush=True)
            if getattr(trouble, "code", None) == 410:  # declared lost: others run our jobs, so we must not
                os._exit(1)


def leave(*_signal):
    try:
        post("/workers/deregister", who)  # hands back what we have not finished
    except OSError as trouble:  # nobody there: it finds out by itself that we are gone
        print(trouble, flush=True)
    os._exit(0)


me = post("/workers/register", {"pool_id": POOL, "slots": 1, "types": ["shout"], "version": "example"})
who = {"worker_id": me["worker_id"]}
signal.signal(signal.SIGTERM, leave)
signal.signal(signal.SIGINT, leave)
threading.Thread(target=beat, name="beat", daemon=True).start()
print("ready", flush=True)
while True:
    for job in post("/jobs/claim", who | {"max": 1, "wait_seconds": 20})["jobs"]:
        path, proof = f"/jobs/{job['job_id']}", who | {"attempt": job["attempt"]}
        running[path] = proof
        try:
            end, said = "complete", {"result": shout(job["payload"])}
        except Exception as error:
            end, said = "fail", {"error": repr(error)}
        del running[path]
        try:
            post(f"{path}/{end}", proof | said)
            ended["done" if end == "complete" else "failed"] += 1
        except OSError as refused:  # 409: it is no longer ours
            print(path, refused, flush=True)
