# SPDX-License-Identifier: Apache-2.0
"""ChannelLossTracker in one process, against a plain Python loop over tokens."""

import copy
import io
import itertools
import math
import random
import warnings

import pytest
import torch
from counting import HostReads, Operators
from segscatter import ChannelLossTracker, ChannelRegistry, ChannelStat, ContextParallel
from segscatter import tracker as tracker_module

NAMES = ["code", "math", "web"]


def oracle(losses, mask, channels, offsets, *, ignore_index=0, totals=None):
    """Adds to {channel: [sum, count]}, one token at a time; channels behind the last one given are padding."""
    totals = {} if totals is None else totals
    for document, channel in enumerate(channels):
        for token in range(offsets[document], offsets[document + 1]):
            if mask is None or mask[token] != ignore_index:
                entry = totals.setdefault(channel, [0.0, 0])
                entry[0] += losses[token]
                entry[1] += 1
    return totals


def check(stats, totals):
    """stats holds exactly the channels of totals: equal counts, sums and means to rounding."""
    assert set(stats) == set(totals)
    for name, (total, count) in totals.items():
        assert stats[name].count == count
        assert stats[name].sum == pytest.approx(total, rel=1e-12, abs=1e-12)
        assert stats[name].mean == pytest.approx(total / count, rel=1e-12, abs=1e-12)


def random_batch(rng, num_documents, channels, *, max_length=9):
    lengths = [rng.randrange(max_length) for _ in range(num_documents)]
    offsets = [0]
    for length in lengths:
        offsets.append(offsets[-1] + length)
    num_tokens = offsets[-1]
    losses = [rng.choice([0.25, 1.5, -3.0, 1e-3]) * rng.randrange(1, 99) for _ in range(num_tokens)]
    losses = torch.tensor(losses, dtype=torch.float32)
    mask = torch.tensor([rng.random() < 0.6 for _ in range(num_tokens)], dtype=torch.bool)
    return losses, mask, [rng.choice(channels) for _ in lengths], offsets


@pytest.mark.parametrize("grow", [False, True])
@pytest.mark.parametrize("seed", range(8))
def test_random_batches(seed, grow):
    rng = random.Random(seed)
    channels = [*NAMES, None, "None", 7, "é"] if grow else [*NAMES, None, "elsewhere"]
    shown = {name: name for name in NAMES} | {"é": "é"}
    shown |= {None: "None (NoneType)", "None": "None", 7: "7"} if grow else {None: "None", "elsewhere": "other"}
    registry = ChannelRegistry(NAMES if not grow else (), grow=grow)
    if grow:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            registry.encode(["None", None])
    tracker = ChannelLossTracker(registry)
    expected = {"train": {}, "eval": {}}
    for step in range(40):
        losses, mask, names, offsets = random_batch(rng, rng.randrange(6), channels)
        mode = rng.choice(["train", "eval"])
        use_mask = rng.choice([None, mask, mask.int() * -100, mask.float(), mask[None]])
        ignore_index = -100 if use_mask is not None and use_mask.dtype == torch.int32 else 0
        plain_mask = None if use_mask is None else use_mask.reshape(-1).tolist()
        given = names[: rng.randrange(len(names) + 1)] if rng.random() < 0.3 else names
        ids = given if rng.random() < 0.5 else registry.encode(given).to(rng.choice([torch.int32, torch.int64]))
        cu = rng.choice([offsets, torch.tensor(offsets, dtype=torch.int32), torch.tensor(offsets)[None]])
        tracker.update(
            losses if rng.random() < 0.5 else losses[None],
            use_mask,
            ids,
            cu_seqlens=cu,
            mode=mode,
            ignore_index=ignore_index,
        )
        oracle(
            losses.tolist(),
            plain_mask,
            [shown[name] for name in given],
            offsets,
            ignore_index=ignore_index,
            totals=expected[mode],
        )
        if step % 10 == 9:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # names that the fixed vocabulary lacks
                check(tracker.reduce(mode), expected[mode])
            expected[mode] = {}


