"""Chaos: a real cluster under load and faults, a record of what happened, and a checker of every invariant.

kinds, handlers     what is submitted, and what the jobs do; each start and end goes to a ledger of their own
load                submits, and remembers every job that was accepted
sites               orchestrators and workers as processes, each behind its own wires; the dead are started again
faults              the table of what may go wrong, each with its number in the list of faults
storm               draws faults from a seed, two at a time
watching            looks at leases and epochs while all this happens
history, checker    what happened, and what of it must not have
recovery, flushall  the two figures: from SIGKILL to the second start, and the delay of a flush
broken              builds with a guard removed, which the checker must catch
"""
