// The configuration of AMX's tiles.
#pragma once

#include <cstdint>

namespace inflight {
namespace {

constexpr int tile_rows = 16;

// The operand of LDTILECFG. Loading it takes as long as a dozen products: once for a call and
// thread, and rests of rows fill a tile as well. Configurations are constants of their files: GCC's
// intrinsic claims to read 8 bytes of it, so writes to a local one may vanish.
struct alignas(64) TileConfig {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
};

}  // namespace
}  // namespace inflight
