// From tiles of float to y: bias, sum with what is there, gate and up, largest logit. Compiled anew
// for each instruction set.
#pragma once

#include "common_vectors.h"
#include "linear.h"
#include "linear_partial.h"

namespace inflight {
namespace {

f32x16 silu(f32x16 x) { return x * reciprocal(1.0f + exp(-x)); }

// 0.5 x (1 + tanh(u)), u = sqrt(2 / pi) (x + 0.044715 x^3), written as x / (1 + exp(-2 u)).
f32x16 gelu_tanh(f32x16 x) {
    constexpr float two_root = 1.59576912f;  // 2 sqrt(2 / pi)
    return x * reciprocal(1.0f + exp(-two_root * (x + 0.044715f * x * x * x)));
}

// The columns of a tile's row, two vectors of them.
struct Columns {
    f32x16 left, right;
};

Columns load_columns(const float* from) { return {load(from), load(from + lanes)}; }

Columns bias_of(const Output& output, int64_t panel) {
    if (!output.bias) return {f32x16{}, f32x16{}};
    return load_columns(output.bias + panel * panel_columns);
}

template <class Value>
void store_columns(Value* to, const Columns& value, int64_t valid) {
    store_up_to(to, value.left, valid);
    store_up_to(to + lanes, value.right, valid - lanes);
}

template <bool adds, class Value>
void store_tile(const Output& output, const Place& place, const float* tile) {
    const int64_t column = place.panel * panel_columns, valid = output.columns - column;
    const Columns bias = bias_of(output, place.panel);
    auto* to = static_cast<Value*>(output.data) + place.first_row * output.columns + column;
    for (int64_t row = 0; row < place.num_rows; ++row, to += output.columns) {
        const Columns sums = load_columns(tile + row * panel_columns);
        Columns value{sums.left + bias.left, sums.right + bias.right};
        if (adds) {
            value.left += load_up_to(to, valid);
            value.right += load_up_to(to + lanes, valid - lanes);
        }
        store_columns(to, value, valid);
    }
}

template <f32x16 activation(f32x16), class Value>
void store_product(const Output& output, const Place& place, const float* tile) {
    const float* up_tile = tile + most_block_rows * panel_columns;
    const int64_t column = place.panel / 2 * panel_columns, valid = output.columns - column;
    const Columns gate_bias = bias_of(output, place.panel);
    const Columns up_bias = bias_of(output, place.panel + 1);
    auto* to = static_cast<Value*>(output.data) + place.first_row * output.columns + column;
    for (int64_t row = 0; row < place.num_rows; ++row, to += output.columns) {
        const Columns gate = load_columns(tile + row * panel_columns);
        const Columns up = load_columns(up_tile + row * panel_columns);
        const Columns value{activation(gate.left + gate_bias.left) * (up.left + up_bias.left),
                            activation(gate.right + gate_bias.right) * (up.right + up_bias.right)};
        store_columns(to, value, valid);
    }
}

// Of equal ones the lowest column wins: a thread meets its panels in ascending order.
void keep_largest(const Output& output, const Place& place, const float* tile) {
    const int64_t first = place.panel * panel_columns, rest = output.columns - first;
    const int64_t valid = rest < panel_columns ? rest : panel_columns;
    const Columns bias = bias_of(output, place.panel);
    for (int64_t row = 0; row < place.num_rows; ++row) {
        float& best = output.best[place.first_row + row];
        const Columns sums = load_columns(tile + row * panel_columns);
        const Columns logits{sums.left + bias.left, sums.right + bias.right};
        if (valid == panel_columns && !(largest(max(logits.left, logits.right)) > best)) continue;
        float values[panel_columns];
        store_columns(values, logits, panel_columns);
        for (int64_t i = 0; i < valid; ++i) {
            if (!(values[i] > best)) continue;
            best = values[i];
            output.best_ids[place.first_row + row] = int32_t(first + i);
        }
    }
}

template <class Value>
void finish_tile_as(const Output& output, const Place& place, const float* tile) {
    switch (output.finish) {
        case Finish::store: return store_tile<false, Value>(output, place, tile);
        case Finish::add: return store_tile<true, Value>(output, place, tile);
        case Finish::silu_mul: return store_product<silu, Value>(output, place, tile);
        case Finish::gelu_tanh_mul: return store_product<gelu_tanh, Value>(output, place, tile);
        case Finish::argmax: return keep_largest(output, place, tile);
    }
}

void finish_tile(const Output& output, const Place& place, const float* tile) {
    if (output.number == Number::f32)
        finish_tile_as<float>(output, place, tile);
    else
        finish_tile_as<bf16>(output, place, tile);
}

}  // namespace
}  // namespace inflight
