// A register of floats from and to rows of float or bf16, also past the end of a row.
#pragma once

#include "common_vectors.h"

namespace inflight {
namespace {

wide_float load_part(const float* from) { return read<wide_float>(from); }

wide_float load_part(const bf16* from) {
    return (wide_float)(widened(read<wide_half>(from)) << 16);
}

// The first `valid` values (all, or none where it is negative), then zeros.
template <class Source>
wide_float load_up_to(const Source* from, int64_t valid) {
    if (valid >= wide_lanes) return load_part(from);
    Source copy[wide_lanes] = {};
    for (int64_t i = 0; i < valid; ++i) copy[i] = from[i];
    return load_part(copy);
}

void store_part(float* to, wide_float value) { write(to, value); }

void store_part(bf16* to, wide_float value) { write(to, wide_to_bf16(value)); }

}  // namespace
}  // namespace inflight
