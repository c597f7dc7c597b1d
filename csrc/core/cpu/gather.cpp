// SPDX-License-Identifier: Apache-2.0
// The adjoint on the CPU: chunks in parallel, every token written once.
#include "chunks.h"
#include "kernels.h"

namespace segscatter::core {

using namespace detail;

Status gather_cpu(const GatherArgs& args, const Executor& executor) {
  const Segments& segments = args.segments;
  if (args.num_rows < 0 || args.num_tokens < 0 || segments.num_segments < 0 || segments.num_groups < 0) {
    return {Status::Code::kInvalidArgument, "gather_cpu: sizes must not be negative"};
  }
  GatherArgs simplified = args;
  simplified.mask = simplify(args.mask);
  const GatherChunk kernel = find_kernels(args.out_type, simplified.mask.type, cpu_capability()).gather;
  const Chunks chunks(args.num_tokens);
  for_each_chunk(executor, workers_for(executor, chunks.count), chunks.count,
                 [&](int, std::int64_t i) { kernel(simplified, chunks[i]); });
  return {};
}

}  // namespace segscatter::core