def test_result_is_in_slot_order_and_lacks_silent_channels():
    tracker = ChannelLossTracker(ChannelRegistry(NAMES))
    tracker.update(torch.tensor([1.0, 2.0, 3.0, 4.0]), None, ["web", "code", "math"], cu_seqlens=[0, 2, 3, 3])
    stats = tracker.reduce()
    assert list(stats.items()) == [("code", ChannelStat(3.0, 1, 3.0)), ("web", ChannelStat(3.0, 2, 1.5))]
    assert isinstance(stats["web"].sum, float)
    assert isinstance(stats["web"].count, int)
    assert tracker.reduce() == {}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_loss_dtypes_and_strides(dtype):
    tracker = ChannelLossTracker(ChannelRegistry(NAMES))
    losses = torch.arange(12, dtype=dtype)
    tracker.update(losses[::2], torch.ones(12, dtype=torch.bool)[::2], ["web", "math"], cu_seqlens=[0, 2, 6])
    check(tracker.reduce(), {"web": [2.0, 2], "math": [28.0, 4]})


def test_rows_are_segments_without_offsets():
    tracker = ChannelLossTracker(ChannelRegistry(NAMES))
    losses = torch.arange(12.0).view(3, 4)
    labels = torch.tensor([[5, -100, 5, 5], [5, 5, 5, 5], [-100] * 4])
    tracker.update(losses, labels, ["web", "math", "code"], ignore_index=-100)
    check(tracker.reduce(), {"web": [5.0, 3], "math": [22.0, 4]})
    tracker.update(losses, None, ["web"])  # the other rows are padding
    check(tracker.reduce(), {"web": [6.0, 4]})
    tracker.update(losses[0], None, ["web"])
    check(tracker.reduce(), {"web": [6.0, 4]})
    tracker.update(losses.t(), None, ["web", "math", "code", None])  # not contiguous
    check(tracker.reduce(), {"web": [12.0, 3], "math": [15.0, 3], "code": [18.0, 3], "None": [21.0, 3]})
    for shape in [(0, 4), (3, 0), (0,), (1, 0)]:
        tracker.update(losses.new_zeros(shape), None, [])
    assert tracker.reduce() == {}


def test_rows_with_offsets_are_one_row():
    tracker = ChannelLossTracker(ChannelRegistry(NAMES))
    tracker.update(torch.arange(8.0).view(2, 4), None, ["web", "math", "code"], cu_seqlens=[0, 3, 4, 8])
    check(tracker.reduce(), {"web": [3.0, 3], "math": [3.0, 1], "code": [22.0, 4]})


@pytest.mark.parametrize("layout", ["per_document", "per_sequence", "contiguous"])
@pytest.mark.parametrize("size", [2, 3])
def test_context_parallel_parts_add_up(layout, size):
    offsets = [0, 2 * size, 2 * size, 8 * size, 12 * size]
    num_tokens = offsets[-1]
    losses = torch.arange(1.0, num_tokens + 1)
    mask = torch.arange(num_tokens) % 3 != 0
    channels = ["math", "web", "code", "math"]
    pieces = {"per_document": list(itertools.pairwise(offsets)), "per_sequence": [(0, num_tokens)]}
    tracker = ChannelLossTracker(ChannelRegistry(NAMES))
    for rank in range(size):
        if layout == "contiguous":
            held = torch.arange(num_tokens).chunk(size)[rank]
        else:
            held = [torch.arange(*piece).chunk(2 * size) for piece in pieces[layout] if piece[0] < piece[1]]
            held = torch.cat([torch.cat([chunks[rank], chunks[2 * size - 1 - rank]]) for chunks in held])
        cp = ContextParallel(layout, size, rank)
        tracker.update(losses[held][None], mask[held], channels, cu_seqlens=offsets, cp=cp)
    check(tracker.reduce(), oracle(losses.tolist(), mask.tolist(), channels, offsets))
    # Without offsets every rank holds parts of the same rows.
    tracker.update(losses.view(2, -1), None, ["math", "web"], cp=ContextParallel(layout, size, 0))
    half = num_tokens // 2
    check(tracker.reduce(), oracle(losses.tolist(), None, ["math", "web"], [0, half, num_tokens]))


def test_dead_nan_does_nothing_and_live_nan_stays_in_its_channel():
    tracker = ChannelLossTracker(ChannelRegistry(NAMES))
    losses = torch.tensor([1.0, math.nan, 3.0, math.inf])
    tracker.update(losses, torch.tensor([1, 0, 1, 0]), ["code", "math"], cu_seqlens=[0, 2, 4])
    check(tracker.reduce(), {"code": [1.0, 1], "math": [3.0, 1]})
    tracker.update(losses, None, ["code", "math"], cu_seqlens=[0, 2, 4])
    stats = tracker.reduce()
    assert math.isnan(stats["code"].mean)
    assert stats["math"] == ChannelStat(math.inf, 2, math.inf)
    assert tracker.reduce() == {}  # zeroed, not multiplied by zero


