# SPDX-License-Identifier: Apache-2.0
"""ChannelLossTracker over gloo processes.

Every scenario runs in all ranks of one set of processes and returns what a rank saw; the tests below look at the
results of all ranks. A rank that waits for another in vain runs into the group's timeout, which fails its scenario.
"""

import datetime
import multiprocessing
import os
import pickle
import random
import traceback
import warnings

import pytest
import torch
import torch.distributed as dist
from counting import Count
from segscatter import ChannelLossTracker, ChannelRegistry
from segscatter.distributed import communication_device, resolve_group

NAMES = ["code", "math", "web"]
GROUP_TIMEOUT = datetime.timedelta(seconds=60)
JOIN_TIMEOUT = 240
WORLD_SIZES = [1, 2, 4, pytest.param(16, marks=pytest.mark.slow)]


def plain(stats):
    """What reduce() returned, in plain types and in its order."""
    return [(name, stat.sum, stat.count) for name, stat in stats.items()]


def batches(rank, world_size, *, channels, seed):
    """The micro-batches of a rank, their number differs between ranks: (losses, mask, names, offsets)."""
    rng = random.Random(1000 * seed + rank)
    mine = channels if rank % 2 else channels[::-1][: 1 + rank]
    for _ in range((rank * 3 + seed) % 5):
        names = [rng.choice(mine) for _ in range(rng.randrange(1, 6))]
        offsets = [0]
        for _ in names:
            offsets.append(offsets[-1] + rng.randrange(6))
        losses = [rng.randrange(-64, 64) / 8 for _ in range(offsets[-1])]  # sums are exact in any order
        mask = [rng.random() < 0.7 for _ in losses]
        yield losses, mask, names, offsets


def expected(world_size, *, channels, seed, ranks=None, shown=lambda name: str(name)):
    totals = {}
    for rank in range(world_size) if ranks is None else ranks:
        for losses, mask, names, offsets in batches(rank, world_size, channels=channels, seed=seed):
            for document, name in enumerate(names):
                for token in range(offsets[document], offsets[document + 1]):
                    if mask[token]:
                        total, count = totals.get(shown(name), (0.0, 0))
                        totals[shown(name)] = (total + losses[token], count + 1)
    return {(name, *total) for name, total in totals.items()}


def feed(tracker, rank, world_size, *, channels, seed, mode="train"):
    for losses, mask, names, offsets in batches(rank, world_size, channels=channels, seed=seed):
        tracker.update(torch.tensor(losses), torch.tensor(mask), names, cu_seqlens=offsets, mode=mode)


FIXED_CHANNELS = [*NAMES, None]
GROWING_CHANNELS = ["web", "code", None, "math", 1, "1", "é"]


def scenario_fixed(rank, world_size):
    tracker = ChannelLossTracker(ChannelRegistry(NAMES))
    results = []
    for seed in range(6):
        mode = ("train", "eval")[seed % 2]
        feed(tracker, rank, world_size, channels=FIXED_CHANNELS, seed=seed, mode=mode)
        results.append(plain(tracker.reduce(mode)))
    return results


def scenario_growing(rank, world_size):
    registry = ChannelRegistry(grow=True)
    tracker = ChannelLossTracker(registry)
    results = []
    for seed in range(6):
        channels = GROWING_CHANNELS[: 2 + seed]  # a new name in every round
        feed(tracker, rank, world_size, channels=channels, seed=seed, mode="eval")
        results.append(plain(tracker.reduce("eval")))
    return results


def scenario_growing_ids_stay_valid(rank, world_size):
    """Ids encoded before a merge mean the same after it, though the ranks hand out slots in different orders."""
    registry = ChannelRegistry(grow=True)
    order = NAMES[rank % 3 :] + NAMES[: rank % 3]
    early = registry.encode(order)
    tracker = ChannelLossTracker(registry)
    results = []
    for step in range(3):
        if step == 1:
            registry.encode([f"only {rank}"])
        values = torch.tensor([float(NAMES.index(name)) for name in order])
        tracker.update(values, None, early, cu_seqlens=[0, 1, 2, 3])
        results.append(plain(tracker.reduce()))
    return results


