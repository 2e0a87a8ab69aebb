"""`make chaos-pools`: pools are changed at random while processes and nodes die; in every calm they must converge.

python -m tests.chaos.pools [--seed N] [--minutes 5] [--pools 20] [--nodes 3] [--break NAME] [--json] [--folder F]
"""

import argparse
import sys
from collections.abc import Sequence

from tests.chaos.options import chosen, parser_of, performed, seed_of, unwind_on_sigterm
from tests.chaos.pools.actions import ACTIONS
from tests.chaos.pools.run import Plan, run
from tests.chaos.showing import show_jobs_report


def main() -> int:
    options = options_of(sys.argv[1:])
    unwind_on_sigterm()
    return show_jobs_report(performed(run, plan_of(options), options), as_json=options.json)


def plan_of(options: argparse.Namespace) -> Plan:
    return Plan(
        seed=seed_of(options.seed),
        minutes=options.minutes,
        pools=options.pools,
        nodes=options.nodes,
        gpus=options.gpus,
        only=chosen(options.only, ACTIONS),
    )


def options_of(arguments: Sequence[str]) -> argparse.Namespace:
    parser = parser_of("tests.chaos.pools", __doc__)
    parser.add_argument("--minutes", type=float, default=5.0, help="how long it storms, calms included")
    parser.add_argument("--pools", type=int, default=20)
    parser.add_argument("--nodes", type=int, default=3)
    parser.add_argument("--gpus", default="sim:2x24576", help="the GPUs of each node")
    parser.add_argument("--only", metavar="ACTION,…", help=f"only these: {', '.join(one.name for one in ACTIONS)}")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