def test_ids_outside_the_vocabulary_are_ignored():
    tracker = ChannelLossTracker(ChannelRegistry(NAMES))
    tracker.update(torch.ones(4), None, torch.tensor([-1, 99, 1, 2**40]), cu_seqlens=[0, 1, 2, 3, 4])
    check(tracker.reduce(), {"math": [1.0, 1]})


def test_losses_are_detached_and_untouched():
    tracker = ChannelLossTracker(ChannelRegistry(NAMES))
    weight = torch.ones(4, requires_grad=True)
    losses = weight * torch.arange(4.0)
    version = losses._version
    tracker.update(losses, None, ["web"])
    losses.sum().backward()
    assert losses._version == version
    assert weight.grad.tolist() == [0.0, 1.0, 2.0, 3.0]
    check(tracker.reduce(), {"web": [6.0, 4]})


def test_mode_follows_gradients_and_modes_never_mix():
    tracker = ChannelLossTracker(ChannelRegistry(NAMES))
    tracker.update(torch.ones(1), None, ["web"])
    with torch.no_grad():
        tracker.update(torch.full((2,), 2.0), None, ["web"])
    with torch.inference_mode():
        tracker.update(torch.full((2,), 3.0), None, ["web"])
        tracker.update(torch.full((1,), 4.0), None, ["web"], mode="train")
    tracker.update(torch.full((1,), 5.0), None, ["web"], mode="test")
    check(tracker.reduce("test"), {"web": [5.0, 1]})
    check(tracker.reduce("eval"), {"web": [10.0, 4]})
    check(tracker.reduce("train"), {"web": [5.0, 2]})
    assert [tracker.reduce(mode) for mode in ("test", "eval", "train", "unknown")] == [{}] * 4


@pytest.mark.parametrize("grow", [False, True])
def test_sums_born_in_inference_mode_live_on(grow):
    tracker = ChannelLossTracker(ChannelRegistry(grow=True) if grow else ChannelRegistry(NAMES))
    with torch.inference_mode():
        tracker.begin_step()
        tracker.update(torch.ones(1), None, ["web"])
        tracker.commit_step()
        if grow:
            tracker.update(torch.zeros(20, 1), None, [f"c{i}" for i in range(20)])  # makes room inside as well
    tracker.update(torch.ones(1), None, ["web"], mode="eval")
    assert tracker.reduce("eval")["web"] == ChannelStat(2.0, 2, 1.0)


def test_steps():
    tracker = ChannelLossTracker(ChannelRegistry(NAMES))

    def add(value, mode="train"):
        tracker.update(torch.tensor([value]), None, ["web"], mode=mode)

    add(1.0)
    tracker.begin_step()
    add(2.0)
    add(20.0, "eval")
    check(tracker.reduce(), {"web": [1.0, 1]})  # the open step is left out
    tracker.commit_step()
    check(tracker.reduce(), {"web": [2.0, 1]})
    check(tracker.reduce("eval"), {"web": [20.0, 1]})
    tracker.begin_step()
    add(4.0)
    tracker.discard_step()
    assert tracker.reduce() == {}
    tracker.begin_step()
    add(8.0)
    tracker.begin_step()  # the iteration runs again
    add(16.0)
    tracker.commit_step()
    add(32.0)
    check(tracker.reduce(), {"web": [48.0, 2]})
    for call in (tracker.commit_step, tracker.discard_step):
        with pytest.raises(RuntimeError, match="without begin_step"):
            call()


def test_a_growing_step_may_bring_new_channels():
    tracker = ChannelLossTracker(ChannelRegistry(grow=True))
    tracker.update(torch.ones(1), None, ["first"])
    tracker.begin_step()
    for i in range(30):
        tracker.update(torch.tensor([float(i)]), None, [f"c{i}"])
    tracker.commit_step()
    check(tracker.reduce(), {"first": [1.0, 1]} | {f"c{i}": [float(i), 1] for i in range(30)})


def test_reset():
    tracker = ChannelLossTracker(ChannelRegistry(NAMES))
    for mode in ("train", "eval"):
        tracker.update(torch.ones(1), None, ["web"], mode=mode)
    tracker.reset("eval")
    assert tracker.reduce("eval") == {}
    tracker.begin_step()
    tracker.update(torch.ones(1), None, ["web"])
    tracker.reset()
    assert tracker.reduce() == {}
    with pytest.raises(RuntimeError, match="without begin_step"):
        tracker.commit_step()