def scenario_counts(rank, world_size):
    counted = {}
    for kind, registry in (("fixed", ChannelRegistry(NAMES)), ("growing", ChannelRegistry(grow=True))):
        tracker = ChannelLossTracker(registry)
        for step in range(3):
            with Count() as update:
                tracker.update(torch.ones(2), None, [("web", "code")[(rank + step) % 2]])
            with Count() as reduce:
                tracker.reduce()
            counted[kind, step] = (update.collectives, update.reads), (reduce.collectives, reduce.reads)
    return counted


def scenario_silent_ranks(rank, world_size):
    """Ranks that never see data, and one that only ever does."""
    results = []
    for registry in (ChannelRegistry(NAMES), ChannelRegistry(grow=True)):
        tracker = ChannelLossTracker(registry)
        results.append(plain(tracker.reduce()))
        for _ in range(2):
            if rank == world_size - 1:
                tracker.update(torch.ones(3), None, ["web"])
            results.append(plain(tracker.reduce()))
    return results


def catch(call):
    try:
        call()
    except Exception as error:
        return type(error).__name__, str(error)
    return None


def scenario_mismatch(rank, world_size):
    """Each pair: the error of the first and of the second attempt; then the group must still work."""
    last = rank == world_size - 1
    trackers = {
        "order": ChannelLossTracker(ChannelRegistry(NAMES[::-1] if last else NAMES)),
        "size": ChannelLossTracker(ChannelRegistry([*NAMES, "more"] if last else NAMES)),
        "kind": ChannelLossTracker(ChannelRegistry(NAMES, grow=last)),
        "values": ChannelLossTracker(ChannelRegistry(NAMES), num_values=1 + last),
    }
    errors = {}
    for name, tracker in trackers.items():
        values = torch.ones(2) if tracker.num_values == 1 else torch.ones(2, 2)
        tracker.update(values, None, ["web"])
        errors[name] = [catch(tracker.reduce), catch(tracker.reduce)]
        errors[name, "kept"] = tracker.state_dict()["totals"]["train"]["counts"].tolist()
    check = torch.ones(1)
    dist.all_reduce(check)
    return errors, check.item()


def scenario_subgroup(rank, world_size):
    """A lazily made group of the even ranks; the others keep their own sums. Then the default group again."""
    made = {}
    tracker = ChannelLossTracker(ChannelRegistry(NAMES), group=lambda: made["group"])
    feed(tracker, rank, world_size, channels=FIXED_CHANNELS, seed=4)
    made["group"] = dist.new_group(list(range(0, world_size, 2)), timeout=GROUP_TIMEOUT)
    lazily = plain(tracker.reduce())
    tracker = ChannelLossTracker(ChannelRegistry(NAMES), group=made["group"])
    feed(tracker, rank, world_size, channels=FIXED_CHANNELS, seed=3)
    directly = plain(tracker.reduce())
    tracker = ChannelLossTracker(ChannelRegistry(NAMES), group=lambda: None)
    feed(tracker, rank, world_size, channels=FIXED_CHANNELS, seed=2)
    return lazily, directly, plain(tracker.reduce())


def scenario_changing_groups(rank, world_size):
    """Ranks with different histories meet in a group (hybrid context parallel): all must do the same handshakes."""
    groups = {"all": dist.group.WORLD, "even": dist.new_group(list(range(0, world_size, 2)), timeout=GROUP_TIMEOUT)}
    current = []
    results = []
    for registry in (ChannelRegistry(NAMES), ChannelRegistry(grow=True)):
        tracker = ChannelLossTracker(registry, group=lambda: groups[current[0]])
        for name in ("even", "all", "even", "all"):
            current[:] = [name]
            if name == "all" or rank % 2 == 0:
                tracker.update(torch.ones(2), None, ["web"])
                results.append(plain(tracker.reduce()))
    return results


def scenario_unseen(rank, world_size):
    tracker = ChannelLossTracker(ChannelRegistry(NAMES))
    messages = []
    for _ in range(2):
        tracker.update(torch.ones(1 + rank, 1), None, ["novel"] * (1 + rank))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            tracker.reduce()
        messages.append([str(warning.message) for warning in caught])
    return messages


