"""Triggers: what a template makes of an event, and that it makes nothing else."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.errors import InvalidInput, PayloadTooLarge
from orchestrator.jobs import NewJob
from orchestrator.names import is_name
from orchestrator.policies import Scope, parse
from orchestrator.triggers import MAX_TEMPLATE, Event, check_template, fill, job_body, job_id, lookup

EVENT = {"article": {"id": 7, "title": "Über", "tags": ["a", "b"], "draft": False, "none": None}, "n": 1.5}

scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text()
values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4), max_leaves=20
)
keys = st.text(st.characters(blacklist_characters=".${}", blacklist_categories=["Cs"]), min_size=1, max_size=8)


def plain(value):
    """Has nothing that is to be filled in."""
    return "$" not in json.dumps(value)


def made(template, payload=EVENT, most=10_000):
    return fill(template, payload, most)


def event(payload, event_id="e-1"):
    return Event("1-0", "t", event_id, payload)


# --- filling ---


def test_fields_are_taken_as_they_are_or_as_text():
    template = {
        "whole": {"$field": "article.tags"},
        "one": {"$field": "article.tags.1"},
        "number": {"$field": "n"},
        "nothing": {"$field": "article.none"},
        "text": "${article.title} #${article.id}, draft: ${article.draft}",
        "deep": [{"in": ["${n}"]}],
        "fixed": [1, True, None, "x"],
    }
    assert made(template) == {
        "whole": ["a", "b"],
        "one": "b",
        "number": 1.5,
        "nothing": None,
        "text": "Über #7, draft: false",
        "deep": [{"in": ["1.5"]}],
        "fixed": [1, True, None, "x"],
    }
    assert made({"$field": "."}) == EVENT


@pytest.mark.parametrize("path", ["gone", "article.gone", "article.tags.2", "article.tags.-1", "article.id.x", "n."])
def test_a_missing_field_is_an_error(path):
    with pytest.raises(InvalidInput, match="no such field"):
        made({"$field": path})
    with pytest.raises(InvalidInput, match="no such field"):
        made(f"x ${{{path}}}")


@pytest.mark.parametrize("path", ["article", "article.tags", "article.none"])
def test_what_has_no_text_cannot_stand_in_a_text(path):
    with pytest.raises(InvalidInput, match="within a text"):
        made(f"${{{path}}}")


def test_a_place_can_be_written_as_it_stands():
    assert made("$${n} ${n} $ {n} $n ${") == "${n} 1.5 $ {n} $n ${"


def test_what_comes_from_an_event_is_not_filled_again():
    """An event that holds a place must not reach into itself, and no key is ever a place."""
    tricky = {"a": "${b}", "b": "secret", "c": {"$field": "b"}}
    assert made({"x": "${a}", "y": {"$field": "a"}, "z": {"$field": "c"}, "${b}": 1}, tricky) == {
        "x": "${b}",
        "y": "${b}",
        "z": {"$field": "b"},
        "${b}": 1,
    }


@given(values.filter(plain), st.dictionaries(keys, values))
def test_a_template_without_places_is_what_it_makes(template, payload):
    assert fill(template, payload, 0) == template


@given(st.lists(keys, min_size=1, max_size=4), values)
def test_every_field_can_be_reached(path, value):
    payload = value
    for key in reversed(path):
        payload = {key: payload}
    assert lookup(payload, ".".join(path)) == value
    assert fill({"x": [{"$field": ".".join(path)}]}, payload, 10**9) == {"x": [value]}


@given(st.dictionaries(keys, st.text(), min_size=1), st.text(st.characters(blacklist_characters="$")))
def test_text_is_put_in_literally(payload, around):
    key = next(iter(payload))
    assert fill(f"{around}${{{key}}}{around}", payload, 10**9) == f"{around}{payload[key]}{around}"


@given(st.text(), values)
def test_filling_ends_as_a_value_or_as_invalid_input(template, value):
    try:
        assert isinstance(fill(template, {"a": value}, 1000), str)
    except InvalidInput:
        assert "${" in template


def test_an_event_cannot_blow_a_job_up():
    long = {"x": "y" * 1000}
    assert len(made(["${x}"] * 10, long)) == 10
    for place in ("${x}", {"$field": "x"}, {"$field": "."}):
        with pytest.raises(PayloadTooLarge):
            made([place] * 11, long)


# --- ids ---


@given(st.text(max_size=300), st.text(max_size=300))
def test_the_id_is_a_name_and_always_the_same(trigger, event_id):
    assert is_name(job_id(trigger, event_id))
    assert job_id(trigger, event_id) == job_id(trigger, event_id)


@given(
    st.text("ab:é", max_size=4), st.text("ab:é", max_size=4), st.text("ab:é", max_size=4), st.text("ab:é", max_size=4)
)
def test_two_events_have_two_ids(trigger, event_id, other, other_id):
    assert (job_id(trigger, event_id) == job_id(other, other_id)) == ((trigger, event_id) == (other, other_id))


def test_a_colon_makes_no_two_events_one():
    assert job_id("a", "b:c") != job_id("a:b", "c")


def test_a_plain_id_is_readable():
    assert job_id("ingest", "article-7") == "ingest:article-7"
    assert job_id("ingest", "1700000000000-0") == "ingest:1700000000000-0"
    assert len(job_id("ingest", "x" * 500)) < 128


def test_the_body_of_a_job_can_be_submitted():
    template = {
        "type": "embed",
        "payload": {"text": {"$field": "article.title"}},
        "agent": "${article.id}",
        "priority": 5,
    }
    body = job_body("embed", template, event(EVENT), 1000)
    job = NewJob.prepare(body, 1000, 64)
    assert (job.job_id, job.spec.agent, job.spec.priority) == ("embed:e-1", "7", 5)
    assert json.loads(job.payload) == {"text": "Über"}


# --- entries ---


def test_an_entry_is_read():
    read = Event.parse("5-0", {b"type": b"memory.ingest_article", b"payload": b'{"a": 1}', b"event_id": b"e"}, 100, 8)
    assert read == Event("5-0", "memory.ingest_article", "e", {"a": 1})
    assert Event.parse("5-0", {b"type": b"t"}, 100, 8) == Event("5-0", "t", "5-0", {})


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"type": b""},
        {"type": b"white space"},
        {"type": b"\xff"},
        {"type": b"t", "payload": b"[]"},
        {"type": b"t", "payload": b"{"},
        {"type": b"t", "payload": b"\xff"},
        {"type": b"t", "payload": b'{"a": NaN}'},
        {"type": b"t", "payload": b'{"a": 1, "a": 2}'},
        {"type": b"t", "payload": b"[" * 100_000},
        {"type": b"t", "payload": b'{"a":' * 9 + b"1" + b"}" * 9},
        {"type": b"t", "payload": b'{"a": "' + b"x" * 1000 + b'"}'},
        {"type": b"t", "payload": b'{"a": ' + b"9" * 5000 + b"}"},
    ],
)
def test_an_entry_that_is_no_event_is_named(fields):
    with pytest.raises(InvalidInput):
        Event.parse("5-0", {key.encode(): value for key, value in fields.items()}, 500, 8)


def test_an_id_of_any_bytes_is_an_id():
    read = Event.parse("5-0", {b"type": b"t", b"event_id": b"\xff\xfe"}, 100, 8)
    assert is_name(job_id("t", read.event_id))


# --- templates ---


def template(**fields):
    return {"type": "echo", "payload": {}} | fields


@pytest.mark.parametrize(
    ("job", "field"),
    [
        ({"payload": {}}, "type"),
        ({"type": "echo"}, "payload"),
        (template(type="${a}"), "job.type"),
        (template(type={"$field": "a"}), "job.type"),
        (template(job_id="mine"), "job.job_id"),
        (template(prio=1), "prio"),
        (template(prio="${a}"), "job.prio"),
        (template(priority=1000), "priority"),
        (template(payload=[]), "payload"),
        (template(payload={"$field": "a", "b": 1}), "job.payload"),
        (template(payload={"$field": 1}), "job.payload"),
        (template(payload={"a": {"$field": ""}}), "job.payload"),
        (template(payload={"a": "${a..b}"}), "job.payload"),
        (template(payload={"a": "${" + "x" * 300 + "}"}), "job.payload"),
        (template(payload={"a": float("nan")}), "job"),
        (template(payload={"a": "x" * MAX_TEMPLATE}), "job"),
    ],
)
def test_a_template_that_can_make_no_job_is_refused(job, field):
    with pytest.raises(InvalidInput) as refused:
        check_template(job)
    assert refused.value.field == field


def test_a_template_that_is_too_deep_is_refused():
    deep: dict = {}
    for _ in range(30):
        deep = {"a": deep}
    with pytest.raises(InvalidInput, match="nested"):
        check_template(template(payload=deep))


@pytest.mark.parametrize(
    "job",
    [
        template(),
        template(payload={"$field": "."}),
        template(payload={"a": [{"$field": "items.0"}]}, priority={"$field": "prio"}, tags=["${tag}"]),
        template(agent="${who}", pool_id="big", priority="HIGH", deadline_at={"$field": "until"}),
        template(payload={"price": "$5, $${literally}"}),
    ],
)
def test_a_template_that_can_is_taken(job):
    check_template(job)
    document = parse(Scope.TRIGGER, {"event": "memory.ingest_article", "job": job})
    assert document.model_dump(exclude_unset=True) == {"event": "memory.ingest_article", "job": job}


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"event": "e"},
        {"event": "e e", "job": template()},
        {"event": "e", "job": template(type=5)},
        {"event": "e", "job": []},
    ],
)
def test_a_document_that_is_no_trigger_is_refused(body):
    with pytest.raises(InvalidInput):
        parse(Scope.TRIGGER, body)