def test_several_values_share_one_pass():
    tracker = ChannelLossTracker(ChannelRegistry(NAMES), num_values=2)
    losses, weights = torch.arange(4.0), torch.tensor([0.5, 1.0, 0.0, 2.0])
    mask = torch.tensor([1, 1, 0, 1])
    expected = {"web": ChannelStat((1.0, 1.5), 2, (0.5, 0.75)), "math": ChannelStat((3.0, 2.0), 1, (3.0, 2.0))}
    for values in ([losses, weights], torch.stack([losses, weights]), torch.stack([losses, weights])[:, None]):
        tracker.update(values, mask, ["web", "math"], cu_seqlens=[0, 2, 4])
        assert tracker.reduce() == {name: expected[name] for name in ("math", "web")}
    tracker.update((losses.view(2, 2), weights.view(2, 2)), mask.view(2, 2), ["web", "math"])
    state = tracker.state_dict()
    assert tracker.reduce() == expected
    tracker.load_state_dict(state)
    assert tracker.reduce() == expected


def test_counts_pass_two_to_the_24_and_sums_keep_their_bits():
    tracker = ChannelLossTracker(ChannelRegistry(NAMES))
    state = {"sums": torch.full((5,), 2.0**24, dtype=torch.float64), "counts": torch.full((5,), 2**53 - 2)}
    tracker.load_state_dict({**tracker.state_dict(), "totals": {"train": state}})
    tracker.update(torch.tensor([1.0]), None, ["web"])
    assert tracker.reduce()["web"] == ChannelStat(2.0**24 + 1, 2**53 - 1, (2.0**24 + 1) / (2**53 - 1))


@pytest.mark.parametrize("grow", [False, True])
def test_state_dict_round_trip(grow):
    def tracker():
        return ChannelLossTracker(ChannelRegistry(grow=True) if grow else ChannelRegistry(NAMES))

    first = tracker()
    first.update(torch.arange(4.0), None, ["web", "math"], cu_seqlens=[0, 2, 4])
    first.update(torch.arange(2.0), None, ["web"], mode="eval")
    first.begin_step()
    first.update(torch.arange(9.0), None, ["web"])  # open: not saved
    buffer = io.BytesIO()
    torch.save(first.state_dict(), buffer)
    buffer.seek(0)
    state = torch.load(buffer, weights_only=True)
    first.commit_step()

    second = tracker()
    if grow:
        second.update(torch.ones(3), None, ["new", "math"], cu_seqlens=[0, 1, 3])  # other slots; sums are replaced
    second.begin_step()
    second.load_state_dict(state)
    with pytest.raises(RuntimeError, match="without begin_step"):
        second.commit_step()
    second.update(torch.ones(1), None, ["math"])
    check(second.reduce(), {"web": [1.0, 2], "math": [6.0, 3]})
    check(second.reduce("eval"), {"web": [1.0, 2]})
    check(first.reduce(), {"web": [37.0, 11], "math": [5.0, 2]})  # its state was a copy


def test_state_of_another_vocabulary_is_refused():
    tracker = ChannelLossTracker(ChannelRegistry(NAMES))
    tracker.update(torch.ones(1), None, ["web"])
    state = tracker.state_dict()
    others = [
        (ChannelLossTracker(ChannelRegistry(NAMES[::-1])), "code, math, web, None, other, but the tracker web, math"),
        (ChannelLossTracker(ChannelRegistry([*NAMES, "more"])), "another vocabulary"),
        (ChannelLossTracker(ChannelRegistry(grow=True)), "belongs to a fixed ChannelRegistry, but .* a growing one"),
        (ChannelLossTracker(ChannelRegistry(NAMES), num_values=2), "num_values=1, but the tracker 2"),
    ]
    for other, message in others:
        before = other.registry.names
        with pytest.raises(ValueError, match=message):
            other.load_state_dict(state)
        assert other.registry.names == before
    with pytest.raises(ValueError, match="version 99"):
        tracker.load_state_dict({**state, "version": 99})
    check(tracker.reduce(), {"web": [1.0, 1]})


