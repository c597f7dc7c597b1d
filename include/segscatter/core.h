// SPDX-License-Identifier: Apache-2.0
/// The torch-free core of segscatter: types, contracts and entry points.
///
/// One operation and its adjoint over T tokens that S + 1 offsets cut into documents ("segments"):
///
///     reduce:  sums[k][g]   = sum of values[k][t] over the live tokens t of the segments of group g
///              counts[g]    = number of those tokens
///     gather:  out[k][t]    = source[k][group of t] if t is live and belongs to a group, else 0
///
/// Nothing here throws, allocates or synchronises. Pointers are host pointers in the `_cpu` functions and device
/// pointers in the `_cuda` functions. What arrays hold is never trusted: offsets and ids may be any numbers, and the
/// result is then some result, found in bounds and in finite time.
#pragma once

#include <cstddef>
#include <cstdint>

struct CUstream_st;  // what cudaStream_t points to; spelled out so that this header needs no CUDA headers

namespace segscatter::core {

/// What a function has to say. `message` is a string literal, or what cudaGetErrorString gave.
struct Status {
  enum class Code : int { kOk, kInvalidArgument, kWorkspaceTooSmall, kUnsupportedDevice, kCudaError };
  Code code = Code::kOk;
  const char* message = "";
  constexpr bool ok() const { return code == Code::kOk; }
};

enum class FloatType : std::uint8_t { kFloat16, kBFloat16, kFloat32, kFloat64 };
enum class IndexType : std::uint8_t { kInt32, kInt64 };
enum class MaskType : std::uint8_t { kNone, kUInt8, kInt8, kInt32, kInt64, kFloat32 };  // bool is kUInt8

/// Size in bytes of one element.
constexpr std::size_t size_of(FloatType type) {
  return type == FloatType::kFloat64 ? 8 : type == FloatType::kFloat32 ? 4 : 2;
}

/// An array of int32 or int64.
struct IndexArray {
  const void* data = nullptr;
  IndexType type = IndexType::kInt64;
};

/// Which part of a context-parallel row is held here: the four layouts that trainers use.
///   kNone         the whole row
///   kPerDocument  every document is cut into 2 * size pieces, rank r holds pieces r and 2 * size - 1 - r of each
///                 (Megatron THD, TransformerEngine); document lengths are multiples of 2 * size
///   kPerSequence  the whole row is cut into 2 * size pieces, rank r holds pieces r and 2 * size - 1 - r
///   kContiguous   rank r holds the r-th of `size` equal parts
enum class ContextParallelLayout : std::uint8_t { kNone, kPerDocument, kPerSequence, kContiguous };

/// Maps an offset in the global row to the offset among the tokens held here:
///     local(x) = sum over both windows of clamp(max(x, 0) / divisor - begin, 0, length)
/// The map never decreases, so it can be applied to offsets instead of tokens. `begin`, `length` >= 0, `divisor` > 0,
/// and the two lengths add up to the number of tokens held here.
struct OffsetMap {
  struct Window {
    std::int64_t begin = 0;
    std::int64_t length = 0;
  };
  std::int64_t divisor = 1;
  Window windows[2];
};

/// The map of one layout; `num_tokens` is the number of tokens held here (even for kPerSequence, unless
/// one rank holds all).
constexpr OffsetMap make_offset_map(ContextParallelLayout layout, std::int64_t size, std::int64_t rank,
                                    std::int64_t num_tokens) {
  using Layout = ContextParallelLayout;
  switch (layout) {
    case Layout::kPerDocument:
      return {size, {{0, num_tokens}, {0, 0}}};
    case Layout::kPerSequence: {
      const std::int64_t half = num_tokens / 2;
      return {1, {{rank * half, half}, {(2 * size - 1 - rank) * half, num_tokens - half}}};
    }
    case Layout::kContiguous:
      return {1, {{rank * num_tokens, num_tokens}, {0, 0}}};
    case Layout::kNone:
      break;
  }
  return {1, {{0, num_tokens}, {0, 0}}};
}

/// How tokens belong to segments and segments to groups.
struct Segments {
  IndexArray offsets;    ///< [num_segments + 1], non-decreasing, in the global row
  IndexArray group_ids;  ///< [num_segments]; null: segment d is group d. Outside [0, num_groups): dropped
  std::int64_t num_segments = 0;
  std::int64_t num_groups = 0;
  OffsetMap map;
};

/// Token t is live iff mask[t] != ignore_index, compared as numbers; all are live where `type` is kNone.
struct Mask {
  const void* data = nullptr;  ///< [num_tokens]
  MaskType type = MaskType::kNone;
  std::int64_t ignore_index = 0;
};

/// Arguments of the reduction. Values of dead tokens are never used in arithmetic, so NaN or Inf there do no harm.
/// Values of 32 bits and less are summed with the quality of float64 and rounded once, float64 in float64.
struct ReduceArgs {
  const void* values = nullptr;  ///< element (k, t) at values[k * row_stride + t]
  FloatType value_type = FloatType::kFloat32;
  std::int64_t num_rows = 1;    ///< K
  std::int64_t num_tokens = 0;  ///< T
  std::int64_t row_stride = 0;  ///< in elements
  Segments segments;
  Mask mask;
  void* sums = nullptr;                      ///< [num_rows, num_groups], contiguous
  FloatType sum_type = FloatType::kFloat32;  ///< kFloat32 or kFloat64
  std::int64_t* counts = nullptr;            ///< [num_groups]
  bool accumulate = false;                   ///< add to what `sums` and `counts` hold, instead of overwriting it
};

/// Arguments of the adjoint.
struct GatherArgs {
  const void* source = nullptr;  ///< [num_rows, num_groups], contiguous
  FloatType source_type = FloatType::kFloat32;
  std::int64_t num_rows = 1;
  std::int64_t num_tokens = 0;
  Segments segments;
  Mask mask;
  void* out = nullptr;  ///< [num_rows, num_tokens], contiguous
  FloatType out_type = FloatType::kFloat32;
};

// ---- CPU
// -------------------------------------------------------------------------------------------------------------

/// Runs task(argument, i) for every i in [0, tasks), in any order and on any threads, and returns when all are done.
/// The default runs them one after the other. Results never depend on `workers`.
struct Executor {
  int workers = 1;
  void (*run)(void* context, int tasks, void (*task)(void* argument, int index), void* argument) = nullptr;
  void* context = nullptr;
};

/// Instruction sets that the CPU kernels know. All give the same bits.
enum class CpuCapability : int { kDefault, kAvx2, kAvx512 };

/// The best one of this machine and build, or less where the environment variable SEGSCATTER_CPU_CAPABILITY
/// (default, avx2, avx512) asks for less.
CpuCapability cpu_capability();

/// Bytes of scratch memory (64-byte aligned) that reduce_cpu needs.
std::size_t reduce_cpu_workspace(const ReduceArgs& args, const Executor& executor = {});

Status reduce_cpu(const ReduceArgs& args, void* workspace, std::size_t workspace_bytes, const Executor& executor = {});
Status reduce_cpu(const ReduceArgs& args, void* workspace, std::size_t workspace_bytes, const Executor& executor,
                  CpuCapability capability);

Status gather_cpu(const GatherArgs& args, const Executor& executor = {});

// ---- CUDA
// ------------------------------------------------------------------------------------------------------------

/// What has to be known of a device to plan launches on it.
struct CudaDevice {
  int compute_capability = 0;       ///< 10 * major + minor; of the kernels' code where that is older than the device
  int shared_memory_per_block = 0;  ///< in bytes, what a kernel may ask for
  int max_cluster_blocks = 1;       ///< 1 without thread block clusters; 8, or 16 where the device can place them
};

/// The ways of the reduction on a device; plan.h describes them.
enum class ReducePath : std::uint8_t { kAutomatic, kOneLaunch, kTwoLaunches, kDocuments };

/// Overrides of what the plan would choose, for tests and measurements. Of the device, the sums' last bits depend on
/// the path, on the cluster's size, and in one launch of 17 to 28 groups on whether its shared memory holds an entry
/// per lane and group (not at compute capability 7.5).
struct LaunchChoice {
  ReducePath path = ReducePath::kAutomatic;
  int cluster_blocks = 0;  ///< of kOneLaunch: 1, 2, 4, 8 or 16; 0: the plan chooses
};

/// Describes the current device, and prepares the kernels for it (limits on shared memory and cluster size): call it
/// once per device and process, before the first of the calls below, and keep the result. kUnsupportedDevice where this
/// build has no code for the device.
Status query_cuda_device(CudaDevice& device);

/// Bytes of scratch memory on the device (256-byte aligned, contents undefined) that reduce_cuda needs; may be 0.
std::size_t reduce_cuda_workspace(const ReduceArgs& args, const CudaDevice& device, const LaunchChoice& choice = {});

/// Enqueues the reduction: one or two kernels, no copies, fills or synchronisation, so it can be captured into a graph.
/// `args` may go when the call returns, the arrays and the workspace only when the stream has got there.
/// The message of kCudaError names the kernel; it stays valid until the calling thread's next failure.
Status reduce_cuda(const ReduceArgs& args, const CudaDevice& device, const LaunchChoice& choice, void* workspace,
                   std::size_t workspace_bytes, CUstream_st* stream);

/// Enqueues the adjoint: one kernel.
Status gather_cuda(const GatherArgs& args, const CudaDevice& device, CUstream_st* stream);

}  // namespace segscatter::core
