"""/policies/triggers over HTTP, and that events meet them."""

from redis import Redis as Client

from orchestrator.store import schema
from tests.factories import rows
from tests.waiting import wait_until

TRIGGER = {"event": "article", "job": {"type": "embed", "payload": {"text": {"$field": "title"}}}}


def test_a_trigger_is_set_and_events_set_it_off(api):
    made = api.http.put("/policies/triggers/embed", json=TRIGGER)
    assert (made.status_code, made.json()["document"], made.json()["version"]) == (200, TRIGGER, 1)
    assert api.get("/policies/triggers/embed").json()["document"] == TRIGGER
    listed = api.get("/policies/triggers", params={"limit": 1}).json()
    assert ([one["name"] for one in listed["policies"]], listed["next_cursor"]) == (["embed"], "embed")
    with Client.from_url(api.orchestrator.settings.redis_url) as client:
        fields = {"type": "article", "payload": '{"title": "t"}', "event_id": "7"}
        client.xadd("stream:orchestrator:ingest_events", fields)
    wait_until(lambda: [job.job_id for job in rows(api.db, schema.jobs)] == ["embed:7"], what="the event is a job")
    assert api.http.delete("/policies/triggers/embed").status_code == 200
    gone, wrong = api.get("/policies/triggers/embed"), api.http.delete("/policies/triggers/no%20name")
    assert (gone.status_code, gone.json()["code"]) == (404, "policy_not_found")
    assert (wrong.status_code, wrong.json()["code"]) == (422, "invalid_input")
    assert api.post("/policies/triggers/embed/rollback", {"version": 1}).json()["document"] == TRIGGER


def test_what_is_no_trigger_is_refused(maria_api):
    with maria_api.adding_no_row():
        for body in ({}, TRIGGER | {"job": {"type": "${a}", "payload": {}}}, TRIGGER | {"code": "import os"}):
            answer = maria_api.http.put("/policies/triggers/t", json=body)
            assert (answer.status_code, answer.json()["code"]) == (422, "invalid_input")
