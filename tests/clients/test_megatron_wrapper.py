# SPDX-License-Identifier: Apache-2.0
"""The contracts of segscatter.megatron that need no second process."""

from __future__ import annotations

import itertools
import math
import random
from types import SimpleNamespace

import pytest
import torch
from segscatter import ChannelLossTracker, ChannelRegistry, ContextParallel
from segscatter.megatron import (
    BatchTap,
    channel_means,
    context_parallel,
    log_channel_losses,
    wrap_loss_func,
    wrap_train_step,
    wrap_training_log,
)


def tracker(*names: str, num_values: int = 1) -> ChannelLossTracker:
    return ChannelLossTracker(ChannelRegistry(names or ["a", "b"]), num_values=num_values)


def summed(output_tensor):
    return output_tensor.sum(), torch.tensor(output_tensor.numel()), {"lm loss": torch.ones(2)}


def totals(tracker: ChannelLossTracker, mode: str = "train") -> dict[str, tuple[float, int]]:
    return {name: (stat.sum, stat.count) for name, stat in tracker.reduce(mode).items()}


def test_what_the_loss_function_returns_is_passed_on():
    loss, num_tokens, report = torch.tensor(3.0), torch.tensor(4), {"lm loss": torch.ones(2)}
    for outputs in [(loss, num_tokens, report), (loss, report)]:
        wrapped = wrap_loss_func(lambda _, outputs=outputs: outputs, tracker(), ["a"])
        result = wrapped(torch.ones(1, 4))
        assert len(result) == len(outputs)
        assert all(a is b for a, b in zip(result, outputs, strict=True))


def test_reported_keys_share_no_storage_with_the_loss():
    losses = torch.arange(4.0)[None]
    wrapped = wrap_loss_func(lambda x: (x, torch.tensor(4), {}), tracker(), ["a"], report="keys")
    loss, _, report = wrapped(losses)
    loss /= 0  # the schedule divides in place
    assert report["loss_a"].tolist() == [6.0, 4.0]
    assert list(report) == ["loss_a", "loss_b", "loss_None", "loss_other"]


@pytest.mark.parametrize(
    "boundaries",
    [
        {"cu_seqlens_q": torch.tensor([0, 2, 6])},
        {"cu_seqlens_q": torch.tensor([[0, 2, 6, 6, 6]], dtype=torch.int32)},
        {"cu_seqlens_q": torch.tensor([0, 1, 5]), "cu_seqlens_q_padded": torch.tensor([0, 2, 6])},
        {"cu_seqlens_q": torch.tensor([0, 2, 6]), "cu_seqlens_q_padded": None},
        {"cu_seqlens": torch.tensor([0, 2, 6, -1, -1]), "cu_seqlens_argmin": torch.tensor(3)},
    ],
)
@pytest.mark.parametrize("kind", [dict, SimpleNamespace])
def test_boundaries(boundaries, kind):
    t = tracker()
    losses = torch.arange(8.0)[None]  # two tokens behind the last document
    wrap_loss_func(summed, t, ["a", "b"], packed_seq_params=kind(**boundaries))(losses)
    assert totals(t) == {"a": (1.0, 2), "b": (14.0, 4)}


def test_fewer_channels_than_segments_and_ids_in_place_of_names():
    t = tracker()
    boundaries = {"cu_seqlens_q": torch.tensor([0, 2, 6, 8])}
    wrap_loss_func(summed, t, torch.tensor([1]), packed_seq_params=boundaries)(torch.arange(8.0)[None])
    assert totals(t) == {"b": (1.0, 2)}
    wrap_loss_func(summed, t, None, packed_seq_params=boundaries)(torch.arange(8.0)[None])
    assert totals(t) == {"None": (28.0, 8)}


def test_mask_that_comes_with_the_losses():
    t = tracker()
    mask = torch.tensor([[1.0, 0.0, 1.0, 1.0]])
    losses = torch.tensor([[1.0, math.nan, 3.0, 4.0]])
    boundaries = {"cu_seqlens_q": torch.tensor([0, 2, 4])}
    wrapped = wrap_loss_func(lambda out: (out[0].sum(), {}), t, ["a", "b"], packed_seq_params=boundaries)
    wrapped((losses, mask))
    assert totals(t) == {"a": (1.0, 1), "b": (7.0, 2)}


def test_labels_as_mask():
    t = tracker()
    labels = torch.tensor([[5, -100, 7, 0]])
    wrap_loss_func(summed, t, ["a"], loss_mask=labels, ignore_index=-100)(torch.arange(4.0)[None])
    assert totals(t) == {"a": (5.0, 3)}


