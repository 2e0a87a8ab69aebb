"""Placement: all or nothing, unknown is not free, a reason for every refusal, the same answer to the same question."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.placement import Ask, Cluster, GpuView, HostView, Mix, Placed, Policy, Reason, Refused, Shape, refusal


def gpu(index=0, free=10_000, node="n", usable=20_000, **fields):
    return GpuView(f"GPU-{node}-{index}", node, index, usable, usable - free, 0, **fields)


def place(gpus, memory_mb, *, hosts=(), policy=Policy.BEST_FIT, mix=None, **fields):
    return Cluster(gpus, hosts).place(Ask(memory_mb, **fields), policy, mix or Mix())


def chosen(answer):
    assert isinstance(answer, Placed), answer
    assert {view.node_id for view in answer.gpus} <= {answer.node_id}
    return [view.gpu_uuid for view in answer.gpus]


def refused(answer):
    assert isinstance(answer, Refused), answer
    return answer.code, answer.reason


def test_the_smallest_hole_that_fits_is_taken():
    gpus = [gpu(0, 9000), gpu(1, 3000), gpu(2, 5000)]
    assert chosen(place(gpus, 4000)) == ["GPU-n-2"]
    assert chosen(place(gpus, 3000)) == ["GPU-n-1"]


def test_equal_holes_go_by_index_and_the_order_of_the_list_does_not_matter():
    gpus = [gpu(n) for n in range(4)]
    assert chosen(place(gpus, 10)) == chosen(place(gpus[::-1], 10)) == ["GPU-n-0"]


def test_several_gpus_come_from_one_node_or_not_at_all():
    spread = [gpu(0, node="a"), gpu(0, node="b")]
    assert refused(place(spread, 1000, gpu_count=2))[0] == Reason.NO_GPU
    pair = [*spread, gpu(1, 2000, node="b")]
    assert sorted(chosen(place(pair, 1000, gpu_count=2))) == ["GPU-b-0", "GPU-b-1"]
    assert isinstance(place(pair, 2001, gpu_count=2), Refused)


def test_the_node_with_the_least_room_that_fits_is_taken():
    gpus = [gpu(0, 9000, "a"), gpu(1, 9000, "a"), gpu(0, 5000, "b"), gpu(1, 5000, "b")]
    assert chosen(place(gpus, 1000, gpu_count=2)) == ["GPU-b-0", "GPU-b-1"]


def test_best_fit_looks_at_the_cpu_too_where_it_is_known():
    gpus = [gpu(0, node="a"), gpu(0, node="b")]
    hosts = [HostView("a", 64_000, None), HostView("b", 8000, None)]
    assert chosen(place(gpus, 1000)) == ["GPU-a-0"]
    assert chosen(place(gpus, 1000, hosts=hosts)) == ["GPU-b-0"]


def test_spread_takes_the_emptiest():
    gpus = [gpu(0, 9000, "a"), gpu(1, 2000, "a"), gpu(0, 5000, "b"), gpu(1, 5000, "b")]
    assert chosen(place(gpus, 1000, policy=Policy.SPREAD)) == ["GPU-a-0"]


def test_a_wish_for_a_node_is_kept():
    gpus = [gpu(0, 5000, "a"), gpu(0, 9000, "b")]
    assert chosen(place(gpus, 1000, node_id="b")) == ["GPU-b-0"]
    assert refused(place(gpus, 1000, node_id="c")) == (Reason.NO_GPU, "needs 1000 MB; no GPU is known on node c")


def test_warm_nodes_are_preferred_when_they_fit():
    gpus = [gpu(0, 5000, "a"), gpu(0, 9000, "b"), gpu(0, 100, "c")]
    assert chosen(place(gpus, 1000, warm_nodes=frozenset("bcx"))) == ["GPU-b-0"]
    assert chosen(place(gpus, 1000, warm_nodes=frozenset("cx"))) == ["GPU-a-0"]


def test_foreign_memory_is_not_ours():
    view = GpuView("u", "n", 0, usable_mb=10_000, leased_mb=1000, foreign_mb=4000)
    assert view.free_mb == 5000
    assert isinstance(place([view], 5001), Refused)
    assert isinstance(place([view], 5000), Placed)


@pytest.mark.parametrize(
    ("fields", "code", "reason"),
    [
        ({"fresh": False}, Reason.STALE, "its last sample is stale"),
        ({"health": "lost"}, Reason.UNHEALTHY, "it is lost"),
        ({"quarantined": True}, Reason.QUARANTINED, "it is quarantined"),
        ({"gated": True}, Reason.GATE_CLOSED, "its gate is closed: its memory was over the limit lately"),
        ({"reserved_for": "big"}, Reason.RESERVED, "it is reserved for another request"),
        ({"free": 10}, Reason.NO_MEMORY, "10 of 20000 MB free"),
        ({"free": -500}, Reason.NO_MEMORY, "0 of 20000 MB free"),
    ],
)
def test_a_refusal_says_why(fields, code, reason):
    view = gpu(**fields)
    assert refusal(view, Ask(100)) == (code, reason)
    answer = place([view], 100)
    assert refused(answer) == (code, f"needs 100 MB; n/0: {reason}")
    assert [(one.gpu, one.code, one.text) for one in answer.evidence] == [(view, code, reason)]
    assert answer.gpus == (view,)
    assert refused(place([view], 100, node_id="n")) == refused(answer)


def test_a_reserved_gpu_is_open_to_its_key():
    gpus = [gpu(0, reserved_for="big"), gpu(1, reserved_for="other")]
    assert chosen(place(gpus, 100, key="big")) == ["GPU-n-0"]
    assert refused(place(gpus, 100))[0] == Reason.RESERVED


def test_only_the_models_asked_for_will_do():
    gpus = [gpu(0, 5000, name="T4"), gpu(1, 9000, name="A100")]
    assert chosen(place(gpus, 100, models=frozenset({"A100", "H100"}))) == ["GPU-n-1"]
    code, reason = refused(place(gpus, 100, models=frozenset({"H100"})))
    assert code == Reason.WRONG_MODEL
    assert reason == "needs 100 MB of H100; n/0: it is of the model T4, n/1: it is of the model A100"


def test_the_host_may_be_what_is_missing():
    hosts = [HostView("n", 2000, 3000)]
    assert isinstance(place([gpu()], 1, hosts=hosts, cpu_milli=2000, host_memory_mb=3000), Placed)
    assert refused(place([gpu()], 1, hosts=hosts, cpu_milli=2001)) == (
        Reason.HOST_CPU,
        "needs 1 MB, 2001 CPU milli; n/0: 2000 of 2001 needed CPU milli free on its host",
    )
    assert refused(place([gpu()], 1, hosts=hosts, host_memory_mb=3001))[0] == Reason.HOST_MEMORY


def test_a_host_that_does_not_report_does_not_limit():
    assert isinstance(place([gpu()], 1, cpu_milli=10**9, host_memory_mb=10**9), Placed)
    assert isinstance(place([gpu()], 1, hosts=[HostView("n")], cpu_milli=10**9), Placed)


def test_who_asks_for_no_gpu_gets_a_node():
    hosts = [HostView("a", 1000, None), HostView("b", 9000, None)]
    answer = place([gpu(0, node="a")], 0, hosts=hosts, gpu_count=0, cpu_milli=2000)
    assert answer == Placed("b", ())
    assert refused(place([], 0, hosts=hosts, gpu_count=0, cpu_milli=10_000)) == (
        Reason.HOST_CPU,
        "needs no GPU, 10000 CPU milli; no host has that",
    )


def test_the_most_frequent_reason_is_the_code():
    gpus = [gpu(0, 10), gpu(1, 10), gpu(2, fresh=False)]
    assert refused(place(gpus, 100))[0] == Reason.NO_MEMORY


def test_a_refusal_shows_a_few_gpus_and_counts_the_rest():
    answer = place([gpu(n, 10) for n in range(40)], 100)
    assert refused(answer)[1].endswith("n/3: 10 of 20000 MB free and 36 more")
    assert len(answer.evidence) == 16


def test_a_refusal_of_several_says_which_would_fit():
    code, reason = refused(place([gpu(0, 500), gpu(1, 50)], 100, gpu_count=2))
    assert code == Reason.NO_MEMORY
    assert reason == "needs 100 MB on each of 2 GPUs of one node; n/0: fits, n/1: 50 of 20000 MB free"


def test_without_any_gpu():
    assert refused(place([], 1)) == (Reason.NO_GPU, "needs 1 MB; no GPU is known on the cluster")


def test_fragmentation_leaves_what_the_usual_request_can_use():
    gpus = [gpu(0, 9000, "a"), gpu(0, 12_000, "b")]
    usual = Mix({Shape(8000): 1.0})
    # Best fit would leave 5000 on a, where no usual request fits; b is left with 8000.
    assert chosen(place(gpus, 4000, policy=Policy.BEST_FIT)) == ["GPU-a-0"]
    assert chosen(place(gpus, 4000, policy=Policy.FRAGMENTATION, mix=usual)) == ["GPU-b-0"]


def test_fragmentation_keeps_gpus_together_for_those_who_need_several():
    gpus = [gpu(n, 20_000, "a") for n in range(2)] + [gpu(0, 20_000, "b")]
    pairs = Mix({Shape(20_000, gpu_count=2): 1.0})
    assert chosen(place(gpus, 100, policy=Policy.FRAGMENTATION, mix=pairs)) == ["GPU-b-0"]


def test_fragmentation_sends_what_needs_cpu_to_where_cpu_is_plenty():
    gpus = [gpu(0, node="a"), gpu(0, node="b")]
    hosts = [HostView("a", 16_000, None), HostView("b", 64_000, None)]
    usual = Mix({Shape(5000, cpu_milli=8000): 1.0})
    hungry = {"cpu_milli": 8000, "hosts": hosts}
    assert chosen(place(gpus, 1000, policy=Policy.BEST_FIT, **hungry)) == ["GPU-a-0"]
    assert chosen(place(gpus, 1000, policy=Policy.FRAGMENTATION, mix=usual, **hungry)) == ["GPU-b-0"]


def test_fragmentation_without_a_mix_is_best_fit():
    gpus = [gpu(0, 9000, "a"), gpu(0, 12_000, "b")]
    assert place(gpus, 4000, policy=Policy.FRAGMENTATION) == place(gpus, 4000, policy=Policy.BEST_FIT)


def test_where_nodes_lose_the_same_the_better_fit_is_taken():
    gpus = [gpu(0, 20_000, "a"), gpu(0, 5000, "b")]
    assert chosen(place(gpus, 1000, policy=Policy.FRAGMENTATION, mix=Mix({Shape(1000): 1.0}))) == ["GPU-b-0"]


def test_equal_nodes_go_by_name():
    gpus = [gpu(0, node=f"n{n:02}") for n in range(30)]
    for policy in Policy:
        assert chosen(place(gpus, 10, policy=policy, mix=Mix({Shape(10): 1.0}))) == ["GPU-n00-0"]


def test_another_mix_leads_to_another_answer_from_the_same_cluster():
    cluster = Cluster([gpu(0, 9000, "a"), gpu(0, 12_000, "b")])
    for usual, expected in ((8000, "GPU-b-0"), (5000, "GPU-a-0"), (8000, "GPU-b-0")):
        answer = cluster.place(Ask(4000), Policy.FRAGMENTATION, Mix({Shape(usual): 1.0}))
        assert chosen(answer) == [expected]


VIEWS = st.builds(
    GpuView,
    st.uuids().map(str),
    st.sampled_from("abc"),
    st.integers(0, 7),
    usable_mb=st.integers(0, 100),
    leased_mb=st.integers(0, 60),
    foreign_mb=st.sampled_from([0, 0, 0, 20, 120]),
    health=st.sampled_from(["ok"] * 9 + ["lost"]),
    fresh=st.sampled_from([True] * 9 + [False]),
    name=st.sampled_from(["", "T4"]),
    quarantined=st.sampled_from([False] * 9 + [True]),
    gated=st.sampled_from([False] * 9 + [True]),
    reserved_for=st.sampled_from([None] * 4 + ["k"]),
)
CLUSTERS = st.lists(VIEWS, max_size=12, unique_by=lambda view: view.gpu_uuid)
AMOUNTS = st.none() | st.integers(0, 50)
HOSTS = st.sets(st.builds(HostView, st.sampled_from("abcd"), AMOUNTS, AMOUNTS), max_size=4).map(
    lambda hosts: list({host.node_id: host for host in hosts}.values())
)
ASKS = st.builds(
    Ask,
    st.integers(0, 60),
    st.integers(0, 3),
    node_id=st.sampled_from([None, None, None, "a", "x"]),
    key=st.sampled_from(["", "k"]),
    models=st.sampled_from([frozenset(), frozenset(), frozenset({"T4"})]),
    cpu_milli=st.integers(0, 12),
    host_memory_mb=st.integers(0, 12),
    warm_nodes=st.frozensets(st.sampled_from("abx")),
)
MIXES = st.dictionaries(ASKS.map(Shape.of), st.integers(1, 9), max_size=4).map(Mix)
POLICIES = st.sampled_from(Policy)


def can_hold(views, host, ask):
    """The rule, said once more and slowly: how many GPUs of a node may take their part."""
    able = [
        view
        for view in views
        if view.fresh
        and view.health == "ok"
        and not (view.quarantined or view.gated)
        and view.reserved_for in {None, ask.key}
        and (not ask.models or view.name in ask.models)
        and view.usable_mb - view.foreign_mb - view.leased_mb >= ask.memory_mb
    ]
    cpu_ok = host.cpu_milli_free is None or host.cpu_milli_free >= ask.cpu_milli
    memory_ok = host.memory_mb_free is None or host.memory_mb_free >= ask.host_memory_mb
    return able if cpu_ok and memory_ok else []


def minus(amount, need):
    return None if amount is None else amount - need


def replayed(views, hosts, taken):
    """A cluster with the same history that was never asked before, so that it remembers nothing."""
    cluster = Cluster(views, hosts)
    for ask, placed in taken:
        cluster.take(ask, placed)
    return cluster


#: Few shapes, each of them often: what is remembered of a shape must not outlive a change.
SEQUENCES = st.lists(ASKS, min_size=1, max_size=3).flatmap(lambda few: st.lists(st.sampled_from(few), max_size=12))


@given(CLUSTERS, HOSTS, SEQUENCES, POLICIES, MIXES)
def test_no_sequence_of_placements_breaks_a_rule(views, hosts, asks, policy, mix):
    cluster = Cluster(views, hosts)
    taken: list[tuple[Ask, Placed]] = []
    account = {view.gpu_uuid: view for view in views}
    left = {name: HostView(name) for name in {view.node_id for view in views}} | {host.node_id: host for host in hosts}
    for ask in asks:
        groups = {name: [v for v in account.values() if v.node_id == name] for name in left}
        able = {name: can_hold(groups[name], left[name], ask) for name in left if ask.node_id in {None, name}}
        answer = cluster.place(ask, policy, mix)
        assert answer == replayed(views[::-1], hosts[::-1], taken).place(ask, policy, mix)
        if isinstance(answer, Refused):
            if ask.gpu_count:
                assert all(len(group) < ask.gpu_count for group in able.values())
            continue
        assert ask.node_id in {None, answer.node_id}
        assert len({view.gpu_uuid for view in answer.gpus}) == ask.gpu_count
        for view in answer.gpus:
            assert account[view.gpu_uuid] == view and view in able[answer.node_id]
            account[view.gpu_uuid] = view.with_lease(ask.memory_mb)
        host = left[answer.node_id]
        left[host.node_id] = HostView(
            host.node_id, minus(host.cpu_milli_free, ask.cpu_milli), minus(host.memory_mb_free, ask.host_memory_mb)
        )
        if any(len(able.get(name, ())) >= ask.gpu_count > 0 for name in ask.warm_nodes):
            assert answer.node_id in ask.warm_nodes
        cluster.take(ask, answer)
        taken.append((ask, answer))
        assert {view.gpu_uuid: view for view in cluster.gpus()} == account
        assert {node.node_id: node.host for node in cluster.nodes()} == left


@given(CLUSTERS, HOSTS, ASKS, POLICIES, MIXES)
def test_the_reasons_of_a_refusal_are_true(views, hosts, ask, policy, mix):
    answer = Cluster(views, hosts).place(ask, policy, mix)
    if isinstance(answer, Placed):
        return
    asked = [view for view in views if ask.node_id in {None, view.node_id}]
    codes = {found[0] for view in asked if (found := refusal(view, ask))}
    for host in (host for host in hosts if ask.node_id in {None, host.node_id}):
        if host.cpu_milli_free is not None and host.cpu_milli_free < ask.cpu_milli:
            codes.add(Reason.HOST_CPU)
        elif host.memory_mb_free is not None and host.memory_mb_free < ask.host_memory_mb:
            codes.add(Reason.HOST_MEMORY)
    sizes = [sum(view.node_id == name for view in asked) for name in "abcd"]
    assert answer.code in codes or (answer.code is Reason.NO_GPU and (not asked or min(sizes) < ask.gpu_count))
    assert len(answer.evidence) == min(len(asked), 16)
    for one in answer.evidence:
        assert one.gpu in asked
        if one.code is None:
            assert refusal(one.gpu, ask) is None
        elif one.code not in {Reason.HOST_CPU, Reason.HOST_MEMORY}:
            assert refusal(one.gpu, ask) == (one.code, one.text)