def test_names_outside_the_vocabulary_are_reported_once():
    registry = ChannelRegistry(NAMES)
    registry.encode(["before the tracker"])
    tracker = ChannelLossTracker(registry)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tracker.update(torch.ones(2, 1), None, ["web", None])
        tracker.reduce()
    tracker.update(torch.ones(3, 1), None, ["web", "novel", "poem"])
    with pytest.warns(UserWarning, match="2 channel names outside the vocabulary.*'other'"):
        stats = tracker.reduce()
    check(stats, {"web": [1.0, 1], "other": [2.0, 2]})
    tracker.update(torch.ones(1, 1), None, ["novel"])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check(tracker.reduce(), {"other": [1.0, 1]})


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"ids": ["web", "web", "web"]}, ValueError, "3 channel ids for 2 segments"),
        ({"ids": torch.zeros(3, dtype=torch.int32)}, ValueError, "3 channel ids for 2 segments"),
        ({"ids": torch.zeros(2)}, TypeError, "ids must be int32 or int64, but are torch.float32"),
        ({"ids": "web"}, TypeError, "list of channel names, but is 'web'"),
        ({"ids": None}, TypeError, "list of channel names, but is None"),
        ({"mask": torch.ones(3)}, ValueError, "mask must have one element a token, but has 3 for 4 tokens"),
        ({"mask": [1, 1, 1, 1]}, TypeError, "mask must be a Tensor or None, but is a list"),
        ({"cu_seqlens": torch.tensor([0.0, 2.0])}, TypeError, "cu_seqlens must be int32 or int64"),
        ({"cu_seqlens": []}, ValueError, "cu_seqlens must have at least one element"),
        ({"losses": torch.ones(1, 1, 4)}, ValueError, r"\[T\], \[1, T\] or \[B, S\], but are \[1, 1, 4\]"),
        ({"losses": torch.tensor(1.0)}, ValueError, r"but are \[\]"),
        ({"losses": [1.0, 2.0, 3.0, 4.0]}, TypeError, "losses must be a Tensor, but is a list"),
        ({"losses": torch.ones(4, device="meta")}, ValueError, "tracker's device cpu, but are on meta"),
        ({"ids": torch.zeros(2, dtype=torch.int32, device="meta")}, ValueError, "ids must be on the host or on cpu"),
        ({"mode": 3}, TypeError, "mode must be a string"),
        (
            {"losses": torch.ones(2, 2), "cp": ContextParallel("contiguous", 2, 0)},
            ValueError,
            "'contiguous' with cu_seqlens needs one row of losses, but has 2",
        ),
    ],
)
def test_bad_input(change, error, message):
    tracker = ChannelLossTracker(ChannelRegistry(NAMES), device="cpu")
    arguments = {"losses": torch.ones(4), "mask": None, "ids": ["web"], "cu_seqlens": [0, 2, 4], **change}
    with pytest.raises(error, match=message):
        tracker.update(**arguments)
    assert tracker.reduce() == {}


def test_bad_construction():
    with pytest.raises(TypeError, match="registry must be a ChannelRegistry, but is a list"):
        ChannelLossTracker(NAMES)
    with pytest.raises(ValueError, match="num_values must be at least 1"):
        ChannelLossTracker(ChannelRegistry(NAMES), num_values=0)
    tracker = ChannelLossTracker(ChannelRegistry(NAMES), num_values=2)
    with pytest.raises(ValueError, match=r"losses must be \[2, ...\] \(num_values\), but are \[4\]"):
        tracker.update(torch.ones(4), None, ["web"])
    with pytest.raises(TypeError, match="mode must be a string"):
        tracker.reduce(None)


def test_update_is_one_operator_call_and_reads_nothing():
    tracker = ChannelLossTracker(ChannelRegistry(NAMES), device="meta")  # reading a meta tensor raises
    losses = torch.ones(1, 8, device="meta")
    on_host = {"mask": torch.ones(8), "ids": ["web", None], "cu_seqlens": torch.tensor([0, 3, 5, 8])}
    on_device = {
        "mask": torch.ones(8, device="meta"),
        "ids": torch.zeros(2, dtype=torch.int32, device="meta"),
        "cu_seqlens": torch.zeros(4, dtype=torch.int32, device="meta"),
    }
    rows = {"mask": None, "ids": torch.zeros(1, dtype=torch.int64, device="meta")}
    for arguments, copies in [(on_host, 3), (on_device, 0), (rows, 0)]:
        tracker.update(losses, **arguments)  # makes the accumulators and the offsets of rows
        with HostReads() as reads, Operators() as operators:
            tracker.update(losses, **arguments)
        assert operators.count("segscatter::segment_scatter_accumulate_") == 1
        assert operators.count("aten::_local_scalar_dense") == 0
        assert reads.count == 0
        assert operators.collectives == []
        moves = [(args, kwargs) for name, args, kwargs in operators.calls if name == "aten::_to_copy"]
        assert len(moves) == copies
        for args, kwargs in moves:
            assert (args[0].device.type, kwargs["device"].type, kwargs["non_blocking"]) == ("cpu", "meta", True)
        if arguments is rows:
            assert len(operators.calls) == 3  # detach, view and the operator