@pytest.mark.parametrize("layout", ["per_document", "per_sequence", "contiguous"])
@pytest.mark.parametrize("size", [2, 4])
def test_context_parallel_layouts_add_up(layout, size):
    rng = random.Random(f"{layout} {size}")
    multiple = 2 * size
    lengths = [multiple * rng.randint(1, 4) for _ in range(5)]
    offsets = [sum(lengths[:d]) for d in range(6)]
    if layout != "per_document":  # these cut documents anywhere
        offsets = [0, *sorted(rng.sample(range(1, offsets[-1]), 4)), offsets[-1]]
    channels = [rng.choice(["a", "b", None]) for _ in range(5)]
    losses = [rng.random() for _ in range(offsets[-1])]
    mask = [rng.random() < 0.6 for _ in losses]
    expected: dict[str, list] = {}
    for d, channel in enumerate(channels):
        total = expected.setdefault(str(channel), [0.0, 0])
        for t in range(offsets[d], offsets[d + 1]):
            if mask[t]:
                total[0] += losses[t]
                total[1] += 1
    found: dict[str, list] = {}
    for rank in range(size):
        held = tokens_of_rank(layout, size, rank, offsets)
        t = tracker()
        wrap_loss_func(
            summed, t, channels, loss_mask=torch.tensor([[mask[i] for i in held]]),
            packed_seq_params={"cu_seqlens_q": torch.tensor(offsets)}, cp=ContextParallel(layout, size, rank),
        )(torch.tensor([[losses[i] for i in held]]))  # fmt: skip
        for name, (s, c) in totals(t).items():
            total = found.setdefault(name, [0.0, 0])
            total[0] += s
            total[1] += c
    assert {k: v[1] for k, v in found.items()} == {k: v[1] for k, v in expected.items() if v[1]}
    assert {k: v[0] for k, v in found.items()} == pytest.approx(
        {k: v[0] for k, v in expected.items() if v[1]}, rel=1e-6
    )


def tokens_of_rank(layout: str, size: int, rank: int, offsets: list[int]) -> list[int]:
    """The global tokens that a context-parallel rank holds, by Megatron's rules."""
    tokens = list(range(offsets[-1]))
    if layout == "contiguous":
        part = len(tokens) // size
        return tokens[rank * part : (rank + 1) * part]
    pieces = [tokens] if layout == "per_sequence" else [tokens[a:b] for a, b in itertools.pairwise(offsets)]
    held = []
    for piece in pieces:
        h = len(piece) // (2 * size)
        for chunk in (rank, 2 * size - 1 - rank):
            held += piece[chunk * h : (chunk + 1) * h]
    return held


def test_context_parallel_of_a_micro_batch():
    """With hybrid context parallelism every micro-batch brings its own group; without Megatron there is none."""
    assert context_parallel() == ContextParallel()
    assert context_parallel(SimpleNamespace(local_cp_size=1, cp_group=None)) == ContextParallel()


def test_fractional_masks():
    losses = torch.tensor([[1.0, 2.0, math.nan, 4.0]])
    weights = torch.tensor([[0.5, 2.0, 0.0, 0.25]])
    boundaries = {"cu_seqlens_q": torch.tensor([0, 3, 4])}
    options = {"loss_mask": weights, "packed_seq_params": boundaries}
    t = tracker()
    wrap_loss_func(summed, t, ["a", "b"], **options)(losses)
    assert channel_means(t.reduce()) == {"loss_a": 1.5, "loss_b": 4.0}
    wrap_loss_func(summed, t, ["a", "b"], fractional_mask="tokens", **options)(losses)
    assert channel_means(t.reduce()) == {"loss_a": 4.5 / 2, "loss_b": 1.0}
    t = tracker(num_values=2)
    wrapped = wrap_loss_func(summed, t, ["a", "b"], fractional_mask="weights", report="keys", **options)
    _, _, report = wrapped(losses)
    assert channel_means(t.reduce()) == {"loss_a": 4.5 / 2.5, "loss_b": 4.0}
    assert report["loss_a"].tolist() == [4.5, 2.5]
    assert report["loss_b"].tolist() == [1.0, 0.25]


def test_fractional_masks_of_narrow_losses():
    """The product with the mask is taken in float32."""
    t = tracker()
    losses = torch.full((1, 2), 1 + 1 / 128, dtype=torch.bfloat16)
    wrap_loss_func(summed, t, ["a"], fractional_mask="tokens", loss_mask=torch.full((1, 2), 0.376))(losses)
    assert t.reduce()["a"].mean == pytest.approx(0.376 * (1 + 1 / 128), rel=1e-6)


def test_evaluation_is_kept_apart():
    t = tracker()
    wrapped = wrap_loss_func(summed, t, ["a"])
    wrapped(torch.ones(1, 4))
    with torch.no_grad():
        wrapped(torch.full((1, 2), 3.0))
    assert totals(t, "eval") == {"a": (6.0, 2)}
    assert totals(t) == {"a": (4.0, 4)}


