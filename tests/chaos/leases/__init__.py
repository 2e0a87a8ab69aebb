"""Leases under stress: clients take, use and leave memory of cards that strangers fill and that fail.

cards       the stand-in driver's cards and who uses how much of them: the ledger that is believed
clients     threads that lease, allocate, renew, free and release, in order or not
weather     strangers that take memory, cards that fail, an operator who clears quarantines
history     what happened, by the clock of this process
checker     what must hold of it, and why nothing more can be asked
run         one run from the first server to the verdict
"""