def test_reduce_reads_once():
    tracker = ChannelLossTracker(ChannelRegistry(NAMES))
    for _ in range(2):
        tracker.update(torch.ones(4), None, ["web"])
        with HostReads() as reads, Operators() as operators:
            tracker.reduce()
        assert reads.count == 1
        assert operators.count("aten::_local_scalar_dense") == 0


class CpuTensor:
    """Stands for a host tensor in a process with CUDA."""

    def __init__(self, pinned):
        self.device = torch.device("cpu")
        self.pinned = pinned
        self.calls = []

    def is_pinned(self):
        return self.pinned

    def pin_memory(self):
        self.calls.append("pin")
        return self

    def to(self, device, non_blocking):
        self.calls.append((device, non_blocking))
        return self


def test_host_tensors_are_pinned_before_they_travel_to_cuda():
    cuda = torch.device("cuda", 1)
    tensor = CpuTensor(pinned=False)
    tracker_module._to_device(tensor, cuda, "ids")
    assert tensor.calls == ["pin", (cuda, True)]
    tensor = CpuTensor(pinned=True)
    tracker_module._to_device(tensor, cuda, "ids")
    assert tensor.calls == [(cuda, True)]
    tensor = CpuTensor(pinned=False)
    tracker_module._to_device(tensor, torch.device("cpu"), "ids")
    assert tensor.calls == []


def test_device_is_that_of_the_first_losses():
    tracker = ChannelLossTracker(ChannelRegistry(NAMES))
    tracker.update(torch.ones(2, device="meta"), None, torch.zeros(1, dtype=torch.int32))
    assert tracker.device.type == "meta"
    with pytest.raises(ValueError, match="tracker's device meta, but are on cpu"):
        tracker.update(torch.ones(2), None, ["web"])


def test_a_tracker_can_be_copied_with_its_sums():
    tracker = ChannelLossTracker(ChannelRegistry(NAMES))
    tracker.update(torch.ones(2), None, ["web"])
    other = copy.deepcopy(tracker)
    other.update(torch.ones(2), None, ["web"])
    check(tracker.reduce(), {"web": [2.0, 2]})
    check(other.reduce(), {"web": [4.0, 4]})


def test_a_growing_vocabulary_keeps_sums_when_it_outgrows_its_room():
    tracker = ChannelLossTracker(ChannelRegistry(grow=True))
    expected = {}
    for i in range(100):
        tracker.update(torch.tensor([float(i)]), None, [f"c{i % 70}"])
        entry = expected.setdefault(f"c{i % 70}", [0.0, 0])
        entry[0] += i
        entry[1] += 1
    check(tracker.reduce(), expected)


def test_bad_states_change_nothing() -> None:
    tracker = ChannelLossTracker(ChannelRegistry(["a", "b"]))
    tracker.update(torch.tensor([1.0, 2.0]), None, ["a", "b"], cu_seqlens=[0, 1, 2], mode="train")
    good = tracker.state_dict()
    wrong = {"sums": torch.ones(2), "counts": torch.ones(2, dtype=torch.int64)}
    negative = {"sums": torch.ones(4), "counts": -torch.ones(4, dtype=torch.int64)}
    bad = [{"version": good["version"]}]
    bad += [{**good, "totals": {**good["totals"], "eval": totals}} for totals in (wrong, {}, {"sums": [1]}, negative)]
    for state in bad:
        with pytest.raises(ValueError, match="state"):
            tracker.load_state_dict(state)
    assert tracker.reduce("train")["b"].sum == 2


def test_default_device_and_copies() -> None:
    with torch.device("meta"):
        tracker = ChannelLossTracker(ChannelRegistry(["a", "b"]), device="cpu")
        losses = torch.ones(3, device="cpu")
        tracker.update(losses, None, ["a", "b"], cu_seqlens=[0, 1, 3], mode="train")
        tracker.load_state_dict(tracker.state_dict())
        assert tracker.reduce("train")["b"].count == 2


def test_a_copy_does_not_count_unseen_names_again() -> None:
    registry = ChannelRegistry(["a"])
    registry.encode(["x", "y"])
    twin = copy.deepcopy(ChannelLossTracker(registry))
    twin.update(torch.ones(2), None, ["a"], mode="train")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert twin.reduce("train")["a"].count == 2
