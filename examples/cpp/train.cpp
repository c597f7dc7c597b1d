// SPDX-License-Identifier: Apache-2.0
// Trains a small language model on packed text files and follows the loss of every channel:
//
//     train STEPS name=folder...
//
// One call gives both the training loss, through autograd, and the channels' sums, which are added up between logs.
#include <segscatter/segscatter.h>
#include <torch/nn.h>
#include <torch/optim.h>

#include <cstdio>
#include <cstdlib>
#include <exception>

#include "packed_text.h"

namespace {

constexpr std::int64_t kTokens = 2048;  // of a row
constexpr std::int64_t kContext = 6;    // bytes that the model sees
constexpr int kLogs = 4;

/// Predicts a byte from the kContext bytes before it in its document.
struct ModelImpl : torch::nn::Module {
  torch::nn::Embedding embed{nullptr};
  torch::nn::Sequential layers{nullptr};

  ModelImpl() {
    embed = register_module("embed", torch::nn::Embedding(257, 24));  // 256: before the document's first byte
    layers = register_module("layers", torch::nn::Sequential(torch::nn::Linear(24 * kContext, 128), torch::nn::GELU(),
                                                             torch::nn::Linear(128, 256)));
  }

  /// Logits, [T, 256], of tokens [T] in the documents of cu_seqlens [S + 1].
  torch::Tensor forward(const torch::Tensor& tokens, const torch::Tensor& cu_seqlens) {
    const auto position = torch::arange(tokens.size(0));
    const auto document = torch::searchsorted(cu_seqlens, position, /*out_int32=*/false, /*right=*/true) - 1;
    const auto begin = cu_seqlens.index_select(0, document).unsqueeze(1);
    const auto before = position.unsqueeze(1) - torch::arange(kContext, 0, -1);  // [T, kContext]
    const auto context = torch::where(before >= begin, tokens.take(before.clamp_min(0)), 256);
    return layers->forward(embed(context).flatten(1));
  }
};
TORCH_MODULE(Model);

void train(int steps, const std::vector<Channel>& channels) {
  const auto num_channels = static_cast<std::int64_t>(channels.size());
  torch::manual_seed(0);
  std::mt19937 random(0);
  Model model;
  torch::optim::Adam optimizer(model->parameters(), torch::optim::AdamOptions(3e-3));

  auto log_sums = torch::zeros({num_channels}, torch::kDouble);
  auto log_counts = torch::zeros({num_channels}, torch::kLong);
  for (int step = 1; step <= steps; ++step) {
    const PackedRow row = pack(channels, kTokens, random);
    const auto labels = torch::tensor(row.labels), cu_seqlens = torch::tensor(row.cu_seqlens, torch::kInt);
    const auto logits = model->forward(torch::tensor(row.tokens), cu_seqlens);
    const auto losses = torch::nn::functional::cross_entropy(
        logits, labels, torch::nn::functional::CrossEntropyFuncOptions().ignore_index(-100).reduction(torch::kNone));

    const auto [sums, counts] =
        segscatter::segment_scatter_reduce(losses, cu_seqlens, torch::tensor(row.channels, torch::kInt), num_channels,
                                           segscatter::Options().mask(labels).ignore_index(-100));
    optimizer.zero_grad();
    (sums.sum() / counts.sum()).backward();
    optimizer.step();
    log_sums += sums.detach();
    log_counts += counts;

    if (step % (steps / kLogs) == 0) {
      std::printf("step %d", step);
      for (std::int64_t g = 0; g < num_channels; ++g) {
        std::printf("  %s %.4f (%lld)", channels[g].name.c_str(), (log_sums[g] / log_counts[g]).item<double>(),
                    static_cast<long long>(log_counts[g].item<std::int64_t>()));
      }
      std::printf("\n");
      log_sums.zero_();
      log_counts.zero_();
    }
  }
}

}  // namespace

int main(int argc, char** argv) try {
  const int steps = argc > 2 ? std::atoi(argv[1]) : 0;
  if (steps < kLogs) {
    std::fprintf(stderr, "usage: train STEPS name=folder..., with STEPS of %d or more\n", kLogs);
    return 2;
  }
  std::vector<Channel> channels;
  for (int i = 2; i < argc; ++i) channels.push_back(read_channel(argv[i], kTokens / 8));
  train(steps, channels);
} catch (const std::exception& error) {
  std::fprintf(stderr, "train: %s\n", error.what());
  return 1;
}
