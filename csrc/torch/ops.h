// SPDX-License-Identifier: Apache-2.0
/// The operators with all their arguments, as the dispatcher knows them: for code that needs one to implement another.
#pragma once

#include "segscatter/segscatter.h"

namespace segscatter {

using detail::OptionalDtype;
using detail::OptionalTensor;

// Calls through the dispatcher; in schema.cpp.
detail::ReduceSignature segment_scatter_reduce;
detail::AccumulateSignature segment_scatter_accumulate_;
detail::GatherSignature segment_gather;

}  // namespace segscatter
