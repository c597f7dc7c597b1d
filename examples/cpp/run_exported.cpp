// SPDX-License-Identifier: Apache-2.0
// Runs a model that export_channel_loss.py compiled, without Python, and compares it with the operator itself.
//
// The package calls segscatter's operators by name, so their library must be loaded first. Linking segscatter::torch
// does that (its header keeps the linker from leaving it out); a program that does not know which operators its models
// need can dlopen the path that `python -m segscatter` prints instead.
#include <segscatter/segscatter.h>
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>
#include <torch/types.h>

#include <cstdio>
#include <exception>

int main(int argc, char** argv) try {
  if (argc != 2) {
    std::fprintf(stderr, "usage: run_exported channel_loss.pt2\n");
    return 2;
  }
  torch::inductor::AOTIModelPackageLoader model(argv[1]);

  const std::int64_t num_tokens = 1000;  // other sizes than those it was exported with
  const auto position = torch::arange(num_tokens);
  const auto logits = (torch::outer(position, torch::arange(11)) * 0.37).sin() * 3;
  const auto labels = torch::where(position % 5 == 0, -100, position % 11);
  const auto cu_seqlens = torch::tensor({0, 10, 10, 400, 993}, torch::kLong);
  const auto ids = torch::tensor({2, 0, 0, 1}, torch::kLong);
  const std::vector<at::Tensor> outputs = model.run({logits, labels, cu_seqlens, ids});

  const auto losses = at::cross_entropy_loss(logits, labels, /*weight=*/{}, at::Reduction::None, /*ignore_index=*/-100);
  const auto [sums, counts] = segscatter::segment_scatter_reduce(losses, cu_seqlens, ids, 3,
                                                                 segscatter::Options().mask(labels).ignore_index(-100));
  for (std::int64_t g = 0; g < 3; ++g) {
    std::printf("channel %lld: %.6f (%lld)\n", static_cast<long long>(g), outputs[0][g].item<double>(),
                static_cast<long long>(outputs[1][g].item<std::int64_t>()));
  }
  if (torch::equal(outputs[1], counts) && torch::allclose(outputs[0], sums, 1e-5)) return 0;
  std::fprintf(stderr, "the compiled model and the operator disagree\n");
  return 1;
} catch (const std::exception& error) {
  std::fprintf(stderr, "run_exported: %s\n", error.what());
  return 1;
}
