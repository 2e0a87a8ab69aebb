"""Which GPU gets a request: pure decisions over a snapshot, with a reason for every refusal.

`views` is what placement sees and asks, and why a GPU says no. `node` is what one machine has left. `cluster` chooses.
`policies` compare the nodes that fit. `mix` remembers what is usually asked, `look` what the cluster was like a moment
ago. `room` says what to reserve or unload when nothing fits.

A decision is a proposal; the guarded UPDATE in `store.gpus` is what grants.
"""

from orchestrator.placement.cluster import Cluster, Evidence, Placed, Refused, refused_mb
from orchestrator.placement.look import LastLook, Look
from orchestrator.placement.mix import Mix, RecentAsks, Shape
from orchestrator.placement.policies import Policy
from orchestrator.placement.room import Resident, evictions, reservation
from orchestrator.placement.views import (
    Ask,
    GpuView,
    HostView,
    Reason,
    is_too_large,
    refusal,
    too_large_for_all,
    where_gpus_are,
)

__all__ = [
    "Ask",
    "Cluster",
    "Evidence",
    "GpuView",
    "HostView",
    "LastLook",
    "Look",
    "Mix",
    "Placed",
    "Policy",
    "Reason",
    "RecentAsks",
    "Refused",
    "Resident",
    "Shape",
    "evictions",
    "is_too_large",
    "refusal",
    "refused_mb",
    "reservation",
    "too_large_for_all",
    "where_gpus_are",
]
