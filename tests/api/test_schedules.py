"""/schedules over HTTP, and that the leader behind it fires them."""

from orchestrator.store import schema
from tests.factories import rows
from tests.waiting import wait_until

JOB = {"type": "echo", "payload": {"n": 1}}


def put(api, name, **fields):
    return api.http.put(f"/schedules/{name}", json={"job": JOB} | fields)


def test_a_schedule_is_made_changed_listed_and_deleted(api):
    made = put(api, "nightly", cron="0 3 * * *", timezone="Europe/Berlin")
    assert (made.status_code, made.json()["job"], made.json()["last_error"]) == (201, JOB, None)
    assert made.json()["next_fire_at"].endswith("Z")
    assert put(api, "nightly", cron="0 3 * * *", timezone="Europe/Berlin").status_code == 200
    assert put(api, "nightly", every_seconds=3600, enabled=False).json()["next_fire_at"] is None
    put(api, "other", every_seconds=3600)
    first = api.get("/schedules", params={"limit": 1}).json()
    assert [one["schedule_id"] for one in first["schedules"]] == ["nightly"]
    rest = api.get("/schedules", params={"cursor": first["next_cursor"]}).json()
    assert ([one["schedule_id"] for one in rest["schedules"]], rest["next_cursor"]) == (["other"], None)
    assert api.http.delete("/schedules/nightly").json() == {"schedule_id": "nightly", "deleted": True}
    for answer in (
        api.get("/schedules/nightly"),
        api.http.delete("/schedules/nightly"),
        api.post("/schedules/nightly/fire"),
        api.get("/schedules/no%20name"),
    ):
        assert (answer.status_code, answer.json()["code"]) == (404, "schedule_not_found")


def test_the_leader_fires_and_an_operator_may(api):
    put(api, "often", every_seconds=1)
    wait_until(lambda: len(rows(api.db, schema.jobs)) >= 2, what="it fires again and again")
    api.http.delete("/schedules/often")
    put(api, "rare", every_seconds=86_400, enabled=False)
    fired = api.post("/schedules/rare/fire")
    assert fired.status_code == 202
    job = api.get(f"/jobs/{fired.json()['job_id']}").json()
    assert (job["type"], job["payload"]) == ("echo", {"n": 1})
    assert api.post("/schedules/rare/fire").json()["job_id"] != fired.json()["job_id"]


def test_what_is_no_schedule_is_refused_and_nothing_is_written(maria_api):
    with maria_api.adding_no_row():
        for name, body, field in (
            ("s", {}, "job"),
            ("s", {"job": JOB}, "body"),
            ("s", {"job": JOB, "every_seconds": 0.5}, "every_seconds"),
            ("s", {"job": JOB, "cron": "nonsense"}, "cron"),
            ("s", {"job": {"type": "echo"}, "every_seconds": 5}, "payload"),
            ("s", {"job": JOB | {"prio": 1}, "every_seconds": 5}, "prio"),
            ("s" * 91, {"job": JOB, "every_seconds": 5}, "schedule_id"),
        ):
            answer = maria_api.http.put(f"/schedules/{name}", json=body)
            assert (answer.status_code, answer.json()["code"], answer.json()["field"]) == (422, "invalid_input", field)
