// Vectors that reach past the end of a row.
#pragma once

#include "common_vectors.h"

namespace inflight {
namespace {

// The first `valid` values (all, or none where it is negative), then zeros.
template <class Source>
f32x16 load_up_to(const Source* from, int64_t valid) {
    if (valid >= lanes) return load(from);
    Source copy[lanes] = {};
    for (int64_t i = 0; i < valid; ++i) copy[i] = from[i];
    return load(copy);
}

template <class Target>
void store_up_to(Target* to, f32x16 value, int64_t valid) {
    if (valid >= lanes) return store(to, value);
    Target copy[lanes];
    store(copy, value);
    for (int64_t i = 0; i < valid; ++i) to[i] = copy[i];
}

}  // namespace
}  // namespace inflight
