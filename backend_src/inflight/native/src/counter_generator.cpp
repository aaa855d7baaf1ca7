// Random numbers addressed by where they are used: draw.py says which.
#include <cstdint>

#include "dispatch.h"

namespace inflight {
namespace {

// Philox4x64-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011).
constexpr uint64_t factors[2] = {0xD2E7470EE14C6C93, 0xCA5A826395121157};
constexpr uint64_t key_steps[2] = {0x9E3779B97F4A7C15, 0xBB67AE8584CAA73B};
constexpr int rounds = 10;

struct Product {
    uint64_t high, low;
};

Product product(uint64_t a, uint64_t b) {
    const auto whole = static_cast<unsigned __int128>(a) * b;
    return {uint64_t(whole >> 64), uint64_t(whole)};
}

// The first word of what a key makes of the counter (counter, 0, 0, 0).
uint64_t first_word(uint64_t key0, uint64_t key1, uint64_t counter) {
    uint64_t words[4] = {counter, 0, 0, 0};
    for (int round = 0; round < rounds; ++round) {
        const Product a = product(words[0], factors[0]), b = product(words[2], factors[1]);
        words[0] = b.high ^ words[1] ^ key0;
        words[2] = a.high ^ words[3] ^ key1;
        words[1] = b.low;
        words[3] = a.low;
        key0 += key_steps[0];
        key1 += key_steps[1];
    }
    return words[0];
}

}  // namespace
}  // namespace inflight

// uniforms[i] of the keys (seeds[i], sequence_index) at positions[i]: multiples of 2^-53 in [0, 1).
INFLIGHT_API void inflight_uniforms(const uint64_t* seeds, uint64_t sequence_index,
                                    const uint64_t* positions, int64_t count, double* uniforms) {
    // numpy, whose generator this is to the bit, counts before it draws.
    for (int64_t i = 0; i < count; ++i)
        uniforms[i] = double(inflight::first_word(seeds[i], sequence_index, positions[i] + 1) >> 11)
                      * 0x1p-53;
}
