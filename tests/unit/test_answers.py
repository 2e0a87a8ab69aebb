"""What handlers raise is told, whatever they raise."""

import pytest

from worker import Permanent, Skip, answers


class Mute(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")


class MuteSkip(Mute, Skip):
    pass


class MutePermanent(Mute, Permanent):
    pass


@pytest.mark.parametrize(
    ("error", "outcome"), [(Mute(), "failed"), (MuteSkip("x"), "skipped"), (MutePermanent("x"), "failed")]
)
def test_an_error_that_cannot_tell_what_it_is_ends_its_job_only(error, outcome):
    def call() -> None:
        raise error

    (alone, _) = answers.of_job(call, 100)
    assert alone["outcome"] == outcome and alone["error"]
    assert "could not be had: RuntimeError" in answers.said(error)
    together = answers.of_batch(call, 2, 100)
    assert [ending["outcome"] for ending, _ in together] == ["handed_back"] * 2
