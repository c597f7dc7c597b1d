// SPDX-License-Identifier: Apache-2.0
// Uses the LibTorch API: values, gradients, accumulation, gathering, options, and an error.
#include <segscatter/segscatter.h>
#include <segscatter/version.h>
#include <torch/types.h>

#include <iostream>

int main() {
  const auto cu_seqlens = torch::tensor({0, 2, 4}, torch::kInt);
  const auto ids = torch::tensor({1, 0});
  const auto labels = torch::tensor({5, -100, 7, 8});
  const auto losses = torch::tensor({1.0f, 2.0f, 3.0f, 4.0f}, torch::requires_grad());
  const auto options = segscatter::Options().mask(labels).ignore_index(-100).dtype(at::kDouble);

  auto [sums, counts] = segscatter::segment_scatter_reduce(losses, cu_seqlens, ids, 2, options);
  (sums * torch::tensor({1.0, 10.0}, torch::kDouble)).sum().backward();
  const auto spread = segscatter::segment_gather(counts.to(torch::kFloat), cu_seqlens, ids, 4);
  auto totals = torch::zeros({2}, torch::kDouble);
  auto number = torch::zeros({2}, torch::kLong);
  segscatter::segment_scatter_accumulate_(totals, number, losses.detach(), cu_seqlens, std::nullopt,
                                          segscatter::Options().context_parallel("contiguous", 2, 0));
  for (const torch::Tensor& tensor : {sums.detach(), counts, losses.grad(), spread, totals, number}) {
    for (int64_t i = 0; i < tensor.numel(); ++i) std::cout << tensor[i].item<double>() << ' ';
  }
  try {
    segscatter::segment_scatter_reduce(losses, cu_seqlens, torch::tensor({0}), 2);
  } catch (const c10::ValueError& error) {
    std::cout << std::string(error.what()).substr(0, 67);
  }
  const bool same_version = std::string(segscatter::library_version()) == SEGSCATTER_VERSION;
  std::cout << (same_version ? "\n" : " header and library differ in version\n");
}
