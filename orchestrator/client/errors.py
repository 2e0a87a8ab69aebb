"""What can go wrong between a client and a server, as one tree.

OrchestratorError
├── Unavailable
│   └── ServerUnreachable  server_unreachable   no answer: wrong address, or nothing runs there
├── Refused                the server's code    the server answered, and the answer is no
├── JobsRefused            jobs_refused         of many jobs some were not let in; the others were
├── NotEnded               not_ended            what was waited for has not ended in the time given; a TimeoutError too
└── LeaseDenied            lease_denied         no GPU has room, for as long as the caller would wait
BaseException
└── LeaseLost              lease_lost           stop using the GPU now: it may be given to others
"""

from __future__ import annotations

from collections.abc import Sequence

import httpx

from orchestrator.client.answers import Submitted
from orchestrator.errors import OrchestratorError, Unavailable
from orchestrator.settings import safe_url


class ServerUnreachable(Unavailable):
    code = "server_unreachable"

    def __init__(self, url: str, cause: object, *, sent: bool = True) -> None:
        """`sent`: the request may have arrived, only its answer did not."""
        self.sent = sent
        super().__init__(
            f"cannot reach {safe_url(url)} ({cause}); is it running? Start one with `gpuorch dev` or"
            " `gpuorch serve`, or name another with --url or GPUORCH_URL"
        )


class Refused(OrchestratorError):
    """The server answered, and the answer is no."""

    def __init__(self, response: httpx.Response) -> None:
        try:
            problem = response.json()
            self.detail, self.code = str(problem["detail"]), str(problem["code"])
            exact = problem.get("retry_after")
        except (ValueError, KeyError, TypeError):
            self.detail, self.code = f"{response.reason_phrase} (is this a gpuorch server?)", "http_error"
            exact = None
        self.status = response.status_code
        known = isinstance(exact, int | float)
        self.retry_after_s = float(exact) if known else _seconds(response.headers.get("Retry-After"))
        super().__init__(f"{response.status_code} {self.code}: {self.detail}")

    @property
    def says_nothing_of_it(self) -> bool:
        """Whether nobody knows what became of the request: what stands before the server gave up, or it cannot be read.

        A 500 is the server's own word: it broke on this request, and would again.
        """
        return self.status in {502, 503, 504} or self.status < 400


class JobsRefused(OrchestratorError):
    """`answers` has the server's answer to each job, in order: those with an `error` are not stored."""

    code = "jobs_refused"

    def __init__(self, answers: Sequence[Submitted]) -> None:
        refused = [answer["error"] for answer in answers if "error" in answer]
        first = f"{refused[0].get('code')}: {refused[0].get('detail')}"
        super().__init__(f"{len(refused)} of {len(answers)} jobs were refused; the first with {first}")
        self.answers = list(answers)


class NotEnded(OrchestratorError, TimeoutError):
    """`waiting` are those that go on: jobs, or a workflow. `why` is what keeps one, unless that passes by itself."""

    code = "not_ended"

    def __init__(self, waiting: Sequence[str], count: int, timeout_s: float, why: str | None = None) -> None:
        which = f"{waiting[0]!r} has" if count == 1 else f"{len(waiting)} of {count} have"
        reason = f": {why}" if why else ""
        super().__init__(f"{which} not ended within {timeout_s:g} s{reason}; wait again, or cancel")
        self.waiting, self.why = list(waiting), why


class LeaseDenied(OrchestratorError):
    """`reason` is the server's, with its numbers."""

    code = "lease_denied"

    def __init__(self, reason: str, waited_s: float, *, lasts: bool = False) -> None:
        """`lasts`: waiting does not help, and the reason says what does."""
        advice = "" if lasts else ". Wait longer, ask for less, or allow the CPU as a fallback"
        super().__init__(f"no GPU lease after {waited_s:.0f} s: {reason}{advice}")
        self.reason = reason


class LeaseLost(BaseException):
    """The lease is over while its holder still works: others may be given the memory from now on.

    No Exception: it comes from outside, in the middle of anything, and an `except Exception` that retries a step must
    not swallow it.
    """

    code = "lease_lost"

    def __init__(self, reason: str) -> None:
        super().__init__(f"the GPU lease is lost: {reason}; stop using the GPU and ask for a new lease")
        self.reason = reason


def _seconds(text: str | None) -> float | None:
    """Retry-After as we send it; a proxy's date is as good as nothing."""
    return float(text) if text is not None and text.isdigit() else None