def scenario_steps(rank, world_size):
    """Ranks discard a step for themselves; sums held in an open step do not travel."""
    tracker = ChannelLossTracker(ChannelRegistry(NAMES))
    tracker.begin_step()
    tracker.update(torch.ones(2), None, ["web"])
    tracker.discard_step() if rank == 0 and world_size > 1 else tracker.commit_step()
    tracker.begin_step()
    tracker.update(torch.ones(2), None, ["web"])
    results = [plain(tracker.reduce())]
    tracker.commit_step()
    return [*results, plain(tracker.reduce())]


def scenario_resume(rank, world_size):
    """State goes through a fresh tracker whose registry has met the names in another order."""
    first = ChannelLossTracker(ChannelRegistry(grow=True))
    feed(first, rank, world_size, channels=FIXED_CHANNELS, seed=4)
    first.update(torch.ones(2, 1), None, ["web", "only here"])
    first_half = first.state_dict()
    registry = ChannelRegistry(grow=True)
    registry.encode(FIXED_CHANNELS[rank:] + FIXED_CHANNELS[:rank])
    second = ChannelLossTracker(registry)
    second.load_state_dict(first_half)
    resumed, uninterrupted = plain(second.reduce()), plain(first.reduce())
    return sorted(resumed), sorted(uninterrupted)


