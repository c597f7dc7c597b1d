// SPDX-License-Identifier: Apache-2.0
// Without torch: the mean loss of every channel of a file with one document a line, a channel and its tokens' losses,
//
//     code 0.25 1.5 0.75
//     prose 2.0 nan
//
// on several threads. "nan" is a token without a loss: it is masked.
#include <segscatter/core.h>

#include <atomic>
#include <cmath>
#include <cstdio>
#include <fstream>
#include <map>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

namespace core = segscatter::core;

namespace {

/// Documents one after the other, as the core wants them.
struct Packed {
  std::vector<float> losses;                   // [T]
  std::vector<std::uint8_t> mask;              // [T], 0 where there is no loss
  std::vector<std::int64_t> cu_seqlens = {0};  // [S + 1]
  std::vector<std::int32_t> ids;               // [S], the channel of every document
  std::vector<std::string> channels;           // [G]
};

Packed read(std::istream& file) {
  Packed packed;
  std::map<std::string, std::int32_t> slots;
  for (std::string line; std::getline(file, line);) {
    std::istringstream words(line);
    std::string channel, word;
    if (!(words >> channel)) continue;
    const auto [slot, is_new] = slots.try_emplace(channel, static_cast<std::int32_t>(slots.size()));
    if (is_new) packed.channels.push_back(channel);
    while (words >> word) {
      packed.losses.push_back(std::stof(word));
      packed.mask.push_back(!std::isnan(packed.losses.back()));
    }
    packed.cu_seqlens.push_back(static_cast<std::int64_t>(packed.losses.size()));
    packed.ids.push_back(slot->second);
  }
  return packed;
}

/// The core starts no threads; it is given them.
void run_on_threads(void* context, int tasks, void (*task)(void*, int), void* argument) {
  std::atomic<int> next = 0;
  const auto work = [&] {
    for (int i = next++; i < tasks; i = next++) task(argument, i);
  };
  std::vector<std::thread> threads(*static_cast<const int*>(context) - 1);
  for (std::thread& thread : threads) thread = std::thread(work);
  work();
  for (std::thread& thread : threads) thread.join();
}

}  // namespace

int main(int argc, char** argv) {
  std::ifstream file(argc == 2 ? argv[1] : "");
  if (!file) {
    std::fprintf(stderr, "usage: channel_means FILE\n");
    return 2;
  }
  const Packed packed = read(file);
  const auto num_tokens = static_cast<std::int64_t>(packed.losses.size());
  const std::size_t num_channels = packed.channels.size();
  std::vector<double> sums(num_channels);
  std::vector<std::int64_t> counts(num_channels);

  core::ReduceArgs args;
  args.values = packed.losses.data();
  args.num_tokens = num_tokens;
  args.segments.offsets = {packed.cu_seqlens.data(), core::IndexType::kInt64};
  args.segments.group_ids = {packed.ids.data(), core::IndexType::kInt32};
  args.segments.num_segments = static_cast<std::int64_t>(packed.ids.size());
  args.segments.num_groups = static_cast<std::int64_t>(num_channels);
  args.segments.map = core::make_offset_map(core::ContextParallelLayout::kNone, 1, 0, num_tokens);
  args.mask = {packed.mask.data(), core::MaskType::kUInt8, /*ignore_index=*/0};
  args.sums = sums.data();
  args.sum_type = core::FloatType::kFloat64;
  args.counts = counts.data();

  int workers = static_cast<int>(std::thread::hardware_concurrency());
  if (workers < 1) workers = 1;
  const core::Executor executor{workers, run_on_threads, &workers};
  struct alignas(64) Line {
    std::byte bytes[64];
  };
  std::vector<Line> workspace(core::reduce_cpu_workspace(args, executor) / sizeof(Line) + 1);
  const core::Status status = core::reduce_cpu(args, workspace.data(), workspace.size() * sizeof(Line), executor);
  if (!status.ok()) {
    std::fprintf(stderr, "channel_means: %s\n", status.message);
    return 1;
  }
  for (std::size_t g = 0; g < num_channels; ++g) {
    if (counts[g] == 0) continue;  // nothing to take a mean of
    std::printf("%s %.9g %lld\n", packed.channels[g].c_str(), sums[g] / static_cast<double>(counts[g]),
                static_cast<long long>(counts[g]));
  }
}
