"""What must hold of a history of leases, and how much can be asked.

The ledger of the cards knows at every moment who uses what: holders under a lease, and strangers. The system knows it
from samples, and grants on samples that are at most `gpu_stale_s` old. So it cannot be asked that holders and strangers
together never exceed the usable memory: a stranger who comes after the sample is physics, which is why workers, and the
clients here, look at the card itself before they start. What can be asked, and is, by `cards.Card.overfull`, whenever
a lease is granted or used:

    memory of the leases that are certainly active  +  settled strangers  ≤  usable memory
    memory that holders use by the ledger           +  settled strangers  ≤  usable memory          (INV-12)

*Settled* are strangers who were on the card `gpu_stale_s` before the last of these leases was asked for: every sample
that could count for that grant has seen them. A lease is *certainly active* from its answer until its holder sends the
release or its time to live is over, counted from when its last renewal was sent, unless one of its cards was lost.
What holders use counts until they free it, however late (F-43): the lease must last as long, or the memory must count
as a stranger's and the card be in quarantine (INV-16).
One exception, where the system says itself that nobody can tell: a lease without a process id hides as much of a
stranger's memory as it has, so strangers count there only beyond that.

A card that is lost has lost all memory that was on it, and leases asked for before it came back are void.
"""

from collections.abc import Callable, Iterable, Iterator

from tests.chaos.leases.history import Beat, History, Outage, Violation


def check(history: History) -> list[Violation]:
    return history.incidents + [found for one in CHECKS for found in one(history)]


def closed_cards_grant_nothing(history: History) -> Iterator[Violation]:
    """From the moment the database knows of a fault until it is mended: not ok, no lease."""
    for outage in history.outages:
        if outage.seen is None:
            yield Violation("INV-15", f"{outage.fault} of {', '.join(outage.uuids)} was never noticed")
            continue
        for grant in history.grants:
            cards = set(grant.uuids) & set(outage.uuids)
            if cards and grant.asked > outage.seen and grant.answered < (outage.mended or float("inf")):
                after_s = grant.asked - outage.seen
                yield Violation("INV-15", f"{grant.name} on {cards} {after_s:.2f} s after its {outage.fault} was known")


def leases_on_lost_cards_are_revoked(history: History) -> Iterator[Violation]:
    """Those from before the loss with the sample that shows it; one granted meanwhile perhaps with the next."""
    for outage in history.outages:
        if outage.fault != "lost" or outage.seen is None:
            continue
        if outage.revoked is None:
            yield Violation("F-39", f"{outage.uuids} were lost and kept their leases")
        for beat in history.beats:
            if beat.status == 410 or not set(beat.grant.uuids) & set(outage.uuids):
                continue
            since = outage.seen if beat.grant.answered < outage.began else outage.revoked
            if since is not None and beat.grant.answered < outage.seen and beat.sent > since:
                late = f"{beat.sent - since:.2f} s after its card was known to be lost"
                yield Violation("F-39", f"{beat.grant.name} was renewed ({beat.status}) {late}")


def leases_that_are_renewed_live(history: History) -> Iterator[Violation]:
    """A lease that its holder keeps ends only because its card was lost, and then its holder is told so."""
    lost = [outage for outage in history.outages if outage.fault == "lost"]
    for beat in history.beats:
        if beat.status == 200 or not beat.in_time:
            continue
        if beat.status != 410:
            yield Violation("INV-14", f"{beat.grant.name} got {beat.status}")
        elif not any(_could_end(beat, outage) for outage in lost):
            yield Violation("INV-17", f"{beat.grant.name} was renewed in time, and ended: {beat.why}")


def _could_end(beat: Beat, outage: Outage) -> bool:
    """Until the answer: on a busy machine a card may be lost, and its leases with it, while a renewal is on its way."""
    begun = outage.began < beat.answered
    over = outage.mended is not None and outage.mended < beat.grant.asked
    told = any(f"{uuid} was lost" in beat.why for uuid in set(beat.grant.uuids) & set(outage.uuids))
    return begun and not over and told


def ended_leases_stay_ended(history: History) -> Iterator[Violation]:
    over: set[str] = set()
    for beat in sorted(history.beats, key=lambda beat: beat.sent):
        if beat.status == 200 and beat.grant.token in over:
            yield Violation("INV-14", f"{beat.grant.name} came back to life")
        if beat.status == 410:
            over.add(beat.grant.token)


def quarantines_have_a_cause(history: History) -> Iterator[Violation]:
    """Memory that was kept, or a card that could not be looked at for as long."""
    for found in history.quarantines:
        kept = any(name in found.reason for name in history.kept)
        unseen = any(
            found.uuid in outage.uuids
            and outage.began < found.seen
            and (outage.mended is None or outage.mended > found.seen - 3.0)
            for outage in history.outages
            if outage.fault != "ecc"
        )
        if not kept and not ("nobody can tell" in found.reason and unseen):
            yield Violation("INV-16", f"{found.uuid} was put into quarantine without a cause: {found.reason}")


CHECKS: tuple[Callable[[History], Iterable[Violation]], ...] = (
    closed_cards_grant_nothing,
    leases_on_lost_cards_are_revoked,
    leases_that_are_renewed_live,
    ended_leases_stay_ended,
    quarantines_have_a_cause,
)
