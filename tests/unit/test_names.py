"""What may be called what, and how names stand in paths."""

from collections import defaultdict

import pytest
from pydantic import TypeAdapter, ValidationError

from orchestrator.api.app import NOUNS
from orchestrator.client.paths import job_path, pool_path
from orchestrator.errors import InvalidInput
from orchestrator.names import NO_JOBS, Name, NewJobId, NewName, TypeName, is_dots


def hidden_words() -> dict[str, set[str]]:
    """Of every path that ends in a name: what stands in its place for the same method."""
    last = defaultdict[tuple[str, str], set[str]](set)
    for route in (route for module in NOUNS for route in module.router.routes):
        folder, _, word = route.path.rpartition("/")
        for method in route.methods:
            last[folder, method].add(word)
    named = {key: words for key, words in last.items() if any("{" in word for word in words)}
    hidden = defaultdict[str, set[str]](set)
    for (folder, _), words in named.items():
        hidden[folder] |= {word for word in words if "{" not in word}
    return {folder: words for folder, words in hidden.items() if words}


def test_no_id_is_taken_that_a_route_would_hide() -> None:
    assert hidden_words() == {"/jobs": set(NO_JOBS)}


@pytest.mark.parametrize("kind", [NewName, NewJobId, TypeName])
def test_a_new_name_is_not_of_dots_alone(kind) -> None:
    taken = TypeAdapter(kind)
    for name in ("a", "a.", ".a", "..a..", "-", "_", ":", "1.2"):
        assert taken.validate_python(name) == name
    for wrong in (".", "..", "...", "", "a b", "a\n", "é", "x" * 129):
        with pytest.raises(ValidationError):
            taken.validate_python(wrong)
    assert TypeAdapter(Name).validate_python("..") == "..", "rows from before can be asked for"


def test_what_is_dots() -> None:
    assert [is_dots(text) for text in (".", "..", "...", "", "a.", "/")] == [True, True, True, False, False, False]


def test_a_path_leads_to_what_it_names() -> None:
    assert job_path("a.b", "result") == "/jobs/a.b/result"
    assert job_path("..") == "/jobs/%2E%2E" and pool_path(".") == "/workers/pool/%2E"
    for word in NO_JOBS:
        assert job_path(word, "result") == f"/jobs/{word}/result"
        with pytest.raises(InvalidInput, match=f"no job has the id '{word}'"):
            job_path(word)