def scenario_large_counts(rank, world_size):
    tracker = ChannelLossTracker(ChannelRegistry(NAMES))
    counts = torch.tensor([2**53 // world_size - 1, 1, 0, 0, 0])
    sums = torch.tensor([2.0**30, float("nan") if rank == 0 else 1.0, 0, 0, 0], dtype=torch.float64)
    tracker.load_state_dict({**tracker.state_dict(), "totals": {"train": {"sums": sums, "counts": counts}}})
    stats = tracker.reduce()
    return stats["code"].sum, stats["code"].count, stats["math"].count, stats["math"].sum != stats["math"].sum


def scenario_several_values(rank, world_size):
    tracker = ChannelLossTracker(ChannelRegistry(grow=True), num_values=3)
    names = ["a", "b"] if rank % 2 else ["b", "c"]
    tracker.update(torch.arange(12.0).view(3, 4) + rank, None, names, cu_seqlens=[0, 1, 4])
    return plain(tracker.reduce())


def scenario_many_names(rank, world_size):
    """Every rank brings its own thousand names: the exchange is longer than one buffer and happens once."""
    names = [f"rank {rank} source {i} é" for i in range(1000)]
    tracker = ChannelLossTracker(ChannelRegistry(grow=True))
    collectives = []
    for _ in range(2):
        tracker.update(torch.ones(1000, 1), None, names)
        with Count() as count:
            stats = tracker.reduce()
        collectives.append(count.collectives)
    return len(stats), {stat.count for stat in stats.values()}, list(stats)[::1000], collectives


SCENARIOS = {name.removeprefix("scenario_"): f for name, f in list(globals().items()) if name.startswith("scenario_")}


def run_rank(rank, world_size, folder):
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    store = dist.FileStore(os.path.join(folder, "store"), world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=GROUP_TIMEOUT)
    results = {}
    for name, scenario in SCENARIOS.items():
        try:
            results[name] = scenario(rank, world_size)
        except Exception:
            results[name] = RuntimeError(f"rank {rank}:\n{traceback.format_exc()}")
    with open(os.path.join(folder, f"rank{rank}"), "wb") as file:
        pickle.dump(results, file)
    dist.barrier()
    dist.destroy_process_group()


def run_ranks(world_size, folder):
    """The results of all scenarios, as one list of ranks for every scenario."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "segscatter"])  # imported once for all ranks of all worlds
    processes = [context.Process(target=run_rank, args=(rank, world_size, str(folder))) for rank in range(world_size)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(JOIN_TIMEOUT)
    stuck = [process for process in processes if process.is_alive()]
    for process in stuck:
        process.kill()
    assert not stuck, f"{len(stuck)} of {world_size} ranks hang"
    assert [process.exitcode for process in processes] == [0] * world_size
    ranks = [pickle.loads((folder / f"rank{rank}").read_bytes()) for rank in range(world_size)]
    return {name: [results[name] for results in ranks] for name in SCENARIOS}


@pytest.fixture(scope="module", params=WORLD_SIZES, ids=lambda size: f"{size}ranks")
def world(request, tmp_path_factory):
    results = run_ranks(request.param, tmp_path_factory.mktemp(f"world{request.param}"))
    return World(request.param, results)


class World:
    def __init__(self, size, results):
        self.size = size
        self._results = results

    def of_all_ranks(self, scenario):
        """The result of every rank."""
        for result in self._results[scenario]:
            if isinstance(result, Exception):
                raise result
        return self._results[scenario]

    def agreed(self, scenario):
        """The result, which must be the same on every rank."""
        first, *others = self.of_all_ranks(scenario)
        assert all(other == first for other in others)
        return first


def test_fixed_vocabulary(world):
    for seed, result in enumerate(world.agreed("fixed")):
        assert set(result) == expected(world.size, channels=FIXED_CHANNELS, seed=seed)
        slots = [[*NAMES, "None", "other"].index(name) for name, _, _ in result]
        assert slots == sorted(slots)


def test_growing_vocabulary(world):
    for seed, result in enumerate(world.agreed("growing")):
        channels = GROWING_CHANNELS[: 2 + seed]
        # The integer shows its type as soon as the string "1" is somewhere, and not before.
        texts = [name for name, _, _ in result]
        assert len(set(texts)) == len(texts)

        def shown(name, texts=texts):
            return "1 (int)" if name == 1 and name != "1" and "1 (int)" in texts else str(name)

        assert set(result) == expected(world.size, channels=channels, seed=seed, shown=shown)


def test_ids_of_a_growing_registry_outlive_merges(world):
    totals = {(name, float(i) * world.size, world.size) for i, name in enumerate(NAMES)}
    for result in world.agreed("growing_ids_stay_valid"):
        assert set(result) == totals


def test_collectives_and_host_reads(world):
    for counted in world.of_all_ranks("counts"):
        for update, _ in counted.values():
            assert update == ([], 0)
        reduce = {key: value for key, (_, value) in counted.items()}
        if world.size == 1:
            assert set(map(repr, reduce.values())) == {repr(([], 1))}
            continue
        handshake = (["allreduce", "allreduce"], 2)
        assert reduce["fixed", 0] == handshake
        assert reduce["fixed", 1] == reduce["fixed", 2] == (["allreduce"], 1)
        assert reduce["growing", 0] == (["allreduce", "allgather", "allreduce"], 3)  # names differ
        assert reduce["growing", 1] == handshake  # all names are known by now, though new to this rank
        assert reduce["growing", 2] == handshake


def test_ranks_without_data(world):
    silent, *some = world.agreed("silent_ranks")
    assert silent == []
    assert some == [[("web", 3.0, 3)], [("web", 3.0, 3)], [], [("web", 3.0, 3)], [("web", 3.0, 3)]]


def test_mismatch_is_the_same_error_on_all_ranks(world):
    if world.size == 1:
        errors, check = world.agreed("mismatch")
        assert check == 1.0
        assert all(errors[name] == [None, None] for name in ("order", "size", "kind", "values"))
        return
    results = world.of_all_ranks("mismatch")
    assert [check for _, check in results] == [float(world.size)] * world.size
    last = world.size - 1
    wanted = {
        "order": f"slot 0 is 'code' on rank 0 (5 slots) and 'web' on rank {last} (5 slots)",
        "size": f"slot 3 is 'None' on rank 0 (5 slots) and 'more' on rank {last} (6 slots)",
        "kind": "some ranks have a fixed ChannelRegistry and some a growing one",
        "values": "num_values must be the same on all ranks, but goes from 1 to 2",
    }
    for name, message in wanted.items():
        errors = {error for result, _ in results for error in result[name]}
        assert len(errors) == 1
        ((kind, text),) = errors
        assert kind == "ValueError"
        assert message in text
    assert all(sum(result[name, "kept"]) == 2 for result, _ in results for name in wanted)


def test_groups(world):
    members = range(0, world.size, 2)
    for rank, (lazily, directly, by_default) in enumerate(world.of_all_ranks("subgroup")):
        ranks = members if rank in members else [rank]
        assert set(lazily) == expected(world.size, channels=FIXED_CHANNELS, seed=4, ranks=ranks)
        assert set(directly) == expected(world.size, channels=FIXED_CHANNELS, seed=3, ranks=ranks)
        assert set(by_default) == expected(world.size, channels=FIXED_CHANNELS, seed=2)


def test_ranks_with_different_histories_meet(world):
    everyone = [("web", 2.0 * world.size, 2 * world.size)]
    even = [("web", 2.0 * ((world.size + 1) // 2), 2 * ((world.size + 1) // 2))]
    for rank, results in enumerate(world.of_all_ranks("changing_groups")):
        assert results == ([everyone] * 4 if rank % 2 else [even, everyone] * 4)


def test_unseen_names_are_reported_by_the_first_rank(world):
    first, *others = world.of_all_ranks("unseen")
    number = sum(1 + rank for rank in range(world.size))
    assert [len(messages) for messages in first] == [1, 0]
    assert first[0][0].startswith(f"{number} channel names outside the vocabulary")
    assert others == [[[], []]] * len(others)


def test_steps_of_ranks(world):
    committed = 2 * (world.size - 1) if world.size > 1 else 2
    assert world.agreed("steps") == [
        [("web", float(committed), committed)],
        [("web", 2.0 * world.size, 2 * world.size)],
    ]


def test_state_survives_a_restart(world):
    resumed, uninterrupted = world.agreed("resume")
    assert len(resumed) > 1
    assert resumed == uninterrupted


def test_counts_are_exact_to_two_to_the_53(world):
    total, count, other_count, is_nan = world.agreed("large_counts")
    assert (total, count) == (2.0**30 * world.size, 2**53 - world.size)
    assert (other_count, is_nan) == (world.size, True)


def test_several_values(world):
    totals = {}
    for rank in range(world.size):
        rows = [[4 * row + token + rank for token in range(4)] for row in range(3)]
        for name, begin, end in zip(["a", "b"] if rank % 2 else ["b", "c"], [0, 1], [1, 4], strict=True):
            sums, count = totals.get(name, ((0.0,) * 3, 0))
            sums = tuple(total + sum(row[begin:end]) for total, row in zip(sums, rows, strict=True))
            totals[name] = (sums, count + end - begin)
    assert set(world.agreed("several_values")) == {(name, *total) for name, total in totals.items()}


def test_many_names(world):
    size, counts, first_names, collectives = world.agreed("many_names")
    assert size == 1000 * world.size
    assert counts == {1}
    assert first_names == [f"rank {rank} source 0 é" for rank in range(world.size)]
    reduce = ["allreduce"] * 2
    assert collectives == ([[], []] if world.size == 1 else [["allreduce", "allgather", "allreduce"], reduce])


def test_without_torch_distributed_a_tracker_is_on_its_own():
    assert not dist.is_initialized()
    assert resolve_group(None) is None

    def never():
        raise AssertionError("the group is only asked for when there can be one")

    tracker = ChannelLossTracker(ChannelRegistry(NAMES), group=never)
    tracker.update(torch.ones(2), None, ["web"])
    assert plain(tracker.reduce()) == [("web", 2.0, 2)]


@pytest.mark.parametrize(
    ("backends", "device", "used"),
    [
        ("cpu:gloo,cuda:nccl", "cpu", "cpu"),
        ("cpu:gloo,cuda:nccl", "cuda:1", "cuda:1"),
        ("cuda:nccl", "cpu", "cuda"),
        ("cuda:nccl", "cuda:3", "cuda:3"),
        ("xpu:xccl", "xpu:0", "xpu:0"),
    ],
)
def test_communication_device(monkeypatch, backends, device, used):
    monkeypatch.setattr(dist.distributed_c10d, "get_backend_config", lambda group: backends)
    assert communication_device(None, torch.device(device)) == torch.device(used)
