"""`make chaos-leases`: leases on cards of the stand-in driver, under strangers and faults.

python -m tests.chaos.leases [--operations 20000] [--clients 64] [--orchestrators 1] [--seed N] [--json] [--folder F]
"""

import argparse
import sys
from collections.abc import Sequence

from tests.chaos.leases.run import Plan, run
from tests.chaos.options import parser_of, performed, seed_of, unwind_on_sigterm
from tests.chaos.showing import show_report


def main() -> int:
    options = options_of(sys.argv[1:])
    unwind_on_sigterm()
    return show_report(performed(run, plan_of(options), options), as_json=options.json)


def plan_of(options: argparse.Namespace) -> Plan:
    return Plan(
        seed=seed_of(options.seed),
        operations=options.operations,
        clients=options.clients,
        orchestrators=options.orchestrators,
    )


def options_of(arguments: Sequence[str]) -> argparse.Namespace:
    parser = parser_of("tests.chaos.leases", __doc__)
    parser.add_argument("--operations", type=int, default=20_000, help="leases, heartbeats and releases to ask for")
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--orchestrators", type=int, default=1)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
