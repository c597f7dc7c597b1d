# SPDX-License-Identifier: Apache-2.0
"""GRPO on packed samples of a toy: every metric of a micro-batch in one pass, forward and backward.

The policy has one distribution over tokens for every prompt; a sample is rewarded for each token that equals the
prompt's number. Samples have different lengths and lie one behind the other in one row, without padding.

    python examples/rl_grpo.py
"""

import torch
from segscatter.rl import SampleReducer

NUM_PROMPTS, VOCABULARY, SAMPLES_PER_PROMPT, LONGEST = 4, 16, 32, 24
ENTROPY_WEIGHT, KL_WEIGHT, CLIP = 1e-3, 1e-2, 0.2


def sample(logits: torch.Tensor, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Packed tokens ``[T]``, the prompt of every sample ``[S]`` and the samples' lengths ``[S]``."""
    prompts = torch.arange(NUM_PROMPTS).repeat_interleave(SAMPLES_PER_PROMPT)
    lengths = torch.randint(1, LONGEST + 1, prompts.shape, generator=generator)
    probabilities = logits.softmax(-1)[prompts.repeat_interleave(lengths)]
    return torch.multinomial(probabilities, 1, generator=generator).squeeze(1), prompts, lengths


def group_advantages(rewards: torch.Tensor) -> torch.Tensor:
    groups = rewards.view(NUM_PROMPTS, SAMPLES_PER_PROMPT)
    return ((groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-6)).flatten()


def train(steps: int = 40, seed: int = 0) -> list[float]:
    """The mean reward of every step."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.zeros(NUM_PROMPTS, VOCABULARY, requires_grad=True)
    reference = logits.detach().log_softmax(-1)
    optimizer = torch.optim.Adam([logits], lr=0.2)
    history = []
    for step in range(steps):
        with torch.no_grad():
            tokens, prompts, lengths = sample(logits, generator)
        prompt_of_token = prompts.repeat_interleave(lengths)
        mean_of_samples = SampleReducer(lengths)  # all tokens are live; else give loss_masks

        rewards = torch.stack([hits.float().mean() for hits in (tokens == prompt_of_token).split(lengths.tolist())])
        advantages = group_advantages(rewards).repeat_interleave(lengths)

        log_probs = logits.log_softmax(-1)[prompt_of_token]
        chosen = log_probs.gather(1, tokens[:, None]).squeeze(1)
        ratio = (chosen - chosen.detach()).exp()
        surrogate = -torch.minimum(ratio * advantages, ratio.clamp(1 - CLIP, 1 + CLIP) * advantages)
        entropy = -(log_probs.exp() * log_probs).sum(-1)
        to_reference = reference[prompt_of_token, tokens] - chosen
        kl = to_reference.exp() - to_reference - 1

        metrics = torch.stack([surrogate, entropy, kl])  # [K, T]
        policy_loss, entropy_loss, kl_loss = mean_of_samples(metrics) / len(lengths)  # [K]: means over samples
        loss = policy_loss - ENTROPY_WEIGHT * entropy_loss + KL_WEIGHT * kl_loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

        history.append(rewards.mean().item())
        if step % 10 == 0 or step == steps - 1:
            print(
                f"step {step:3d}  reward {history[-1]:.3f}  entropy {entropy_loss.item():.3f}  kl {kl_loss.item():.3f}"
            )
    return history


if __name__ == "__main__":
    train()
