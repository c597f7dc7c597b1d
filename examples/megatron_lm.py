# SPDX-License-Identifier: Apache-2.0
"""Channel losses in Megatron-LM: what to add to pretrain_gpt.py, where get_batch and loss_func are its own."""

# ruff: noqa: F821  (get_batch and loss_func)
from functools import partial

from megatron.training import get_args, get_tensorboard_writer, get_wandb_writer, print_rank_last, training
from segscatter import ChannelLossTracker, ChannelRegistry
from segscatter.megatron import (
    data_parallel_group,
    log_channel_losses,
    wrap_loss_func,
    wrap_train_step,
    wrap_training_log,
)

tracker = ChannelLossTracker(ChannelRegistry(["code", "math", "web"]), group=data_parallel_group)


# 1. The loss function. channels: one for every document, names or int32 ids from tracker.registry.encode(names).
def forward_step(data_iterator, model):
    tokens, labels, loss_mask, attention_mask, position_ids, packed_seq_params, channels = get_batch(data_iterator)
    output_tensor = model(
        tokens, position_ids, attention_mask, labels=labels, loss_mask=loss_mask, packed_seq_params=packed_seq_params
    )
    return output_tensor, wrap_loss_func(
        partial(loss_func, loss_mask, model=model),
        tracker,
        channels,
        loss_mask=loss_mask,
        packed_seq_params=packed_seq_params,
    )


# 2. The training log, every --log-interval iterations. Iterations that are skipped do not count.
training.train_step = wrap_train_step(training.train_step, tracker)
training.training_log = wrap_training_log(
    training.training_log,
    tracker,
    lambda: get_args().log_interval,
    tensorboard=get_tensorboard_writer,
    wandb=get_wandb_writer,
    print_line=print_rank_last,
)


# 3. Evaluation, which is kept apart from training.
def evaluate_and_print_results(prefix, forward_step_func, data_iterator, model, iteration, *args, **kwargs):
    evaluate_as_before(prefix, forward_step_func, data_iterator, model, iteration, *args, **kwargs)
    log_channel_losses(
        tracker,
        iteration,
        tensorboard=get_tensorboard_writer(),
        wandb=get_wandb_writer(),
        mode="eval",
        prefix="eval_loss_",
    )


evaluate_as_before = training.evaluate_and_print_results
training.evaluate_and_print_results = evaluate_and_print_results
