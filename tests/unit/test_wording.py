"""What is wrong with a value is told in our words, whoever validated it."""

from collections.abc import Iterator
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

import orchestrator.api.app  # noqa: F401 - all models of requests
from orchestrator.jobs import JobSpec
from orchestrator.pools import PoolSpec
from orchestrator.settings import Settings
from orchestrator.wording import first_wrong, in_our_words

#: For one or another field each of these is wrong, in all ways that there are.
WRONG: list[Any] = [
    None,
    True,
    -(10**30),
    -1,
    0,
    1.5,
    10**30,
    float("nan"),
    "",
    "no name",
    "\ud800",
    "2030-01-31",
    "2030-01-31T12:00:00",
    "2030-13-31T12:00:00Z",
    "x" * 100_000,
    [],
    [None],
    ["a"] * 100_000,
    {},
    {"a": None},
]


def models(above: type[BaseModel] = BaseModel) -> Iterator[type[BaseModel]]:
    for model in above.__subclasses__():
        if model.__module__.startswith("orchestrator."):
            yield model
        yield from models(model)


OURS = sorted(set(models()), key=lambda model: (model.__module__, model.__name__))


def errors(model: type[BaseModel], body: object) -> list[Any]:
    try:
        model.model_validate(body)
    except ValidationError as wrong:
        return list(wrong.errors(include_url=False, include_input=False))
    return []


@pytest.mark.parametrize("model", OURS, ids=lambda model: model.__name__)
def test_no_model_answers_in_the_words_of_its_library(model):
    bodies = [*WRONG, *({name: value} for name in [*model.model_fields, "unheard-of"] for value in WRONG)]
    found = [error for body in bodies for error in errors(model, body)]
    assert found
    theirs = {(error["type"], error["msg"]) for error in found if in_our_words(error) == error["msg"]}
    assert not theirs


def test_there_are_models_to_check():
    assert len(OURS) > 20 and {JobSpec, Settings} <= set(OURS)


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("gpu_count", 65, "must be at most 64"),
        ("max_runtime_sec", 0, "must be more than 0"),
        ("cost_units", "1", "must be a number"),
        ("payload", [], "must be an object"),
        ("tags", ["x"] * 33, "must have at most 32 entries"),
        ("job_id", "a b", "must be made of A-Z a-z 0-9 . _ : -"),
        ("concurrency_keys", ["pool:a"], "'pool:a': every job has the keys of"),
        ("deadline_at", "2030-01-31T12:00:00", "must be an ISO 8601 time with a zone, such as 2030-01-31T12:00:00Z"),
        ("constraints", {"loud": True}, "must be 'quiet'"),
    ],
)
def test_it_says_what_is_allowed(field, value, words):
    [wrong] = [one for one in errors(JobSpec, {"type": "a", "payload": {}, field: value}) if one["loc"][0] == field]
    assert in_our_words(wrong).startswith(words)


@pytest.mark.parametrize(
    ("model", "body", "path", "words"),
    [
        (JobSpec, {"type": "a", "payload": {}, "tags": ["x", ""]}, "tags.1", "must have at least 1 characters"),
        (PoolSpec, {"pool_id": "p", "min_workers": 2, "desired_workers": 1}, "", "min_workers (2) must not exceed"),
    ],
)
def test_the_first_that_is_wrong_is_named_by_its_path_unless_it_is_the_whole(model, body, path, words):
    with pytest.raises(ValidationError) as refused:
        model.model_validate(body)
    found, told = first_wrong(refused.value)
    assert found == path and told.startswith(words)