def test_non_loss_data_is_passed_on_and_not_counted():
    t = tracker()
    wrapped = wrap_loss_func(lambda out, non_loss_data=False: [out] if non_loss_data else summed(out), t, ["a"])
    assert isinstance(wrapped(torch.ones(1, 4), non_loss_data=True), list)
    assert totals(t) == {}


def test_skipped_and_failed_iterations_do_not_count():
    t = tracker()

    def train_step(value, skipped, error=None):
        wrap_loss_func(summed, t, ["a"])(torch.full((1, 2), value))
        if error:
            raise error
        return {}, skipped, 0.5

    step = wrap_train_step(train_step, t)
    assert step(1.0, 0) == ({}, 0, 0.5)
    assert step(100.0, 1) == ({}, 1, 0.5)
    with pytest.raises(KeyError):
        step(100.0, 0, error=KeyError())
    step(3.0, False)
    assert totals(t) == {"a": (8.0, 4)}


def test_train_step_of_another_form_is_refused():
    with pytest.raises(TypeError, match="train_step must return"):
        wrap_train_step(lambda: None, tracker())()


def test_training_log():
    t = tracker()
    scalars, lines, logged = [], [], []
    writer = SimpleNamespace(add_scalar=lambda *args: scalars.append(args))
    wandb = SimpleNamespace(log=lambda values, step: logged.append((values, step)))

    def training_log(loss_dict, total_loss_dict, learning_rate, iteration, skipped_iter):
        return f"logged {iteration}"

    log = wrap_training_log(
        training_log, t, lambda: 2, tensorboard=lambda: writer, wandb=lambda: wandb, print_line=lines.append
    )
    wrapped = wrap_loss_func(summed, t, ["a"])
    for iteration in range(1, 5):
        if iteration != 4:
            wrapped(torch.full((1, 1), float(iteration)))
        assert log({}, {}, 1e-3, iteration, skipped_iter=0) == f"logged {iteration}"
    assert scalars == [("loss_a", 1.5, 2), ("loss_a", 3.0, 4)]
    assert logged == [({"loss_a": 1.5}, 2), ({"loss_a": 3.0}, 4)]
    assert lines == [" iteration 2 | loss_a: 1.500000E+00", " iteration 4 | loss_a: 3.000000E+00"]
    with pytest.raises(TypeError, match="iteration"):
        wrap_training_log(lambda step: None, t, 1)


def test_log_helper_merges_into_a_dict():
    t = tracker()
    wrap_loss_func(summed, t, ["a"])(torch.ones(1, 1))
    logs = {"lr": 1.0}
    assert log_channel_losses(t, 3, 2, logs=logs) == {}
    assert log_channel_losses(t, 4, 2, logs=logs, prefix="channel/") == {"channel/a": 1.0}
    assert logs == {"lr": 1.0, "channel/a": 1.0}


def test_batch_tap():
    tap = BatchTap(iter([{"channel": ["a"]}, {"channel": ["b"]}]))
    assert next(tap) == {"channel": ["a"]} == tap.batch
    assert next(tap) is tap.batch
    with pytest.raises(StopIteration):
        next(tap)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"fractional_mask": "mean"}, "fractional_mask must be None, 'tokens' or 'weights', but is 'mean'"),
        ({"report": "all"}, "report must be None or 'keys'"),
        ({"fractional_mask": "weights"}, "needs num_values=2, but it is 1"),
    ],
)
def test_wrong_options(options, message):
    with pytest.raises(ValueError, match=message):
        wrap_loss_func(summed, tracker(), ["a"], **options)


def test_wrong_arguments():
    with pytest.raises(ValueError, match="fixed ChannelRegistry"):
        wrap_loss_func(summed, ChannelLossTracker(ChannelRegistry(grow=True)), ["a"], report="keys")
    losses = torch.ones(1, 4)
    with pytest.raises(ValueError, match="has none of them"):
        wrap_loss_func(summed, tracker(), ["a"], packed_seq_params={"offsets": 1})(losses)
    with pytest.raises(ValueError, match=r"\[N\] or \[1, N\], but has \[2, 2\]"):
        wrap_loss_func(summed, tracker(), ["a"], packed_seq_params={"cu_seqlens_q": torch.zeros(2, 2).int()})(losses)
    with pytest.raises(ValueError, match="returned float"):
        wrap_loss_func(lambda _: 1.0, tracker(), ["a"])(losses)
    with pytest.raises(ValueError, match="returned 4 elements"):
        wrap_loss_func(lambda _: (1, 2, 3, {}), tracker(), ["a"])(losses)
    with pytest.raises(ValueError, match="2 channel ids for 1 segments"):
        wrap_loss_func(summed, tracker(), torch.tensor([0, 1]))(losses)
    with pytest.raises(ValueError, match="needs a loss_mask"):
        wrap_loss_func(summed, tracker(), ["a"], fractional_mask="tokens")(losses)
    with pytest.raises(ValueError, match="log_interval must be at least 1"):
        log_channel_losses(tracker(), 1, 0)
